"""Linear attention with positions: a token mixer whose cache is a sum over past tokens.

The weights are products of features, w(n, m) = a(q_n)·b(k_m), so the sums Σ b(k_m) v_mᵀ over past
tokens
replace the keys: cost and memory per decoded token do not depend on the length. Schemes can change
    token
embeddings, queries and keys, but not logits.

Su 2021 (kexue.fm/archives/8265, archives/8338); the feature elu + 1: Katharopoulos et al. 2020
(arXiv:2006.16236).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from errors import ModelError
from model.attention.kernels import AttentionHook
from model.attention.mask import AttentionMask, AttentionView, mask_dtype
from model.attention.sharding import GatheredLayer, ShardedWindow
from model.attention.softmax import Projection
from model.cache import CacheIndex, LinearLayerCache, LinearState
from model.mixers.base import AttentionPass, LayerKind, MixerSettings
from model.position import SCHEMES, AttentionContext, ContentPlan, HeadGeometry
from model.position.temperature import NoTemperature
from model.token_positions import TokenPositions

Compared = tuple[Tensor, Tensor]  # queries (B, H, K, E) and keys (B, G, T, E)


class LinearMixer(MixerSettings):
    """Linear attention: constant cost and memory per token, with sums instead of cached keys (Su
    2021)."""

    name: Literal["linear"] = "linear"
    form: Literal["numerator", "cosine"] = Field(
        "numerator",
        description="weights φ(q)·φ(k) with φ = elu + 1, positions in the numerator only; or 1 + "
        "cos(q, k)",
    )
    chunk: int = Field(64, ge=1, description="tokens per chunk; does not change the result")

    def describe(self) -> str:
        return f"linear attention ({self.form})"


class SumsCache(Protocol):
    """Stores the state of one layer."""

    def before(self, own: Callable[[], LinearState]) -> LinearState | None: ...

    def keep(self, sums: LinearState) -> None: ...


class LinearAttention(Projection):
    """Attention whose weights are products of features; R is the scheme's map of queries and keys.

    ``numerator``: o_n = Σ_m (R_n φ(q_n))·(R_m φ(k_m)) v_m / Σ_m φ(q_n)·φ(k_m) with φ = elu + 1.
    Rotated weights can be negative and sum to zero, so the denominator uses unrotated features and
    is positive. ``cosine``: weights 1 + (R_n q̂_n)·(R_m k̂_m) of unit vectors, divided by their
    sum. Vectors are normalized again after the scheme, so weights are nonnegative and an amplitude
    (as in YaRN) has no effect.

    Computed in chunks: all pairs within a chunk, sums between chunks. The chunk size does not
        change the
    result; size 1 is the recurrence. Runs in float32, or in float64 for float64 models.
    """

    def __init__(self, kind: LayerKind):
        super().__init__(kind)
        self.mixer: LinearMixer = kind.mixer

    @classmethod
    def check(cls, where: str, kind: LayerKind, geometry: HeadGeometry) -> None:
        check_scheme(where, kind, geometry)

    def make_cache(self, index: CacheIndex | None, dtype: torch.dtype) -> LinearLayerCache:
        return LinearLayerCache()

    def sharded_cache(self, window: ShardedWindow) -> GatheredSums:
        return GatheredSums(window)

    def forward(
        self,
        x: Tensor,
        step: AttentionPass,
        layer_cache: SumsCache | None,
        hook: AttentionHook | None = None,
    ) -> Tensor:
        """x (B, T, C) → (B, K, C) for the K queries of the pass."""
        context = step.context
        if hook is not None:
            raise ModelError(
                "linear attention (model.mixer.name = linear) has no attention weights; attention "
                "hooks require model.mixer.name = attention"
            )
        bound = step.plan.bind(x, None)
        read = context.of_queries(x)
        q = self.queries(read)
        k = self.keys(x)
        v = self.values(x)
        with torch.autocast(x.device.type, enabled=False):
            q, k, values = (part.to(mask_dtype(v)) for part in (q, k, v))
            q, k = (
                (positive(q), positive(k)) if self.mixer.form == "numerator" else (unit(q), unit(k))
            )
            (view,) = bound.read(q, bound.write(k))
            if self.mixer.form == "numerator":
                compared = (view.q, view.k)
                counted = (q, k)
            else:
                # Normalize again: an amplitude or a mixture of frequencies could make weights
                # negative.
                compared = (with_one(unit(view.q)), with_one(unit(view.k)))
                counted = None
            document = None if context.new.layout == "plain" else context.new.document
            before = None
            if layer_cache is not None:
                counting = compared[1] if counted is None else counted[1]
                before = layer_cache.before(
                    lambda: sums_of(compared[1], counting, values, document)
                )
            out, sums = weighted_means(
                compared,
                counted,
                values,
                mask=view.mask,
                document=document,
                before=before,
                chunk=self.mixer.chunk,
            )
        if layer_cache is not None:
            layer_cache.keep(sums)
        return self.joined(out.to(v.dtype), read)

    def pair_flops(self, length: int) -> float:
        """Training FLOPs per token without the projections: pairs within a chunk, and updates of
        the sums."""
        pairs = 12 * self.heads * self.head_dim * (min(self.mixer.chunk, length) + 1) / 2
        return pairs + 6 * (self.heads + self.kv_heads) * self.head_dim**2

    def cached_numbers(self, tokens: int, key_features: int) -> int:
        return self.kv_heads * (self.head_dim + 1) ** 2

    def workspace(self, batch: int, tokens: int, length: int, blocks: int) -> int:
        pairs = min(self.mixer.chunk, tokens)
        sums = batch * self.cached_numbers(tokens, self.head_dim)
        return 2 * batch * self.heads * tokens * pairs + 2 * (tokens // pairs + 2) * sums

    def saved_numbers(self, length: int) -> int:
        chunk = min(self.mixer.chunk, length)
        maps = 4 * (self.heads + self.kv_heads) * self.head_dim  # features of q and k
        sums = 2 * self.kv_heads * self.head_dim**2 // chunk
        return super().saved_numbers(length) + maps + self.heads * chunk + sums


def positive(x: Tensor) -> Tensor:
    """elu(x) + 1 without cancellation, which would return 0 in float32 for x below −17."""
    return x.relu() + x.clamp(max=0).exp()


def unit(x: Tensor) -> Tensor:
    """Vectors of norm 1."""
    return F.normalize(x, dim=-1)


def with_one(x: Tensor) -> Tensor:
    """Prepend a constant feature 1, so that products are 1 + x·y and sums are Σ v, Σ k vᵀ, n and Σ
    k."""
    return F.pad(x, (1, 0), value=1.0)


def weighted_means(
    compared: Compared,
    counted: Compared | None,
    v: Tensor,
    *,
    mask: AttentionMask,
    document: Tensor | None,
    before: LinearState | None,
    chunk: int,
) -> tuple[Tensor, LinearState]:
    """Σ_m w(n, m) v_m / Σ_m u(n, m) over the keys m visible to query n.

    Args:
        compared: queries and keys of the weights w.
        counted: queries and keys of the weights u in the denominator; None: the same as w.
        v: (B, G, T, D).
        mask: of the K queries, the last of the T tokens, and the T keys.
        document: (B or 1, T) documents of the keys, each contiguous; None if there is only one in
            all passes.
        before: sums over earlier tokens.
        chunk: tokens per chunk.

    Returns:
        (B, H, K, D), and the sums over all tokens of each row's last document.
    """
    q, k = compared
    counting = k if counted is None else counted[1]
    queries = q.shape[2]
    groups = k.shape[1]
    early = k.shape[2] - queries  # tokens without queries
    size = max(1, min(chunk, queries))
    count = -(-queries // size)
    index = torch.arange(count * size, device=v.device).clamp(max=max(queries - 1, 0))

    def chunks(x: Tensor) -> Tensor:  # (B, ·, K, E) → (B, ·, N, c, E), zero-padded
        return F.pad(x, (0, 0, 0, count * size - queries)).unflatten(2, (count, size))

    # Sums over earlier passes, over the tokens without queries and over each chunk, in order.
    if before is None:
        before = LinearState(
            v.new_zeros(v.shape[0], groups, 1, k.shape[3], v.shape[3]),
            v.new_zeros(v.shape[0], groups, 1, counting.shape[3]),
            None if document is None else document[:, :1],
        )
    parts = [before]
    if early:
        first = slice(0, early)
        piece = None if document is None else document[:, first]
        parts.append(sums_of(k[:, :, first], counting[:, :, first], v[:, :, first], piece))
    k_chunk, counting_chunk, v_chunk = (chunks(x[:, :, early:]) for x in (k, counting, v))
    pieces = None if document is None else document[:, early + index].unflatten(1, (count, size))
    parts.append(_summed(k_chunk, counting_chunk, v_chunk, pieces))
    past = accumulated(parts)
    known = past.of(-1 - count, -1)  # the sums before each chunk

    # Visible pairs of each chunk (R, 1, N, 1, c, c), and queries in the same document as the end of
    # the previous tokens (R, 1, N, 1, c, 1).
    row = torch.arange(mask.rows, device=v.device)[:, None, None, None]
    i = index.view(count, size, 1)
    j = early + index.view(count, 1, size)
    visible = mask.mask_mod(row, index.new_zeros(()), i, j).expand(
        mask.rows,
        count,
        size,
        size,
    )
    visible = visible[:, None, :, None]
    if pieces is None or known.document is None:
        same_document = None
    else:
        same_document = (pieces == known.document[..., None])[:, None, :, None, :, None]

    def by_group(x: Tensor) -> Tensor:  # (B, H, N, c, E) → (B, G, N, H / G, c, E)
        return x.unflatten(1, (groups, -1)).transpose(2, 3)

    def weights(q: Tensor, k: Tensor) -> Tensor:  # → (B, G, N, H / G, c, c)
        return _product(q, k.transpose(-1, -2)) * visible

    def of_past(q: Tensor) -> Tensor:
        return q if same_document is None else q * same_document

    q_chunk = by_group(chunks(q))
    within = weights(q_chunk, k_chunk)
    numerator = _product(within, v_chunk) + _product(of_past(q_chunk), known.values)
    if counted is not None:
        q_chunk = by_group(chunks(counted[0]))
        within = weights(q_chunk, counting_chunk)
    denominator = within.sum(-1, keepdim=True) + _product(of_past(q_chunk), known.keys[..., None])

    def by_head(x: Tensor) -> Tensor:  # (B, G, N, H / G, c, ·) → (B, H, K, ·)
        return x.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, :queries]

    return by_head(numerator) / by_head(denominator), past.of(-1, None)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x (B, G, N, r, c, E) times y (B, G, N, E, F), shared by the r query heads of a group."""
    return (x.flatten(3, 4) @ y).unflatten(3, x.shape[3:5])


