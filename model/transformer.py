"""The decoder: RMSNorm, grouped-query attention, SwiGLU, and a head with its loss.

Alphabet of shapes: B rows, T tokens of this pass, S keys, K wanted outputs, C width, H query heads, G key and
value heads, D features of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.block import Block
from model.cache import Cache
from model.errors import ModelError
from model.handover import hand_over
from model.kernels import Watch
from model.linear_attention import check_scheme
from model.loss import token_nll
from model.position import (
    SCHEMES,
    ContentPlan,
    Geometry,
    Modifiers,
    Places,
    Plan,
    Position,
    Span,
    temperature_factors,
)
from model.settings import ModelSettings, check_override

# Rows × V of one chunk of the head. Small enough for a CPU's cache, large enough to fill a GPU.
LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}


@contextmanager
def _trainable() -> Iterator[None]:
    """Tables outlive the pass: those made in inference mode could not be used in training after it."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class Transformer(nn.Module):
    """A LLaMA-style decoder whose only knowledge of order comes through its positional schemes.

    Args:
        settings: shape and positional scheme.
        vocab_size: V.
        train_length: length the model is trained at; sizes learned tables.
        original_length: length that stretches are measured from; the trained length unless the run
            continues a parent trained at another.
    """

    def __init__(
        self, settings: ModelSettings, vocab_size: int, train_length: int, original_length: int | None = None
    ):
        super().__init__()
        s = self.settings = settings
        self.vocab_size, self.train_length = vocab_size, train_length
        self._original_length = original_length or train_length
        self.embed = nn.Embedding(vocab_size, s.dim)
        # One instance for each kind of layer; or for each layer, where the scheme learns something in each.
        self._scheme_of_layer = [
            f"{kind}-{i}" if s.kinds[kind].per_layer else kind for i, kind in enumerate(s.layer_kinds)
        ]
        self._kind_of = dict(zip(self._scheme_of_layer, s.layer_kinds, strict=True))
        self.position = self._make_schemes(s)
        self.layers = nn.ModuleList(Block(s, s.kinds[kind]) for kind in s.layer_kinds)
        self.norm = nn.RMSNorm(s.dim, eps=s.norm_eps)
        self.head = None if s.tied else nn.Linear(s.dim, vocab_size, bias=False)
        self._compiled: Callable[..., Tensor] | None = None

    def _make_schemes(self, s: ModelSettings) -> nn.ModuleDict:
        """New instances of the schemes, by name."""
        geometry = Geometry(s.dim, s.heads, s.features, self.train_length, self._original_length, s.kv_heads)
        made = nn.ModuleDict()
        for name, kind in self._kind_of.items():
            choice = s.kinds[kind]
            if s.mixer.name == "linear":
                check_scheme(
                    "model.position" if kind == "all" else f"model.position.kinds.{kind}", choice, geometry
                )
            made[name] = SCHEMES[choice.name][1](choice, geometry)
        return made

    def initialise(self, seed: int) -> Transformer:
        """Draw all weights from `seed`; the same on every device and rank.

        Matrices: N(0, 1/fan_in), those that write to the residual stream divided by √(2·layers).
        Embeddings: N(0, 1), so that the first blocks do not drown the tokens (docs/experiments.md). The head
        is small, so that the first loss is ln V to within 1% at any width; so are tied embeddings, whose
        token would otherwise predict itself with a logit of std·C: logits stay within 0.1, that one within 2.
        Under `mup` head and tied embeddings are drawn as at its base width.
        """
        s, generator = self.settings, torch.Generator().manual_seed(seed)
        base_dim = s.mup.base_dim if s.mup else s.dim

        def draw(weight: Tensor, std: float) -> None:
            drawn = torch.randn(weight.shape, generator=generator) * std
            with torch.no_grad():
                weight.copy_(drawn)

        embedding_std = min(0.1 * base_dim**-0.5, 2 / base_dim) if s.tied else 1.0
        draw(self.embed.weight, embedding_std)
        for block in self._blocks():
            for name, weight in block.named_parameters():
                if name.startswith("attention.position."):
                    continue
                if weight.ndim == 1:
                    nn.init.ones_(weight)
                    continue
                writes = name in ("attention.wo.weight", "mlp.down.weight")
                draw(weight, weight.shape[1] ** -0.5 / (math.sqrt(2 * s.layers) if writes else 1))
            block.attention.position.initialise()
        nn.init.ones_(self.norm.weight)
        if self.head is not None:
            draw(self.head.weight, 0.1 * base_dim**-0.5)
        for scheme in self._schemes():
            scheme.initialise(generator, embedding_std)
        return self

    def reposition(self, settings: ModelSettings) -> None:
        """Go on under other settings of the positional schemes, with the same weights.

        What the schemes learn stays the same Parameter objects, so that an optimizer, DDP and gradients go on
        with them; a compiled pass is compiled once more. A cache filled before means nothing after.

        Raises:
            ModelError: `settings` differ in more than `check_override` allows.
        """
        if settings == self.settings:
            return
        check_override(self.settings, settings)
        with torch.random.fork_rng(devices=[]):  # what new instances may draw is thrown away
            schemes = self._make_schemes(settings)
            modifiers = [Modifiers(settings.kinds[kind], settings.heads) for kind in settings.layer_kinds]
        hand_over(self.position, schemes)
        for block, modifier in zip(self._blocks(), modifiers, strict=True):
            hand_over(block.attention.position, modifier)
            block.attention.position = modifier
        self.position, self.settings = schemes, settings

    def compile(self, *, by_block: bool = False, **options) -> None:
        """Compile the training pass as a whole, or `by_block` where weights come and go between blocks; in
        evaluation mode, where lengths vary, passes stay eager.

        Tables are looked up outside the compiled region and never cause a recompile.
        """
        for block in self._blocks() if by_block else []:
            block.compile(**options)
        if not by_block:
            self._compiled = torch.compile(self._forward, **options)

    def recompute_blocks(self) -> None:
        """Keep only the inputs of blocks in training passes: activation checkpointing (arXiv:1604.06174)."""
        for block in self._blocks():
            block.recompute = True

    def forward(
        self,
        tokens: Tensor,
        places: Places,
        targets: Tensor | None = None,
        cache: Cache | None = None,
        keep: int | None = None,
        watch: Sequence[Watch] | None = None,
        z_loss: float | None = None,
    ) -> Tensor:
        """Logits, or the negative log-likelihood of targets.

        Args:
            tokens: (B, T) ids.
            places: where these tokens stand.
            targets: (B, K) ids of the next token at the kept positions; −100 is not counted.
            cache: holds the tokens before these; given, the pass is for inference only.
            keep: only the last K positions go through the last layer's queries, the head and the loss; all
                by default. 0 with a cache only fills it.
            watch: one for each layer, told of its attention in this pass; for diagnostics.
            z_loss: coefficient of (ln Z)² in the gradients of the loss; see `token_nll`.

        Returns:
            (B, K, V) logits; with targets (B, K) NLL in nats, 0 where not counted, float32 or float64.
        """
        if cache is not None and torch.is_grad_enabled():
            raise ModelError("a cache is written in place: call the model under torch.no_grad()")
        for scheme in self._schemes():
            scheme.check_reach(places.reach)
        dtype = torch.float64 if self.embed.weight.dtype == torch.float64 else torch.float32
        with _trainable():
            tables = {name: self._scheme(name).tables(places, dtype) for name in self.position}
        factors = {
            kind: temperature_factors(choice, self._original_length, places, dtype)
            for kind, choice in self.settings.kinds.items()
        }
        keep = tokens.shape[1] if keep is None else keep
        run = self._compiled if self._compiled and self.training else self._forward
        return run(tokens, places, tables, factors, targets, cache, keep, watch, z_loss)

    def _forward(
        self,
        tokens: Tensor,
        places: Places,
        tables: dict[str, tuple[Tensor, ...]],
        factors: dict[str, Tensor | None],
        targets: Tensor | None,
        cache: Cache | None,
        keep: int,
        watch: Sequence[Watch] | None,
        z_loss: float | None,
    ) -> Tensor:
        keys = dict.fromkeys(self.settings.kinds, places) if cache is None else cache.advance(places)
        x = self.embed(tokens)  # (B, T, C)
        for name in self.position:
            x = self._scheme(name).embed(x, tables[name], places)
        full, last = self._spans(x, places, keys, tables, places), None
        if keep < tokens.shape[1]:
            last = self._spans(x, places, keys, tables, places.last(keep))
        for i, (block, name) in enumerate(zip(self._blocks(), self._scheme_of_layer, strict=True)):
            span, plan = (last if last and i == len(self.layers) - 1 else full)[name]
            memory, factor = None if cache is None else cache.layers[i], factors[self._kind_of[name]]
            x = block(x, span, plan, factor, memory, None if watch is None else watch[i])
        x = self.norm(x)  # (B, K, C)
        return self.logits(x) if targets is None else self._nll(x, targets, z_loss)

    def _spans(
        self,
        x: Tensor,
        new: Places,
        keys: dict[str, Places],
        tables: dict[str, tuple[Tensor, ...]],
        queries: Places,
    ) -> dict[str, tuple[Span, Plan | ContentPlan]]:
        """One span and plan per instance of a scheme: lowered once per pass, used by all its layers."""
        spans = {}
        for name in self.position:
            scheme = self._scheme(name)
            span = Span(
                new=new,
                queries=queries,
                keys=keys[self._kind_of[name]],
                batch=x.shape[0],
                heads=self.settings.heads,
                device=x.device,
                tables=tables[name],
                window=scheme.settings.window,
                sinks=scheme.settings.sinks,
                ahead=self.training and any(block.apart for block in self._blocks()),
            )
            spans[name] = span, scheme.plan(span)
        return spans

    def logits(self, x: Tensor) -> Tensor:
        """(…, C) normed states → (…, V) logits."""
        if self.settings.mup:
            x = x / self.settings.width_ratio
        out = F.linear(x, self.embed.weight if self.head is None else self.head.weight)
        cap = self.settings.logit_softcap
        return out if cap is None else cap * torch.tanh(out / cap)

    def _nll(self, x: Tensor, targets: Tensor, z_loss: float | None) -> Tensor:
        """Loss in chunks of rows: N × V float32 logits never exist at once."""

        def chunk(rows: Tensor, ids: Tensor) -> Tensor:
            return token_nll(self.logits(rows), ids, z_loss)

        rows, ids = x.flatten(0, 1), targets.flatten()
        size = max(1, LOGITS_AT_ONCE.get(x.device.type, 1 << 25) // self.vocab_size)
        if len(rows) <= size:
            return chunk(rows, ids).view(targets.shape).clone()  # FSDP2 hangs a hook on it: no view
        parts = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size], ids[start : start + size]
            if torch.is_grad_enabled():
                parts.append(checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(chunk(*part))
        return torch.cat(parts).view(targets.shape).clone()

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    def _scheme(self, name: str) -> Position:
        scheme = self.position[name]
        assert isinstance(scheme, Position)
        return scheme

    def _schemes(self) -> list[Position]:
        return [self._scheme(name) for name in self.position]

    @property
    def limit(self) -> int | None:
        """The longest input any of the schemes can place; None where there is no end."""
        limits = [scheme.limit for scheme in self._schemes() if scheme.limit is not None]
        return min(limits) if limits else None

    @property
    def follows_length(self) -> bool:
        """Whether any scheme treats tokens differently by the declared length of their sequence."""
        return any(scheme.follows_length for scheme in self._schemes()) or any(
            choice.temperature.follows_length for choice in self.settings.kinds.values()
        )

    @property
    def remembered_per_token(self) -> int:
        """Numbers that a full cache keeps of each token, over all layers: keys and values."""
        s = self.settings
        keys = [self._scheme(name).key_features for name in self._scheme_of_layer]
        return s.kv_heads * sum(width + s.features for width in keys)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int) -> float:
        """Training FLOPs per token in sequences of `length` tokens: 6 per matmul weight (head included,
        embedding lookup not), and what the mixers do with pairs of tokens."""
        s = self.settings
        weights = sum(p.numel() for p in self.layers.parameters() if p.ndim == 2)
        weights += self.vocab_size * s.dim
        flops = 6.0 * weights
        return flops + sum(block.attention.pair_flops(length) for block in self._blocks())
