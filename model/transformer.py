"""The decoder: RMSNorm, grouped-query attention, SwiGLU, output head and loss.

Shapes: B rows, T tokens of this pass, S keys, K outputs, C width, H query heads, G key/value heads, D head
dimension, V vocabulary size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from errors import ModelError
from model.attention.kernels import AttentionHook
from model.attention.linear import check_scheme
from model.attention.sharding import ContextShard, ShardedWindow
from model.attention.softmax import AttentionPass, Modifiers
from model.block import Block, Checkpointing
from model.cache import Cache
from model.loss import OutputHead, summed_nll, token_nll
from model.packed import PackedBlock, PackedNorm, store_joined
from model.position import (
    SCHEMES,
    AttentionContext,
    AttentionPlan,
    ContentPlan,
    HeadGeometry,
    PositionalScheme,
    TokenPositions,
)
from model.settings import ModelSettings, check_override


def transfer_parameters(old: nn.Module, new: nn.Module) -> None:
    """Assign the Parameter objects of `old`, and its training mode, to `new`.

    Raises:
        ModelError: names or shapes of the parameters differ.
    """
    given = dict(old.named_parameters(remove_duplicate=False))
    shapes = {name: weight.shape for name, weight in given.items()}
    if shapes != {
        name: weight.shape for name, weight in new.named_parameters(remove_duplicate=False)
    }:
        raise ModelError(
            "these model.position settings change the parameters and cannot be overridden after training"
        )
    for name, weight in given.items():
        owner, _, leaf = name.rpartition(".")
        setattr(new.get_submodule(owner), leaf, weight)
    new.train(old.training)


@dataclass(frozen=True)
class TokenChunk:
    """Consecutive tokens of a pass.

    Attributes:
        tables: by scheme instance; see `PositionalScheme.tables`.
        factors: temperature factors by layer kind, (B or 1, H or 1, T or 1).
    """

    positions: TokenPositions
    tables: dict[str, tuple[Tensor, ...]]
    factors: dict[str, Tensor | None]


class Transformer(nn.Module):
    """A LLaMA-style decoder. Only its positional schemes encode token order.

    Args:
        settings: model sizes and positional schemes.
        vocab_size: V.
        train_length: trained length in tokens; size of learned tables.
        original_length: reference length L0 of scaling methods; the trained length, unless the run
            continues a parent that was trained at another length.
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
        # One instance per layer kind, or per layer if each layer has its own parameters.
        self._scheme_of_layer = [
            f"{kind}-{i}" if s.kinds[kind].per_layer else kind
            for i, kind in enumerate(s.layer_kinds)
        ]
        self._kind_of = dict(zip(self._scheme_of_layer, s.layer_kinds, strict=True))
        self.position = self._make_schemes(s)
        self._schemes = cast(dict[str, PositionalScheme], dict(self.position.items()))
        self.layers = nn.ModuleList(Block(s, s.kinds[kind]) for kind in s.layer_kinds)
        self.norm = nn.RMSNorm(s.dim, eps=s.norm_eps)
        self.head = None if s.tie_embeddings else nn.Linear(s.dim, vocab_size, bias=False)
        self._compiled: Callable[..., Tensor] | None = None
        # by their sizes; see StaticDecodePlan
        self.decoded_passes: Counter[tuple[int, ...]] = Counter()
        self.packed_blocks: list[PackedBlock] = []  # blocks for passes of one token, after `pack`

    def _make_schemes(self, s: ModelSettings) -> nn.ModuleDict:
        """New scheme instances by name."""
        geometry = HeadGeometry(
            s.dim,
            s.heads,
            s.head_dim,
            self.train_length,
            self.original_length,
            s.kv_heads,
            s.attention_scale,
        )
        made = nn.ModuleDict()
        for name, kind in self._kind_of.items():
            choice = s.kinds[kind]
            if s.mixer.name == "linear":
                check_scheme(
                    "model.position" if kind == "all" else f"model.position.kinds.{kind}",
                    choice,
                    geometry,
                )
            made[name] = SCHEMES[choice.name][1](choice, geometry)
        return made

    def initialize(self, seed: int) -> Transformer:
        """Initialize all weights from `seed`, identically on every device and rank.

        Matrices: N(0, 1/fan_in); those that write to the residual stream are divided by √(2·layers).
        Biases: 0. Embeddings: N(0, 1), so that the first blocks do not dominate the token embeddings
        (docs/experiments.md). The head is small, so that the initial loss is ln V within 1% at any width.
        Tied embeddings are small too: a token would otherwise predict itself with a logit of std·C. Their
        logits stay within 0.1, and that logit within 2. With `mup`, the head and tied embeddings are
        initialized as at the base width.
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
        for block in self.blocks:
            for name, weight in block.named_parameters():
                if name.startswith("attention.position."):
                    continue
                if weight.ndim == 1:
                    nn.init.constant_(weight, 0.0 if name.endswith(".bias") else 1.0)
                    continue
                writes = name in ("attention.wo.weight", "mlp.down.weight")
                draw(weight, weight.shape[1] ** -0.5 / (math.sqrt(2 * s.layers) if writes else 1))
            block.attention.position.initialize()
        nn.init.ones_(self.norm.weight)
        if self.head is not None:
            draw(self.head.weight, 0.1 * base_dim**-0.5)
        for scheme in self.schemes.values():
            scheme.initialize(generator, embedding_std)
        return self

    def reposition(self, settings: ModelSettings) -> None:
        """Change the settings of the positional schemes and keep the weights.

        The schemes keep their Parameter objects, so optimizers, DDP and gradients stay valid. A compiled
        pass is recompiled. Existing caches become invalid.

        Raises:
            ModelError: `settings` contain a change that `check_override` does not allow.
        """
        if settings == self.settings:
            return
        check_override(self.settings, settings)
        with torch.random.fork_rng(devices=[]):  # new instances must not advance the RNG
            schemes = self._make_schemes(settings)
            modifiers = [
                Modifiers(settings.kinds[kind], settings.heads) for kind in settings.layer_kinds
            ]
        transfer_parameters(self.position, schemes)
        for block, modifier in zip(self.blocks, modifiers, strict=True):
            transfer_parameters(block.attention.position, modifier)
            block.attention.position = modifier
        self.position = schemes
        self.settings = settings
        self._schemes = cast(dict[str, PositionalScheme], dict(schemes.items()))

    def compile(self, *, by_block: bool = False, **options) -> None:
        """Compile the training pass as a whole, or each block if weights are gathered between blocks (FSDP).
        Evaluation, with its varying lengths, stays eager.

        Table look-ups are outside the compiled region and never cause a recompile.
        """
        # Settings are constants. As inputs of the graph, floats could not be read in the checkpoints of the
        # loss.
        torch._dynamo.config.specialize_float = True
        for block in self.blocks if by_block else []:
            block.compile(**options)
        if not by_block:
            self._compiled = torch.compile(self.forward_chunks, **options)

    def pack(self) -> Transformer:
        """Store the weights as decoding reads them fastest: weights with the same input in one matrix, which
        is transposed on a CPU. Parameters keep their names, shapes and values; they become views.

        Passes of one token through a cache then use `model/packed.py`. Moving, casting or copying the
        model undoes it. No effect on the blocks of linear attention.
        """
        with torch.no_grad():
            if self.settings.mixer.name == "attention":
                self.packed_blocks = [PackedBlock(block) for block in self.blocks]
                self.packed_norm = PackedNorm(self.norm)
            if self.head is not None:
                store_joined([self.head])
        return self

    def __getstate__(self):
        """Copies and pickles are not packed: the joined weights would not be their parameters."""
        return self.__dict__ | {"packed_blocks": []}

    def _apply(self, fn, recurse=True):
        self.packed_blocks = []  # their weights are no longer the parameters
        return super()._apply(fn, recurse)

    def checkpoint_blocks(self, checkpointing: Checkpointing) -> None:
        """Recompute activations of blocks in the backward pass: activation checkpointing (arXiv:1604.06174).
        Call it before `compile`.
        """
        for block in self.blocks:
            block.checkpointing = checkpointing

    def forward(
        self,
        tokens: Tensor,
        positions: TokenPositions,
        targets: Tensor | None = None,
        cache: Cache | None = None,
        keep: int | None = None,
        hooks: Sequence[AttentionHook] | None = None,
        reduction: Literal["none", "sum"] = "none",
        z_loss: float | None = None,
        shard: ContextShard | None = None,
    ) -> Tensor:
        """Logits, or the negative log-likelihood of targets.

        Args:
            tokens: (B, T) ids.
            positions: order, position and document of these tokens; with `shard`, of whole windows.
            targets: (B, K) next-token ids of the last K tokens; −100 is ignored.
            cache: cache with the preceding tokens, for inference only.
            keep: compute outputs for the last K of these tokens only (default: all). 0 only fills the cache.
            hooks: one attention hook per layer, for diagnostics.
            reduction: of the negative log-likelihood. With "sum", training needs no memory for the logits of
                all tokens.
            z_loss: coefficient of the z-loss; see `summed_nll`. With reduction "sum" only.
            shard: tokens and targets are this part of windows that the ranks of a group share. All ranks of
                the group must call the model, and its backward pass, alike. In evaluation mode and without
                gradients, memory is that of this rank's hidden states and the keys of one layer.

        Returns:
            (B, K, V) logits, or with targets the (B, K) NLL in nats or its sum, float32 or float64, 0 if
            ignored.
        """
        if cache is not None and torch.is_grad_enabled():
            raise ModelError("the cache is updated in place: call the model under torch.no_grad()")
        streamed = shard is not None and not (self.training or torch.is_grad_enabled())
        if shard is not None and (cache is not None or (keep is not None and not streamed)):
            raise ModelError(
                "windows that are sharded over processes have no cache, and outputs of the last tokens only "
                "in evaluation mode under torch.no_grad()"
            )
        if z_loss is not None and (targets is None or reduction != "sum"):
            raise ModelError(
                'z_loss changes the gradient of the sum only: give targets and reduction="sum"'
            )
        keep = tokens.shape[1] if keep is None else keep
        if shard is not None and streamed:
            x = self._stream(tokens, ShardedWindow(shard, positions, streamed), keep, hooks)
            return self._outputs(self.norm(x), targets, reduction, z_loss)
        window = None if shard is None else ShardedWindow(shard, positions)
        chunks = [self._chunk(new) for new in ([positions] if window is None else window.own)]
        run = self._compiled if self._compiled and self.training else self.forward_chunks
        return run(tokens, chunks, targets, cache, keep, hooks, reduction, z_loss, window)

    def _chunk(self, positions: TokenPositions) -> TokenChunk:
        return TokenChunk(positions, *self.prepare(positions))

    def prepare(
        self, positions: TokenPositions
    ) -> tuple[dict[str, tuple[Tensor, ...]], dict[str, Tensor | None]]:
        """The tables of each scheme instance and the temperature factors of each layer kind. Runs eagerly.

        Raises:
            ModelError: a scheme does not support these positions.
        """
        for scheme in self.schemes.values():
            scheme.check(positions)
        dtype = torch.float64 if self.embed.weight.dtype == torch.float64 else torch.float32
        tables = {name: scheme.tables(positions, dtype) for name, scheme in self.schemes.items()}
        original = self.original_length
        factors = {
            kind: choice.temperature.query_factors(positions, choice.max_visible, original, dtype)
            for kind, choice in self.settings.kinds.items()
        }
        return tables, factors

    def forward_chunks(
        self,
        tokens: Tensor,
        chunks: list[TokenChunk],
        targets: Tensor | None,
        cache: Cache | None,
        keep: int,
        hooks: Sequence[AttentionHook] | None,
        reduction: Literal["none", "sum"],
        z_loss: float | None,
        window: ShardedWindow | None,
    ) -> Tensor:
        """`forward` with prepared chunks of tokens; torch.compile traces it."""
        new = [chunk.positions for chunk in chunks]
        if window is not None:
            keys = self._sharded_keys(window)
        elif cache is not None:
            keys = [cache.advance(new[0])]
        else:
            keys = [dict.fromkeys(self.settings.kinds, new[0])]
        x = self._embed_positions(self._embed(tokens), chunks)  # (B, T, C)
        blocks: Sequence[Block | PackedBlock] = self.blocks
        is_decoding = (
            tokens.shape[1] == keep == 1
            and cache is not None
            and hooks is None
            and bool(self.packed_blocks)
            and not torch.is_autocast_enabled(x.device.type)
        )
        if is_decoding:
            blocks = self.packed_blocks
        sequence = None if window is None else window.positions
        full = self._passes(len(x), chunks, keys, new, sequence)
        last = None
        if keep < tokens.shape[1]:
            last = self._passes(len(x), chunks, keys, [new[0].last(keep)], sequence)
        for i, (block, name) in enumerate(zip(blocks, self._scheme_of_layer, strict=True)):
            passes = (last if last and i == len(self.layers) - 1 else full)[name]
            layer_cache = None if cache is None else cache.layers[i]
            hook = None if hooks is None else hooks[i]
            x = block(x, passes, layer_cache, hook, window)
        x = self.packed_norm(x) if is_decoding else self.norm(x)  # (B, K, C)
        return self._outputs(x, targets, reduction, z_loss)

    def _stream(
        self,
        tokens: Tensor,
        window: ShardedWindow,
        keep: int,
        hooks: Sequence[AttentionHook] | None,
    ) -> Tensor:
        """Hidden states (B, K, C) of the last K of this rank's tokens. Tables and masks are created anew for
        each chunk and layer: those of all chunks would take more memory than the keys."""
        for scheme in self.schemes.values():
            scheme.check(window.positions)  # raises on every rank alike
        chunks = list(zip(window.own, self._sharded_keys(window), window.last(keep), strict=True))

        def passes(name: str, is_last: bool) -> Iterator[AttentionPass]:
            for new, keys, last in chunks:
                queries = last if is_last else new
                made = self._passes(
                    len(x), [self._chunk(new)], [keys], [queries], window.positions, [name]
                )
                yield from made[name]

        x = self._embed(tokens)
        for part, (new, *_) in zip(window.split(x), chunks, strict=True):
            part.copy_(self._embed_positions(part, [self._chunk(new)]))
        for i, (block, name) in enumerate(zip(self.blocks, self._scheme_of_layer, strict=True)):
            hook = None if hooks is None else hooks[i]
            x = block(x, passes(name, i == len(self.layers) - 1), None, hook, window)
        return x

    def _sharded_keys(self, window: ShardedWindow) -> list[dict[str, TokenPositions]]:
        """The positions of the keys by layer kind, for each of this rank's chunks."""
        s = self.settings
        by_kind = {kind: window.keys(s.mixer.name, choice) for kind, choice in s.kinds.items()}
        return [
            dict(zip(by_kind, each, strict=True)) for each in zip(*by_kind.values(), strict=True)
        ]

    def _embed(self, tokens: Tensor) -> Tensor:
        """The token embeddings (B, T, C), without positions."""
        x = self.embed(tokens)
        return (
            x if self.settings.embedding_multiplier == 1 else x * self.settings.embedding_multiplier
        )

    def _outputs(
        self,
        x: Tensor,
        targets: Tensor | None,
        reduction: Literal["none", "sum"],
        z_loss: float | None,
    ) -> Tensor:
        """See `forward`, from normalized hidden states x (B, K, C)."""
        if targets is None:
            return self.logits(x)
        head = self.output_head
        x = self._head_input(x)
        return (
            summed_nll(head, x, targets, z_loss)
            if reduction == "sum"
            else token_nll(head, x, targets)
        )

    def contexts(
        self,
        batch: int,
        new: TokenPositions,
        keys: dict[str, TokenPositions],
        tables: dict[str, tuple[Tensor, ...]],
        queries: TokenPositions,
        sequence: TokenPositions | None = None,
        names: Iterable[str] | None = None,
    ) -> dict[str, tuple[AttentionContext, AttentionPlan | ContentPlan]]:
        """Context and plan of each scheme instance (default: all), created once per pass and shared by its
        layers."""
        contexts = {}
        block_masks: dict[str, dict] = {kind: {} for kind in self.settings.kinds}
        for name in self.schemes if names is None else names:
            scheme = self.schemes[name]
            context = AttentionContext(
                new=new,
                queries=queries,
                keys=keys[self._kind_of[name]],
                batch=batch,
                heads=self.settings.heads,
                device=self.embed.weight.device,
                tables=tables[name],
                window=scheme.settings.window,
                sinks=scheme.settings.sinks,
                precompute=self.training and any(block.is_isolated for block in self.blocks),
                block_masks=block_masks[self._kind_of[name]],
                sequence=sequence,
            )
            plan = scheme.plan(context)
            if context.precompute and isinstance(plan, ContentPlan):
                context.mask()  # the layers' own masks share its block mask
            contexts[name] = context, plan
        return contexts

    def _embed_positions(self, x: Tensor, chunks: list[TokenChunk]) -> Tensor:
        """The token embeddings x (B, T, C) of the chunks, with positions."""
        parts = (
            [x]
            if len(chunks) == 1
            else x.split([chunk.positions.order.shape[1] for chunk in chunks], 1)
        )
        done = []
        for part, chunk in zip(parts, chunks, strict=True):
            for name, scheme in self.schemes.items():
                part = scheme.embed(part, chunk.tables[name], chunk.positions)
            done.append(part)
        return done[0] if len(done) == 1 else torch.cat(done, dim=1)

    def _passes(
        self,
        batch: int,
        chunks: list[TokenChunk],
        keys: list[dict[str, TokenPositions]],
        queries: list[TokenPositions],
        sequence: TokenPositions | None,
        names: Sequence[str] | None = None,
    ) -> dict[str, list[AttentionPass]]:
        """The passes of each scheme instance, one for each chunk of tokens.

        Args:
            keys: positions of the keys by layer kind, for each chunk.
            queries: for each chunk.
            sequence: see `AttentionContext`.
            names: of the scheme instances; default: all.
        """
        passes: dict[str, list[AttentionPass]] = {name: [] for name in names or self.schemes}
        for chunk, chunk_keys, chunk_queries in zip(chunks, keys, queries, strict=True):
            contexts = self.contexts(
                batch, chunk.positions, chunk_keys, chunk.tables, chunk_queries, sequence, names
            )
            for name, (context, plan) in contexts.items():
                passes[name].append(
                    AttentionPass(context, plan, chunk.factors[self._kind_of[name]])
                )
        return passes

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
    def blocks(self) -> list[Block]:
        """The layers, typed."""
        return cast(list[Block], list(self.layers))

    @property
    def layer_schemes(self) -> list[tuple[str, str]]:
        """For each layer the name of its scheme instance and its kind."""
        return [(name, self._kind_of[name]) for name in self._scheme_of_layer]

    @property
    def schemes(self) -> dict[str, PositionalScheme]:
        """The scheme instances by layer kind, or by kind and layer."""
        return self._schemes

    @property
    def limit(self) -> int | None:
        """The longest input that all schemes support; None: unlimited."""
        return min((s.limit for s in self.schemes.values() if s.limit is not None), default=None)

    @property
    def depends_on_length(self) -> bool:
        """Whether any scheme depends on the declared sequence length."""
        return any(scheme.depends_on_length for scheme in self.schemes.values()) or any(
            choice.temperature.depends_on_length for choice in self.settings.kinds.values()
        )

    @property
    def cached_per_token(self) -> int:
        """Size of the cached keys and values per token, over all layers."""
        s = self.settings
        keys = [self.schemes[name].key_features for name in self._scheme_of_layer]
        return s.kv_heads * (sum(keys) + s.layers * s.head_dim)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int) -> float:
        """Training FLOPs per token in sequences of `length` tokens: 6 per matrix weight (with the head,
        without the embedding), plus the pairwise FLOPs of the mixers."""
        s = self.settings
        weights = sum(p.numel() for p in self.layers.parameters() if p.ndim == 2)
        weights += self.vocab_size * s.dim
        flops = 6.0 * weights
        return flops + sum(block.attention.pair_flops(length) for block in self.blocks)
