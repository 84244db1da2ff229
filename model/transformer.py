"""The decoder: RMSNorm, grouped-query attention, SwiGLU, output head and loss.

Shapes: B rows, T tokens of this pass, S keys, K outputs, C width, H query heads, G key/value heads,
D head dimension, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from errors import ModelError
from model.attention.kernels import AttentionHook
from model.attention.mask import joined, mask_dtype
from model.block import Block, Checkpointing, RMSNorm
from model.cache import Cache, CacheIndex
from model.carried_state import CarriedState
from model.loss import OutputHead, product_dtype, summed_nll, token_nll
from model.mixers import MIXERS
from model.mixers.mixer import AttentionPass
from model.model_settings import ModelSettings, check_override
from model.position import SCHEMES, AttentionContext, PositionalScheme
from model.sharding import ContextShard, ShardedWindow
from model.token_positions import TokenPositions

Hooks = Sequence[AttentionHook | None]  # one for each layer
Reduction = Literal["none", "sum"]  # reduction of the negative log-likelihood


def transfer_parameters(old: nn.Module, new: nn.Module) -> None:
    """Assign the Parameter objects of `old`, and its training mode, to `new`.

    Raises:
        ModelError: names or shapes of the parameters differ.
    """

    def shapes(module: nn.Module) -> dict[str, torch.Size]:
        return {name: weight.shape for name, weight in module.named_parameters()}

    if shapes(old) != shapes(new):
        raise ModelError(
            "these model.position settings change the parameters and cannot be overridden after "
            "training"
        )
    for name, weight in list(old.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(new.get_submodule(owner), leaf, weight)
    new.train(old.training)


@dataclass(frozen=True)
class TokenChunk:
    """Consecutive tokens of a pass.

    Attributes:
        tables: tables of each scheme instance; see `PositionalScheme.tables`.
        factors: temperature factors by layer kind, (B or 1, H or 1, T or 1).
    """

    positions: TokenPositions
    tables: dict[str, tuple[Tensor, ...]]
    factors: dict[str, Tensor | None]


class Recordings(list):
    """The recordings that decoding keeps between generations: see `model/decoding/static.py`.
    Copies of this list are empty."""

    def __reduce__(self):
        return type(self), ()


class Transformer(nn.Module):
    """A LLaMA-style decoder. Only its positional schemes encode token order.

    Args:
        settings: model sizes and positional schemes.
        vocab_size: V.
        train_length: trained length in tokens; size of learned tables.
        original_length: reference length L0 of scaling methods; the trained length, unless the run
            continues a parent that was trained at another length.

    Attributes:
        casts_residual: under autocast, the residual stream has the autocast dtype instead of the
            dtype of the embedding.
    """

    def __init__(
        self,
        settings: ModelSettings,
        vocab_size: int,
        train_length: int,
        original_length: int | None = None,
    ):
        super().__init__()
        s = self.settings = settings
        self.vocab_size = vocab_size
        self.train_length = train_length
        self.original_length = original_length or train_length
        self.embed = nn.Embedding(vocab_size, s.dim)
        self.kinds = s.resolved_kinds
        # The name of each layer's scheme instance, one per kind or per layer, and their kinds.
        self.layer_schemes = [
            f"{kind}-{i}" if self.kinds[kind].position.per_layer else kind
            for i, kind in enumerate(s.layer_kinds)
        ]
        self.kind_of = dict(zip(self.layer_schemes, s.layer_kinds, strict=True))
        self.position = self._make_schemes(s)
        blocks = nn.ModuleList(Block(s, self.kinds[kind]) for kind in s.layer_kinds)
        self.layers = cast(list[Block], blocks)
        self.norm = RMSNorm(s.dim, eps=s.norm_eps)
        self.head = None if s.tie_embeddings else nn.Linear(s.dim, vocab_size, bias=False)
        self.casts_residual = False
        self._compiled: Callable[..., Tensor] | None = None
        self.recordings = Recordings()

    def _make_schemes(self, s: ModelSettings) -> dict[str, PositionalScheme]:
        """New scheme instances, by layer kind or by kind and layer, in an `nn.ModuleDict`."""
        kinds = s.resolved_kinds
        made = nn.ModuleDict()
        for name, kind_name in self.kind_of.items():
            kind = kinds[kind_name]
            geometry = kind.geometry(self.train_length, self.original_length)
            MIXERS[kind.mixer.name][1].check(s.position_key(kind_name), kind, geometry)
            made[name] = SCHEMES[kind.position.name][1](kind.position, geometry)
        return cast(dict[str, PositionalScheme], made)

    def initialize(self, seed: int) -> Transformer:
        """Initialize all weights from `seed`, identically on every device and rank.

        Matrices: N(0, 1/fan_in); those that write to the residual stream are divided by
        √(2·layers). Biases: 0. Embeddings: N(0, 1), so that the first blocks do not dominate the
        token embeddings (docs/experiments.md). The head is small, so that the initial loss is ln V
        within 1% at any width. Tied embeddings are small too: a token would otherwise predict
        itself with a logit of std·C. Their logits stay within 0.1, and that logit within 2. With
        `mup`, the head and tied embeddings are initialized as at the base width.
        """
        s = self.settings
        generator = torch.Generator().manual_seed(seed)
        base_dim = s.mup.base_dim if s.mup else s.dim

        def draw(weight: Tensor, std: float) -> None:
            drawn = torch.randn(weight.shape, generator=generator) * std
            with torch.no_grad():
                weight.copy_(drawn)

        embedding_std = min(0.1 * base_dim**-0.5, 2 / base_dim) if s.tie_embeddings else 1.0
        draw(self.embed.weight, embedding_std)
        for block in self.layers:
            given = block.initial_values
            for name, weight in block.named_parameters():
                if name.startswith("attention.position."):
                    continue
                initializer = given.get(name)
                if initializer is not None:
                    with torch.no_grad():
                        weight.copy_(initializer(weight.shape, generator))
                elif weight.ndim == 1:
                    nn.init.constant_(weight, 0.0 if name.endswith(".bias") else 1.0)
                else:
                    is_output = name in ("attention.wo.weight", "mlp.down.weight")
                    divisor = math.sqrt(2 * s.layers) if is_output else 1
                    draw(weight, weight.shape[1] ** -0.5 / divisor)
            block.mixer.position.initialize()
        nn.init.ones_(self.norm.weight)
        if self.head is not None:
            draw(self.head.weight, 0.1 * base_dim**-0.5)
        for scheme in self.position.values():
            scheme.initialize(generator, embedding_std)
        return self

    def train(self, mode: bool = True) -> Transformer:
        """Set the mode. Training drops the recordings of decoding, because it needs their
        memory."""
        if mode:
            self.recordings.clear()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        self.recordings.clear()  # they are for another device or dtype
        return super()._apply(fn, recurse)

    def reposition(self, settings: ModelSettings) -> None:
        """Change the settings of the positional schemes and keep the weights.

        The schemes keep their Parameter objects, so optimizers, DDP and gradients stay valid. A
        compiled pass is recompiled. Existing caches become invalid.

        Raises:
            ModelError: `settings` contain a change that `check_override` does not allow.
        """
        if settings == self.settings:
            return
        check_override(self.settings, settings)
        self.recordings.clear()  # recordings of other schemes are never used again
        kinds = settings.resolved_kinds
        with torch.random.fork_rng(devices=[]):  # new instances must not advance the RNG
            schemes = self._make_schemes(settings)
            modifiers = [kinds[name].modifiers() for name in settings.layer_kinds]
        for name, scheme in schemes.items():
            transfer_parameters(self.position[name], scheme)
        for block, modifier in zip(self.layers, modifiers, strict=True):
            transfer_parameters(block.mixer.position, modifier)
            block.mixer.position = modifier
        self.position = schemes
        self.settings = settings
        self.kinds = kinds

    def compile(self, *, by_block: bool = False, cuda_graphs: bool = False, **options) -> None:
        """Compile the training pass as a whole, or each block if weights are gathered between
        blocks (FSDP). Evaluation, with its varying lengths, stays eager.

        Table look-ups are outside the compiled region and never cause a recompile.

        Args:
            cuda_graphs: record the passes of each shape as CUDA graphs. A pass overwrites the
                outputs and gradients of the pass before.
        """
        # Settings are constants. As inputs of the graph, floats could not be read in the
        # checkpoints of the loss.
        torch._dynamo.config.specialize_float = True
        if cuda_graphs:
            options |= {"dynamic": False, "options": {"triton.cudagraphs": True}}
        if not by_block:
            compiled = torch.compile(self.forward_chunks, **options)

            def recorded(*args, **keys) -> Tensor:
                torch.compiler.cudagraph_mark_step_begin()
                return compiled(*args, **keys)

            self._compiled = recorded if cuda_graphs else compiled
            return
        for block in self.layers:
            block.compile(**options)

    def make_cache(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype | None = None,
    ) -> Cache:
        """An empty cache for `batch` rows of at most `capacity` tokens.

        Args:
            dtype: dtype of keys and values; None: the dtype of the weights. States are float32 or
                float64.
        """
        indices = {
            name: CacheIndex(capacity, kind.position.window, kind.position.sinks)
            for name, kind in self.kinds.items()
            if MIXERS[kind.mixer.name][1].has_attention_weights
        }
        dtype = dtype or self.embed.weight.dtype
        layers = [
            block.mixer.make_cache(indices.get(kind), dtype)
            for block, kind in zip(self.layers, self.settings.layer_kinds, strict=True)
        ]
        return Cache(batch, capacity, list(self.kinds), indices, layers, self.depends_on_length)

    def checkpoint_blocks(self, checkpointing: Checkpointing) -> None:
        """Recompute activations of blocks in the backward pass: activation checkpointing
        (arXiv:1604.06174). Call it before `compile`.
        """
        for block in self.layers:
            block.checkpointing = checkpointing

    def forward(
        self,
        tokens: Tensor,
        positions: TokenPositions | None = None,
        targets: Tensor | None = None,
        cache: Cache | CarriedState | None = None,
        keep: int | None = None,
        hooks: Hooks | None = None,
        reduction: Reduction = "none",
        z_loss: float | None = None,
        shard: ContextShard | None = None,
    ) -> Tensor:
        """Logits, or the negative log-likelihood of targets.

        Args:
            tokens: (B, T) ids.
            positions: order, position and document of these tokens; with `shard`, of whole windows.
                None: 0, 1, 2, ... after the tokens in the cache.
            targets: (B, K) next-token ids of the last K tokens; −100 is ignored.
            cache: the preceding tokens: a cache, without gradients, or the state that training
                carries from the previous window.
            keep: compute outputs for the last K of these tokens only (default: all). 0 only fills
                the cache.
            hooks: one attention hook per layer, for diagnostics; None for layers without.
            reduction: reduction of the negative log-likelihood. With "sum", training needs no
                memory for the logits of all tokens.
            z_loss: coefficient of the z-loss; see `summed_nll`. With reduction "sum" only.
            shard: tokens and targets are this part of windows that the ranks of a group share. All
                ranks of the group must call the model, and its backward pass, alike. In evaluation
                mode and without gradients, memory is that of this rank's hidden states and the keys
                of one layer.

        Returns:
            (B, K, V) logits, or with targets the (B, K) NLL in nats or its sum, float32 or float64,
            0 if ignored.
        """
        if isinstance(cache, Cache) and torch.is_grad_enabled():
            raise ModelError("the cache is updated in place: call the model under torch.no_grad()")
        is_streamed = shard is not None and not (self.training or torch.is_grad_enabled())
        if shard is not None and (cache is not None or (keep is not None and not is_streamed)):
            raise ModelError(
                "windows that are sharded over processes have no cache, and outputs of the last "
                "tokens only in evaluation mode under torch.no_grad()"
            )
        if hooks is not None and len(hooks) != len(self.layers):
            raise ModelError(f"{len(hooks)} hooks for {len(self.layers)} layers: give one for each")
        for block, hook in zip(self.layers, hooks or [None] * len(self.layers), strict=True):
            if hook is not None and not block.mixer.has_attention_weights:
                raise ModelError(
                    "layers without softmax attention have no attention weights for hooks"
                )
        if z_loss is not None and (targets is None or reduction != "sum"):
            raise ModelError(
                'z_loss changes the gradient of the sum only: give targets and reduction="sum"'
            )
        if positions is None:
            if shard is not None:
                raise ModelError("windows that are sharded over processes require positions")
            count, device = tokens.shape[1], tokens.device
            if isinstance(cache, Cache):
                positions = cache.next_positions(count, device)
            else:
                positions = TokenPositions.plain(count, device=device)
        keep = tokens.shape[1] if keep is None else keep
        window = shard and ShardedWindow(shard, positions, is_streamed)
        if window and is_streamed:
            x = self._stream(tokens, window, keep, hooks)
            return self._outputs(x, targets, reduction, z_loss)
        own = window.own if window else [positions]
        run = self._compiled if self._compiled and self.training else self.forward_chunks
        return run(
            tokens,
            [self.prepare(new) for new in own],
            targets=targets,
            cache=window or cache,
            keep=keep,
            hooks=hooks,
            reduction=reduction,
            z_loss=z_loss,
        )

    def prepare(self, positions: TokenPositions) -> TokenChunk:
        """Tables and temperature factors of these tokens. Runs eagerly.

        Raises:
            ModelError: a scheme does not support these positions.
        """
        dtype = mask_dtype(self.embed.weight)
        tables = {}
        for name, scheme in self.position.items():
            scheme.check(positions)
            tables[name] = scheme.tables(positions, dtype)
        factors = {}
        for name, kind in self.kinds.items():
            settings = kind.position
            factors[name] = settings.temperature.query_factors(
                positions,
                settings.max_visible,
                self.original_length,
                dtype,
            )
        return TokenChunk(positions, tables, factors)

    def forward_chunks(
        self,
        tokens: Tensor,
        chunks: list[TokenChunk],
        *,
        targets: Tensor | None,
        cache: Cache | CarriedState | ShardedWindow | None,
        keep: int,
        hooks: Hooks | None,
        reduction: Reduction,
        z_loss: float | None,
    ) -> Tensor:
        """`forward` with prepared chunks of tokens; torch.compile traces it."""
        sequence = None
        is_carried = isinstance(cache, CarriedState)
        if isinstance(cache, ShardedWindow):
            keys = self._sharded_keys(cache)
            sequence = cache.positions
        elif cache is not None:
            keys = [cache.advance(chunks[0].positions)]
        else:
            keys = [dict.fromkeys(self.kinds, chunks[0].positions)]
        x = self._embed(tokens, chunks)  # (B, T, C)
        batch = len(x)
        passes = [
            self.passes(batch, chunk, visible, sequence=sequence, is_carried=is_carried)
            for chunk, visible in zip(chunks, keys, strict=True)
        ]
        last_passes = passes
        if keep < tokens.shape[1] and not self._needs_every_output:
            queries = chunks[0].positions.last(keep)
            last_passes = [
                self.passes(batch, chunks[0], keys[0], queries, sequence, is_carried=is_carried)
            ]

        def passes_of(name: str, is_last: bool) -> list[AttentionPass]:
            return [each[name] for each in (last_passes if is_last else passes)]

        x = self._through_layers(x, passes_of, cache, hooks, keep)
        return self._outputs(x, targets, reduction, z_loss)

    @property
    def _needs_every_output(self) -> bool:
        """Whether the MLP of a token reads the outputs of the token mixer for earlier tokens."""
        return not {"C", "D"}.isdisjoint(self.settings.canon)

    def _through_layers(
        self,
        x: Tensor,
        passes_of: Callable[[str, bool], Iterable[AttentionPass]],
        cache: Cache | CarriedState | ShardedWindow | None,
        hooks: Hooks | None,
        keep: int,
    ) -> Tensor:
        """The embeddings x (B, T, C) → normalized hidden states (B, K, C) of the last `keep`
        tokens.

        Args:
            passes_of: returns the passes of a scheme instance, from its name and whether they are
                for the last layer.
        """
        if self.casts_residual:
            x = x.to(product_dtype(x))
        last = len(self.layers) - 1
        if cache is None or isinstance(cache, ShardedWindow):
            layer_caches = [cache] * len(self.layers)  # all layers receive the sharded window
        else:
            layer_caches = cache.layers
        for i, block in enumerate(self.layers):
            hook = None if hooks is None else hooks[i]
            x = block(x, passes_of(self.layer_schemes[i], i == last), layer_caches[i], hook)
        return self.norm(x[:, x.shape[1] - keep :])

    def _stream(
        self,
        tokens: Tensor,
        window: ShardedWindow,
        keep: int,
        hooks: Hooks | None,
    ) -> Tensor:
        """Normalized hidden states (B, K, C) of the last K of this rank's tokens. Tables and masks
        are created anew for each chunk and layer: those of all chunks would take more memory than
        the keys."""
        for scheme in self.position.values():
            scheme.check(window.positions)  # raises on every rank alike
        chunks = list(zip(window.own, self._sharded_keys(window), window.last(keep), strict=True))

        def passes(name: str, is_last: bool) -> Iterator[AttentionPass]:
            for new, keys, last in chunks:
                chunk = self.prepare(new)
                queries = last if is_last and not self._needs_every_output else new
                made = self.passes(len(x), chunk, keys, queries, window.positions, [name])
                yield made[name]

        x = self.embed_tokens(tokens)
        for part, new in zip(window.split(x), window.own, strict=True):
            part.copy_(self.embed_chunk(part, self.prepare(new)))
        return self._through_layers(x, passes, window, hooks, keep)

    def _sharded_keys(self, window: ShardedWindow) -> list[dict[str, TokenPositions]]:
        """The positions of the keys by layer kind, for each of this rank's chunks."""
        by_kind = {}
        for name, kind in self.kinds.items():
            has_keys = MIXERS[kind.mixer.name][1].has_attention_weights
            by_kind[name] = window.keys(kind.position) if has_keys else window.own
        return [{kind: keys[i] for kind, keys in by_kind.items()} for i in range(len(window.own))]

    def _embed(self, tokens: Tensor, chunks: list[TokenChunk]) -> Tensor:
        """Embeddings (B, T, C) of the tokens of all chunks, with positions."""
        x = self.embed_tokens(tokens)
        if len(chunks) == 1:  # not a view: blocks that compile alone share one graph
            return self.embed_chunk(x, chunks[0])
        parts = x.split([chunk.positions.count for chunk in chunks], dim=1)
        return joined([self.embed_chunk(*each) for each in zip(parts, chunks, strict=True)], 1)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """The token embeddings (B, T, C), without positions."""
        x = self.embed(tokens)
        multiplier = self.settings.embedding_multiplier
        return x if multiplier == 1 else x * multiplier

    def embed_chunk(self, x: Tensor, chunk: TokenChunk) -> Tensor:
        """The token embeddings x (B, T, C) of a chunk, with positions."""
        for name, scheme in self.position.items():
            x = scheme.embed(x, chunk.tables[name], chunk.positions)
        return x

    def passes(
        self,
        batch: int,
        chunk: TokenChunk,
        keys: dict[str, TokenPositions],
        queries: TokenPositions | None = None,
        sequence: TokenPositions | None = None,
        names: Sequence[str] | None = None,
        is_carried: bool = False,
    ) -> dict[str, AttentionPass]:
        """The pass of each scheme instance over a chunk of tokens, shared by its layers.

        Args:
            keys: positions of the keys by layer kind.
            queries: the last tokens of the chunk; None: all of them.
            sequence, is_carried: see `AttentionContext`.
            names: names of the scheme instances; None: all.
        """
        passes = {}
        is_isolated = self.training and any(block.is_isolated for block in self.layers)
        block_masks: dict[str, dict] = {kind: {} for kind in self.kinds}
        for name in names or self.position:
            kind = self.kind_of[name]
            scheme = self.position[name]
            context = AttentionContext(
                new=chunk.positions,
                queries=chunk.positions if queries is None else queries,
                keys=keys[kind],
                batch=batch,
                heads=self.kinds[kind].heads,
                device=self.embed.weight.device,
                tables=chunk.tables[name],
                window=scheme.settings.window,
                sinks=scheme.settings.sinks,
                precompute=is_isolated,
                block_masks=block_masks[kind],
                sequence=sequence,
                is_carried=is_carried,
            )
            factors = chunk.factors[kind]
            if factors is not None and factors.shape[2] > 1:
                factors = context.of_queries(factors, dim=2)
            passes[name] = AttentionPass(context, scheme.plan(context), factors)
        return passes

    def _outputs(
        self,
        x: Tensor,
        targets: Tensor | None,
        reduction: Reduction,
        z_loss: float | None,
    ) -> Tensor:
        """See `forward`, from normalized hidden states x (B, K, C)."""
        if targets is None:
            return self.logits(x)
        x = self._head_input(x)
        if reduction == "sum":
            return summed_nll(self.output_head, x, targets, z_loss)
        return token_nll(self.output_head, x, targets)

    def logits(self, x: Tensor) -> Tensor:
        """(…, C) normalized hidden states → (…, V) logits."""
        return self.output_head(self._head_input(x))

    @property
    def output_head(self) -> OutputHead:
        s = self.settings
        weight = self.embed.weight if self.head is None else self.head.weight
        return OutputHead(weight, s.logit_divisor, s.logit_softcap)

    def _head_input(self, x: Tensor) -> Tensor:
        return x / self.settings.width_ratio if self.settings.mup else x

    @property
    def limit(self) -> int | None:
        """The longest input that all schemes support; None: unlimited."""
        return min((s.limit for s in self.position.values() if s.limit is not None), default=None)

    @property
    def depends_on_length(self) -> bool:
        """Whether any scheme depends on the declared sequence length."""
        parts = [kind.position.temperature for kind in self.kinds.values()]
        return any(part.depends_on_length for part in [*parts, *self.position.values()])

    def cached_numbers(self, tokens: int) -> int:
        """Numbers in the cache of one row of `tokens` tokens, over all layers."""
        layers = zip(self.layers, self.layer_schemes, strict=True)
        keys = sum(
            block.mixer.cached_numbers(tokens, self.position[name].key_features)
            for block, name in layers
        )
        canons = [layer for block in self.layers for layer in block.canons.values()]
        return keys + sum(layer.cached_numbers for layer in canons)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int) -> float:
        """Training FLOPs per token in sequences of `length` tokens: 6 per matrix weight (with the
        head, without the embedding), plus the pairwise FLOPs of the mixers."""
        s = self.settings
        weights = sum(p.numel() for block in self.layers for p in block.parameters() if p.ndim == 2)
        weights += self.vocab_size * s.dim
        flops = 6.0 * weights
        return flops + sum(block.mixer.pair_flops(length) for block in self.layers)
