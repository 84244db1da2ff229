"""Attention masks: which queries attend to which keys in a pass, the bias of each pair, and how
logits become weights.

`AttentionContext.mask` creates them, with the causal, document and window mask of every scheme.
Mask and bias functions are elementwise over indices. This module evaluates them for blocks of
queries and keys; `model/attention/kernels.py` computes attention with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalizer:
    """A function from logits (B, H, t, s), −inf where masked, to weights.

    Attributes:
        sink: (H,) logits of an extra key without a value, as in gpt-oss; None: no such key.
        is_sparse: entmax instead of softmax.
    """

    sink: Tensor | None = None
    is_sparse: bool = False

    @property
    def is_softmax(self) -> bool:
        """Whether weights are the softmax over the keys alone, as in fused kernels."""
        return self.sink is None and not self.is_sparse

    def __call__(self, logits: Tensor) -> Tensor:
        keys = logits.shape[-1]
        if self.sink is not None:
            column = self.sink.to(logits.dtype)[:, None, None]
            column = column.expand_as(logits[..., :1])
            logits = torch.cat([logits, column], dim=-1)
        weights = Entmax.apply(logits) if self.is_sparse else logits.softmax(-1)
        return weights[..., :keys]


SOFTMAX = Normalizer()


class Entmax(torch.autograd.Function):
    """Entmax with α = 1.5: weights max(z/2 − τ, 0)² of logits z, with τ such that they sum to 1.

    Peters, Niculae and Martins 2019 (arXiv:1905.05702), algorithm 2: τ follows from the mean and
    variance of the k largest logits, if k weights are nonzero.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        halves = (logits - logits.amax(-1, keepdim=True)) / 2
        halves = halves.clamp(min=-2)  # τ is at least −1, so the bound changes no weight
        largest = halves.sort(dim=-1, descending=True).values
        count = torch.ones_like(logits[..., :1, :]).cumsum(-1)
        mean = largest.cumsum(-1) / count
        squares = largest.square().cumsum(-1) - count * mean.square()  # squared deviations
        variance = (1 - squares) / count
        thresholds = mean - variance.clamp(min=0).sqrt()
        positive = (thresholds <= largest).sum(-1, keepdim=True)
        threshold = thresholds.gather(-1, positive - 1)  # τ
        weights = (halves - threshold).clamp(min=0).square()
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        (gradient,) = gradients
        roots = weights.sqrt()
        total = roots.sum(-1, keepdim=True)
        mean = (roots * gradient).sum(-1, keepdim=True) / total
        return roots * (gradient - mean)


# Arguments are INDICES (batch row, head, query, key), as in FlexAttention; indexed tensors are
# captured. True: the query attends to the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BiasFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # added to the logit
DistanceFunction = Callable[[Tensor, Tensor], Tensor]  # (head, distance) -> added to the logit

PRECISE = torch.float32, torch.float64
QUERY_BLOCK = 256
# for masks by distance: the CPU's fused kernel is faster with at least 768 queries
WIDE_BLOCK = 1024


def mask_dtype(x: Tensor) -> torch.dtype:
    """dtype of masks and biases: at least float32, because bfloat16 rounds distances above 256."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def precise(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it already is, independent of autocast."""
    return x.to(mask_dtype(x))


def in_32_bits(x: Tensor) -> Tensor:
    """Integers as int32, for mask and bias functions: in a kernel, int64 numbers of all pairs take
    two registers each."""
    return x if x.is_floating_point() else x.to(torch.int32)


def no_autocast(x: Tensor) -> torch.autocast:
    """A context without autocast on the device of x."""
    return torch.autocast(x.device.type, enabled=False)


def repeated(x: Tensor, heads: int) -> Tensor:
    """(B, G, S, D) → (B, H, S, D): each key/value head is shared by H / G consecutive query
    heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def by_head(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads·D) → (B, heads, T, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """The parts concatenated along `dim`; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass(frozen=True)
