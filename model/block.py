"""One decoder layer: a token mixer and a gated MLP, with their norms."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention_hop
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from model.attention.biased import NAMESPACE
from model.attention.kernels import AttentionHook
from model.mixers import MIXERS
from model.mixers.mixer import AttentionPass, LayerKind, Mixer
from model.mixers.short_convolution import Canon
from model.model_settings import Activation, ModelSettings
from model.position import AttentionContext
from model.position.interface import Initializer
from model.sharding import ShardedWindow

Checkpointing = Literal["none", "selective", "full"]
aten = torch.ops.aten
# Operations whose outputs selective checkpointing stores: matrix products with weights, and fused
# attention. Batched products are not stored: they compute scores of all pairs.
COSTLY = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    flex_attention_hop,
}


def _policy(context: Any, operation: Any, *args: Any, **keys: Any) -> CheckpointPolicy:
    is_costly = operation in COSTLY or operation.name() == f"{NAMESPACE}::biased_attention"
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)), SwiGLU or GEGLU. Shazeer 2020 (arXiv:2002.05202).

    With a Canon layer, gate(x) and up(x) pass through it together.
    """

    def __init__(self, s: ModelSettings):
        super().__init__()
        dim, hidden, bias = s.dim, s.ffn_dim, s.mlp_bias
        self.activation = ACTIVATIONS[s.activation]
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.canon = Canon("D", 2 * hidden, s.canon_width) if "D" in s.canon else None

    def forward(self, x: Tensor, context: AttentionContext, layer_cache: Any) -> Tensor:
        gate = self.gate(x)
        up = self.up(x)
        if self.canon is not None:
            both = self.canon(torch.cat([gate, up], dim=-1), context, layer_cache)
            gate, up = both.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the wider dtype of input and weight, with outputs in the dtype of the input. Under
    autocast the residual stream may be narrower than the weights, under FSDP2 wider; the fused
    kernel requires a single dtype, and computes in float32 at least."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        weight = self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, weight, self.eps).to(x.dtype)