def sums_of(
    k: Tensor,
    counting: Tensor,
    v: Tensor,
    document: Tensor | None,
) -> LinearState:
    """Sums over the tokens (B, G, T, ·) that are in the last document; `document` is (B or 1,
    T)."""
    pieces = None if document is None else document[:, None]
    return _summed(k[:, :, None], counting[:, :, None], v[:, :, None], pieces)


def _summed(
    k: Tensor,
    counting: Tensor,
    v: Tensor,
    document: Tensor | None,
) -> LinearState:
    """Sums over the tokens (B, G, N, c, ·) of each chunk that are in the chunk's last document."""
    if document is None:
        return LinearState(k.transpose(-1, -2) @ v, counting.sum(-2), None)
    last = document[..., -1:]
    own = (document == last)[:, None, :, :, None]
    return LinearState(
        k.transpose(-1, -2) @ (v * own),
        (counting * own).sum(-2),
        last[..., 0],
    )


def accumulated(parts: list[LinearState]) -> LinearState:
    """Cumulative sums over segments that end in the same document."""
    values = torch.cat([p.values for p in parts], 2)
    keys = torch.cat([p.keys for p in parts], 2)
    ends = [p.document for p in parts if p.document is not None]
    if not ends:
        return LinearState(values.cumsum(2), keys.cumsum(2), None)
    # Not a difference of cumulative sums, which would leave rounding errors of other documents.
    document = torch.cat(ends, 1)
    # (R, 1, M, M)
    same = (document[:, :, None] == document[:, None, :]).tril()[:, None].to(values.dtype)
    return LinearState(
        (same @ values.flatten(3)).view_as(values),
        same @ keys,
        document,
    )