class BiasForms:
    """Forms of an elementwise bias that kernels evaluate faster, if it has them.

    Attributes:
        distance: the bias as a function of distance alone.
        key_sums: (B, H, S) float64 numbers c of the keys, if the bias is c_i − c_j for query i and
            key j.
        make_table: returns the bias (H, N) at whole distances, in the dtype of the parameters; for
            functions that are learned or expensive. Called once per pass on a GPU.
        make_flex: returns the bias as FlexAttention evaluates it; called once per pass, outside the
            kernel, where tables can be computed. If the kernel indexes captured tensors that
            require gradients, the backward pass adds each pair's gradient to the indexed entry;
            additions to the same entry wait for each other.
        add_gradient: maps the output (B, H, T, E) of attention, the log-sum-exp (B, H, T) of each
            query's logits, the view, the values and the scale to a copy of the output, from which
            the bias gets its gradient; `make_flex` then returns a bias without gradients.
        kernel_options: options of FlexAttention's kernel.
    """

    distance: DistanceFunction | None = None
    key_sums: Tensor | None = None
    make_table: Callable[[], Tensor] | None = None
    make_flex: Callable[[], BiasFunction] | None = None
    add_gradient: Callable[[Tensor, Tensor, AttentionView, Tensor, float], Tensor] | None = None
    kernel_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionMask:
    """The mask and bias of the query-key pairs of one pass.

    Attributes:
        mask_mod, bias: elementwise over indices.
        separation: elementwise over (row, query, key): query position − key position.
        is_plain: plain layout. Visible keys are in a band known on the host: query i attends only
            to keys j with 0 ≤ i + keys − queries − j < window, and to the first `sinks` keys.
        is_band: the mask equals the band.
        window, sinks: window of the band, and number of sinks, which require a window.
        forms: other forms of the bias.
        unit_steps: positions increase by one from key to key of a document, so distances follow
            from indices.
        document: (B or 1, S) documents of the keys.
        rows: number of distinct rows of mask and bias: 1 or the batch size.
        mask_rows: number of distinct rows of the mask alone.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device
    mask_mod: MaskFunction
    separation: Callable[[Tensor, Tensor, Tensor], Tensor]
    document: Tensor
    bias: BiasFunction | None = None
    is_plain: bool = False
    is_band: bool = False
    window: int | None = None
    sinks: int = 0
    forms: BiasForms = field(default_factory=BiasForms)
    unit_steps: bool = False
    rows: int = 1
    mask_rows: int = 1
    # The block mask, shared by all masks of a pass that differ in their bias only.
    shared: dict = field(default_factory=dict, repr=False, compare=False)
    # Lowered forms, computed once per pass. torch.compile does not support
    # functools.cached_property's lock.
    _lowered: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_causal_only(self) -> bool:
        """Plain causal attention, for which the fused causal kernel applies."""
        return self._is_causal and self.bias is None

    @property
    def is_causal_sums(self) -> bool:
        """Plain causal attention of all tokens, with a bias of differences of sums."""
        return self._is_causal and self.forms.key_sums is not None and self.queries == self.keys

    @property
    def _is_causal(self) -> bool:
        return self.is_band and (self.window is None or self.window >= self.keys)

    @property
    def is_by_distance(self) -> bool:
        """The mask is a function of unit-step distance (and head)."""
        by_index = self.forms.distance is not None and self.unit_steps
        return self.is_exact_band and (self.bias is None or by_index)

    @property
    def is_exact_band(self) -> bool:
        """The visible pairs are those of the band, without sinks."""
        return self.is_band and self.sinks == 0

    @property
    def has_biased_kernel(self) -> bool:
        """Whether `model/attention/biased.py` evaluates the bias: differences of sums and, if
        gradients are needed, learned functions of distance."""
        if self.forms.key_sums is not None:
            return self.is_exact_band
        return torch.is_grad_enabled() and self.is_by_distance and self.by_distance().requires_grad

    @property
    def distance_block(self) -> int:
        """Queries per block of a mask by distance. Narrow windows have smaller blocks, which
        contain fewer masked pairs."""
        narrow = self.window is not None and self.window < 4 * WIDE_BLOCK
        return QUERY_BLOCK if narrow else WIDE_BLOCK

    def band_of(self, start: int, stop: int) -> tuple[int, int]:
        """The range of keys in the band of any query in [start, stop), without sinks."""
        offset = self.keys - self.queries
        low = 0 if self.window is None else max(0, start + offset - self.window + 1)
        return low, stop + offset

    def keys_of(self, start: int, stop: int) -> slice | Tensor:
        """Index of the keys visible to any query in [start, stop)."""
        if not self.is_plain:
            return slice(0, self.keys)
        low, high = self.band_of(start, stop)
        if low <= self.sinks:
            return slice(0 if self.sinks else low, high)
        if not self.sinks:
            return slice(low, high)
        sinks = torch.arange(self.sinks, device=self.device)
        return torch.cat([sinks, torch.arange(low, high, device=self.device)])

    def by_distance(self) -> Tensor:
        """(H or 1, N) additive mask by decreasing distance: entry m is for d = S − 1 − m, −inf if
        masked.

        The last WIDE_BLOCK − 1 entries are for future keys, which blocks of queries contain.
        """
        return self._once("by_distance", self._by_distance)

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, which is called once per pass."""
        if name not in self._lowered:
            self._lowered[name] = compute()
        return self._lowered[name]

    def _by_distance(self) -> Tensor:
        d = self.keys - 1 - torch.arange(self.keys + WIDE_BLOCK - 1, device=self.device)
        hidden = d < 0
        if self.window is not None:
            hidden |= d >= self.window
        if self.forms.distance is None:
            values = torch.zeros(1, len(d), device=self.device)
        else:
            heads = torch.arange(self.heads, device=self.device)
            values = self.forms.distance(heads[:, None], d.clamp(min=0)[None, :])
        return values.masked_fill(hidden, -math.inf)

    @property
    def has_flex_bias(self) -> bool:
        """Whether the bias has a form of its own for FlexAttention."""
        return self.forms.make_flex is not None

    def flex_bias(self) -> BiasFunction | None:
        """The bias as FlexAttention's kernel evaluates it."""
        if self.forms.make_table is not None:
            table = self._once("table", self.forms.make_table)
            if self.learned_table() is not None:
                table = table.detach()
            return lambda b, h, i, j: table[h, self.separation(b, i, j).clamp(min=0)]
        make = self.forms.make_flex
        return self.bias if make is None else self._once("flex_bias", make)

    def learned_table(self) -> Tensor | None:
        """(H, N) bias by distance whose gradient `table_gradient` computes;
        None: there is none, or distances do not follow from indices."""
        if self.forms.make_table is None or not self.unit_steps or self.sinks:
            return None
        table = self._once("table", self.forms.make_table)
        return table if table.requires_grad else None

    def by_query(self, keys: slice | Tensor, groups: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The additive mask of each query by row and key/value head, which broadcasts to
        (B·groups, H / groups, s); computed once per pass.

        Args:
            keys: result of `keys_of` for all queries.
        """

        def compute() -> tuple[Tensor, ...]:
            if self.queries == 1 and self.is_by_distance and isinstance(keys, slice):
                mask = self.by_distance()[None, :, None, keys].to(dtype)
            else:
                mask = self.additive(0, self.queries, keys, dtype)
            rows, heads = mask.shape[:2]  # (R, H or 1, T, s)
            if heads > 1:
                mask = mask.unflatten(1, (groups, -1)).expand(self.batch, -1, -1, -1, -1)
            elif rows > 1:
                mask = mask[:, :, None].expand(-1, groups, -1, -1, -1)
            else:
                mask = mask[:, :, None]
            return mask.flatten(0, 1).unbind(2)

        return self._once("by_query", compute)

    def indices(
        self,
        start: int,
        stop: int,
        keys: slice | Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row (R, 1, 1, 1), head (1, H, 1, 1), query (1, 1, t, 1) and key (1, 1, 1, s) of a
        block."""
        b = torch.arange(self.rows, device=self.device)[:, None, None, None]
        h = torch.arange(self.heads, device=self.device)[None, :, None, None]
        i = torch.arange(start, stop, device=self.device)[None, None, :, None]
        if isinstance(keys, slice):
            keys = torch.arange(keys.start, keys.stop, device=self.device)
        return b, h, i, keys[None, None, None, :]

    def visible(self, start: int, stop: int, keys: slice | Tensor) -> Tensor:
        """(R, 1, t, s) visible pairs of a block."""
        b, h, i, j = self.indices(start, stop, keys)
        return self.mask_mod(b, h[:, :1], i, j)

    def additive(
        self,
        start: int,
        stop: int,
        keys: slice | Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """(R, H or 1, t, s) additive mask of one block, evaluated elementwise."""
        if self.bias is None:
            bias = torch.zeros((), dtype=dtype, device=self.device)
        else:
            bias = self.bias(*self.indices(start, stop, keys)).to(dtype)
        return bias.masked_fill(~self.visible(start, stop, keys), -math.inf)


@dataclass(frozen=True)
class AttentionView:
    """Transformed queries and keys, and the mask of the pairs to which they apply.

    `weights_fn` and `extra_output` implement attention other than softmax(q·k + bias) v: the first
    returns the weights of a block, the second is added to the weighted values. A view with
    `weights_fn` must be the only view. If its mask has a `flex_bias`, the weights are also
    softmax(q·k + that bias), for FlexAttention.
    """

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    mask: AttentionMask
    weights_fn: Callable[[QueryBlock], Tensor] | None = None  # → (B, H, t, s)
    # → (B, H, t, D of the values)
    extra_output: Callable[[QueryBlock, Tensor], Tensor] | None = None


class QueryBlock:
    """A block of queries of a view and the keys visible to them, in float32 or float64.

    Attributes:
        start, stop: range of the queries in the pass.
        keys: index of the keys in the pass, a slice or a tensor.
        q: (B, H, t, D); k: (B, H, s, D).
        scale: the factor on q·k.
        logits: (B, H, t, s) softmax input, −inf if masked; only with `keep_logits`.
    """

    def __init__(
        self,
        view: AttentionView,
        start: int,
        stop: int,
        keys: slice | Tensor,
        scale: float,
        normalizer: Normalizer,
        keep_logits: bool = False,
    ):
        self.start = start
        self.stop = stop
        self.keys = keys
        self.scale = scale
        self.mask = view.mask
        self._normalizer = normalizer
        self._keep_logits = keep_logits
        self.logits: Tensor | None = None
        dtype = mask_dtype(view.q)
        self.q = view.q[:, :, start:stop].to(dtype)
        self.k = repeated(view.k[:, :, keys].to(dtype), view.mask.heads)
        self._scores: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        """(B, H, t, s) q·k·scale of all pairs, including masked ones."""
        if self._scores is None:
            self._scores = self.q @ self.k.transpose(-1, -2) * self.scale
        return self._scores

    @property
    def visible(self) -> Tensor:
        """(R, 1, t, s) visible pairs."""
        return self.mask.visible(self.start, self.stop, self.keys)

    @property
    def additive(self) -> Tensor:
        """(R, 1, t, s) 0 for visible pairs, −inf for masked ones. Adding it is faster than
        `masked_fill`, whose backward pass writes all pairs."""
        return self.mask.additive(self.start, self.stop, self.keys, self.q.dtype)

    @property
    def distance(self) -> Tensor:
        """(R, 1, t, s) query position − key position; negative for keys in the future."""
        b, _, i, j = self.mask.indices(self.start, self.stop, self.keys)
        return self.mask.separation(b, i, j)

    def weights_of(self, logits: Tensor) -> Tensor:
        """Weights of the visible keys. Logits of masked pairs are finite or −inf."""
        hidden = logits + self.additive
        if self._keep_logits:
            self.logits = hidden
        return self._normalizer(hidden)