Norm = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Residual block: x + r·mixer(norm(x)), x + r·norm(mixer(x)) with norms of the output, or both;
    the same for the MLP. r is `residual_multiplier`. With `layer_scale`, the sum is multiplied by a
    learned number.

    Attributes:
        checkpointing: activations that are recomputed in the backward pass: none, all but the
            block's input ("full"), or all but that and the outputs of matrix products and attention
            ("selective").
    """

    def __init__(self, s: ModelSettings, kind: LayerKind):
        super().__init__()
        self.attention_norm = RMSNorm(s.dim, eps=s.norm_eps)
        self.attention: Mixer = MIXERS[kind.mixer.name][1](kind)
        self.mlp_norm = RMSNorm(s.dim, eps=s.norm_eps)
        self.mlp = GatedMLP(s)
        self.canon_a = Canon("A", s.dim, s.canon_width) if "A" in s.canon else None
        self.canon_c = Canon("C", s.dim, s.canon_width) if "C" in s.canon else None
        self.norm_placement = kind.norm_placement
        # norms of the token mixer and of the MLP; tuples, so that no norm is registered twice
        none: tuple[Norm, Norm] = nn.Identity(), nn.Identity()
        norms: tuple[Norm, Norm] = self.attention_norm, self.mlp_norm
        self.input_norms = none if kind.norm_placement == "output" else norms
        self.output_norms = none if kind.norm_placement == "input" else norms
        if kind.norm_placement == "both":
            self.attention_output_norm = RMSNorm(s.dim, eps=s.norm_eps)
            self.mlp_output_norm = RMSNorm(s.dim, eps=s.norm_eps)
            self.output_norms = self.attention_output_norm, self.mlp_output_norm
        self.residual_multiplier = s.residual_multiplier
        self.scale = nn.Parameter(torch.empty(1)) if s.layer_scale else None
        self.checkpointing: Checkpointing = "none"
        self._compiled: Callable[..., Tensor] | None = None

    @property
    def mixer(self) -> Mixer:
        """The token mixer, whose weights are stored under the name `attention`."""
        return self.attention

    @property
    def canons(self) -> dict[str, Canon]:
        """The Canon layers by name."""
        return {name: layer for name, layer in self.named_modules() if isinstance(layer, Canon)}

    @property
    def initial_values(self) -> dict[str, Initializer]:
        """Initial values by parameter name, for parameters that `Transformer.initialize` would
        initialize differently."""
        values = {f"attention.{name}": each for name, each in self.mixer.initial_values.items()}
        for name, canon in self.canons.items():
            values[f"{name}.convolution.weight"] = canon.initializer
        return values

    @property
    def is_isolated(self) -> bool:
        """Whether this block cannot share tensors created in its training pass with other
        blocks."""
        return self.checkpointing != "none" or self._compiled is not None

    def compile(self, **options) -> None:
        """Compile the training pass of this block, inside any hooks on its call."""
        # its policy applies to operations, not to compiled code
        selective = self.checkpointing == "selective"
        self._compiled = torch.compile(self._selective if selective else self._forward, **options)

    def forward(
        self,
        x: Tensor,
        passes: Iterable[AttentionPass],
        layer_cache: Any,
        hook: AttentionHook | None = None,
    ) -> Tensor:
        """x (B, T, C) → (B, K, C) for the K queries of the passes; with K = 0 the pass only fills
        the cache.

        Args:
            passes: one pass, or, if the window is sharded, one pass per chunk of x, in order. They
                may be created one at a time.
            layer_cache: keys or state before these tokens, or None; or the sharded window that x is
                a part of. x is updated in place if the window is streamed.
        """
        args = x, passes, layer_cache, hook
        recompute = self.checkpointing if self.training and torch.is_grad_enabled() else "none"
        run = self._selective if recompute == "selective" else self._forward
        if self._compiled and self.training:
            run = self._compiled
        if recompute == "full":
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
        return run(*args)

    def _selective(self, *args) -> Tensor:
        return checkpoint(
            self._forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, _policy),
        )

    def _forward(
        self,
        x: Tensor,
        passes: Iterable[AttentionPass],
        layer_cache: Any,
        hook: AttentionHook | None,
    ) -> Tensor:
        if isinstance(layer_cache, ShardedWindow):
            return layer_cache.run(self, x, passes, hook)
        (only,) = passes
        return self.chunk(x, only, layer_cache, hook)

    def chunk(
        self,
        x: Tensor,
        step: AttentionPass,
        layer_cache: Any,
        hook: AttentionHook | None,
    ) -> Tensor:
        """x (B, T, C) → (B, K, C) for the K queries of one pass."""
        inputs = self.mixer_input(x, step, layer_cache)
        if hook is None:
            mixed = self.mixer(inputs, step, layer_cache)
        else:
            mixed = self.mixer(inputs, step, layer_cache, hook)
        return self.finish(x, step, mixed, layer_cache)

    def mixer_input(self, x: Tensor, step: AttentionPass, layer_cache: Any) -> Tensor:
        """The input of the token mixer for the layer input x (B, T, C)."""
        normed = self.input_norms[0](x)
        return normed if self.canon_a is None else self.canon_a(normed, step.context, layer_cache)

    def finish(self, x: Tensor, step: AttentionPass, mixed: Tensor, layer_cache: Any) -> Tensor:
        """The layer's output for its input x (B, T, C) and the output of the token mixer (B, K,
        C)."""
        r = self.residual_multiplier
        context = step.context
        x = torch.add(context.of_queries(x), self.output_norms[0](mixed), alpha=r)
        if x.shape[1] == 0:
            return x
        normed = self.input_norms[1](x)
        if self.canon_c is not None:
            normed = self.canon_c(normed, context, layer_cache)
        update = self.output_norms[1](self.mlp(normed, context, layer_cache))
        return self.scaled(torch.add(x, update, alpha=r))

    def scaled(self, x: Tensor) -> Tensor:
        """The layer's output with its factor."""
        return x if self.scale is None else x * self.scale.to(x.dtype)