class GatheredSums(GatheredLayer):
    """Sums of linear attention; see `LinearLayerCache`."""

    def __init__(self, window: ShardedWindow):
        super().__init__(window)
        self._sums: list[LinearState] = []  # of each chunk, in the order of the sequence

    def before(self, own: Callable[[], LinearState]) -> LinearState | None:
        """Sums over the tokens before this rank's chunk: an exclusive scan over chunks.

        Args:
            own: computes the sums over the tokens of this rank's chunk.
        """
        turn = len(self._sums) // self.shard.size
        sums = own()
        values = self._wait(self._start(sums.values, turn), turn)
        keys = self._wait(self._start(sums.keys, turn), turn)
        for v, k in zip(values, keys, strict=True):
            self._sums.append(LinearState(v, k, self._end(len(self._sums))))
        # Over all chunks, also later ones: the backward pass of a gather must run on every rank.
        scan = accumulated(self._sums)
        index = self.shard.chunks[turn]
        return scan.of(index - 1, index) if index else None

    def _end(self, index: int) -> Tensor | None:
        """(B or 1, 1) document of the last token of a chunk; None in plain layout."""
        chunk = self.window.chunk(index)
        return None if chunk.layout == "plain" else chunk.document[:, -1:]

    def keep(self, sums: LinearState) -> None:
        """Later chunks do not use these sums."""


def check_scheme(
    where: str,
    kind: LayerKind,
    geometry: HeadGeometry,
    *,
    has_queries: bool = True,
) -> None:
    """Check that a scheme works with a mixer without softmax: it adds nothing to logits.

    Args:
        where: the scheme's key in the settings, for error messages.
        has_queries: whether the mixer has queries and keys, which the scheme may change.

    Raises:
        ModelError: the scheme or one of its settings requires softmax attention.
    """
    choice = kind.position
    mixer = f"mixer.name = {kind.mixer.name}"
    for key, required, is_met in (
        ("window", "null", choice.window is None),
        ("sinks", "0", choice.sinks == 0),
        ("temperature", "{name: none}", isinstance(choice.temperature, NoTemperature)),
        ("sink_logit", "none", choice.sink_logit == "none"),
    ):
        if not is_met:
            raise ModelError(
                f"{where}.{key} is not supported by layers with {mixer}: set it to {required} or "
                "choose mixer.name = attention"
            )
    # Run two tokens through a temporary instance to find out what the scheme requires.
    with torch.device("cpu"), torch.no_grad():
        scheme = SCHEMES[choice.name][1](choice, geometry)
        positions = TokenPositions.plain(min(2, scheme.limit or 2))
        tables = scheme.tables(positions, torch.float32)
        context = AttentionContext(
            positions, positions, positions, 1, geometry.heads, torch.device("cpu"), tables
        )
        plan = scheme.plan(context)
        if isinstance(plan, ContentPlan):
            refusal = "reads the layer input"
        else:
            q = torch.ones(
                1,
                geometry.heads,
                positions.position_end,
                geometry.head_dim,
            )
            views = plan.read(q, plan.write(q[:, : geometry.kv_heads]))
            refusal = _beyond_products(views)
            if not has_queries and not torch.equal(views[0].q, q):
                refusal = "changes queries and keys"
    if refusal:
        raise ModelError(
            f"{where}: scheme '{choice.name}' {refusal}, which layers with {mixer} do not support; "
            "choose another scheme or mixer.name = attention"
        )


def _beyond_products(views: list[AttentionView]) -> str | None:
    """The requirement of these views that products of features cannot meet, or None."""
    if len(views) > 1 or any(
        view.weights_fn is not None or view.extra_output is not None for view in views
    ):
        return "transforms pairs differently by distance, or computes its own attention weights"
    if views[0].mask.bias is not None:
        return "adds a bias to the logits"
    if not views[0].mask.is_causal_only:
        return "masks past tokens"
    return None
