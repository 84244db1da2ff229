"""Which queries meet which keys in a pass, and what a scheme asks to be done with each pair.

Rules and biases are elementwise over indices; here they are evaluated for blocks of queries and keys.
`model/kernels.py` turns them into attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

# Arguments are INDICES (batch row, head, query, key), as in FlexAttention; what they index is captured.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # may this pair be compared?
Bias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # what is added to its logit
Distance = Callable[[Tensor, Tensor], Tensor]  # (head, distance) -> what is added to the logit

QUERY_BLOCK = 256


def mask_dtype(x: Tensor) -> torch.dtype:
    """Biases stay float32 beside half-precision queries: in bfloat16 distances collapse past 256."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def precise(x: Tensor) -> Tensor:
    """x in float32, or as it is in float64, whatever autocast would have."""
    return x.to(mask_dtype(x))


def repeated(x: Tensor, heads: int) -> Tensor:
    """(B, G, S, D) → (B, H, S, D): each key and value head serves H / G query heads in a row."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Weights (B, H, t, s) of logits (B, H, t, s), beside one more column of logit sink (H,) whose weight is
    lost."""
    if sink is None:
        return logits.softmax(-1)
    column = sink.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class Band:
    """Visibility known on the host: query i sees keys j with i + offset − window < j ≤ i + offset, and the
    first `sinks` keys."""

    offset: int
    window: int | None = None
    sinks: int = 0

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """The range of keys that any query in [start, stop) may see, sinks apart."""
        low = 0 if self.window is None else max(0, start + self.offset - self.window + 1)
        return low, stop + self.offset


@dataclass(frozen=True)
class Pairs:
    """Which queries meet which keys in one pass, and what is added to their logits.

    Attributes:
        rule, bias: elementwise over indices.
        separation: elementwise over (row, query, key): query position − key position.
        band: where the layout is plain, what keys a block of queries can see at all, known on the host.
        is_band: the rule is the band and nothing more.
        distance: the bias again, where it depends on unit-step distance alone.
        rows: rows whose pairs differ: 1, or one for each sequence.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device
    rule: Rule
    separation: Callable[[Tensor, Tensor, Tensor], Tensor]
    bias: Bias | None = None
    band: Band | None = None
    is_band: bool = False
    distance: Distance | None = None
    rows: int = 1
    # Lowered forms, made once per pass; functools.cached_property takes a lock, which torch.compile refuses.
    _lowered: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_causal_only(self) -> bool:
        """Nothing but causality is asked for, so the fused causal kernel applies."""
        if self.band is None or not self.is_band or self.bias is not None:
            return False
        return self.band.window is None or self.band.window >= self.keys

    @property
    def is_by_distance(self) -> bool:
        """The mask is one number per unit-step distance (and head)."""
        return self.is_band and self.sinks == 0 and (self.bias is None or self.distance is not None)

    @property
    def sinks(self) -> int:
        """Leading keys that queries beyond the window still see."""
        return 0 if self.band is None or self.band.window is None else self.band.sinks

    def keys_of(self, start: int, stop: int) -> slice | Tensor:
        """The keys that any of these queries may see, as an index."""
        if self.band is None:
            return slice(0, self.keys)
        low, high = self.band.keys(start, stop)
        if low <= self.sinks:
            return slice(0 if self.sinks else low, high)
        if not self.sinks:
            return slice(low, high)
        sinks, near = torch.arange(self.sinks), torch.arange(low, high)
        return torch.cat([sinks, near]).to(self.device)

    def by_distance(self) -> Tensor:
        """(H or 1, N) additive mask by falling distance: entry m is for d = S − 1 − m, −inf where hidden.

        The trailing QUERY_BLOCK − 1 entries stand for keys in the future of a block's earlier queries.
        """
        if "by_distance" not in self._lowered:
            self._lowered["by_distance"] = self._by_distance()
        return self._lowered["by_distance"]

    def _by_distance(self) -> Tensor:
        assert self.band is not None
        d = self.keys - 1 - torch.arange(self.keys + QUERY_BLOCK - 1, device=self.device)
        hidden = d < 0 if self.band.window is None else (d < 0) | (d >= self.band.window)
        if self.distance is None:
            values = torch.zeros(1, len(d), device=self.device)
        else:
            heads = torch.arange(self.heads, device=self.device)
            values = self.distance(heads[:, None], d.clamp(min=0)[None, :])
        return values.masked_fill(hidden, -math.inf)

    def block_mask(self, make: Callable[..., BlockMask]) -> BlockMask:
        """FlexAttention's form of the rule, made once per pass."""
        if "block_mask" not in self._lowered:
            rows = None if self.rows == 1 else self.batch
            mask = make(self.rule, rows, None, self.queries, self.keys, device=self.device)
            self._lowered["block_mask"] = mask
        return self._lowered["block_mask"]

    def indices(self, start: int, stop: int, keys: slice | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row (R, 1, 1, 1), head (1, H, 1, 1), query (1, 1, t, 1) and key (1, 1, 1, s) of a block."""
        b = torch.arange(self.rows, device=self.device)[:, None, None, None]
        h = torch.arange(self.heads, device=self.device)[None, :, None, None]
        i = torch.arange(start, stop, device=self.device)[None, None, :, None]
        if isinstance(keys, slice):
            keys = torch.arange(keys.start, keys.stop, device=self.device)
        return b, h, i, keys[None, None, None, :]

    def seen(self, start: int, stop: int, keys: slice | Tensor) -> Tensor:
        """(R, 1, t, s) which pairs of a block are compared."""
        b, h, i, j = self.indices(start, stop, keys)
        return self.rule(b, h[:, :1], i, j)

    def mask(self, start: int, stop: int, keys: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """(R, H or 1, t, s) additive mask of one block, evaluated elementwise."""
        seen = self.seen(start, stop, keys)
        if self.bias is None:
            return torch.zeros((), dtype=dtype, device=self.device).masked_fill(~seen, -math.inf)
        return self.bias(*self.indices(start, stop, keys)).to(dtype).masked_fill(~seen, -math.inf)


@dataclass(frozen=True)
class View:
    """Queries and keys in the form in which a scheme wants these pairs compared.

    `weigh` and `extra` are the second door, for what is not softmax(q·k + bias) v: `weigh` gives the weights
    of a block, `extra` what is added to the weighted values. A view that weighs stands alone.
    """

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    pairs: Pairs
    weigh: Callable[[Block], Tensor] | None = None  # → (B, H, t, s)
    extra: Callable[[Block, Tensor], Tensor] | None = None  # → (B, H, t, D of the values)


class Block:
    """Some queries of a view and the keys they may see, in float32 or float64.

    Attributes:
        start, stop: the queries' indices in the pass.
        keys: index of the keys among all keys of the pass, a slice or a tensor.
        q: (B, H, t, D); k: (B, H, s, D).
        scale: the factor on q·k.
        logits: (B, H, t, s) what the softmax was taken of, −inf where hidden; kept where that is asked for.
    """

    def __init__(
        self,
        view: View,
        start: int,
        stop: int,
        keys: slice | Tensor,
        scale: float,
        sink: Tensor | None = None,
        keep_logits: bool = False,
    ):
        self.start, self.stop, self.keys, self.scale, self.pairs = start, stop, keys, scale, view.pairs
        self._sink, self._keep_logits = sink, keep_logits
        self.logits: Tensor | None = None
        dtype = mask_dtype(view.q)
        self.q = view.q[:, :, start:stop].to(dtype)
        self.k = repeated(view.k[:, :, keys].to(dtype), view.pairs.heads)
        self._scores: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        """(B, H, t, s) q·k·scale of every pair, hidden ones too."""
        if self._scores is None:
            self._scores = self.q @ self.k.transpose(-1, -2) * self.scale
        return self._scores

    @property
    def seen(self) -> Tensor:
        """(R, 1, t, s) which pairs are compared."""
        return self.pairs.seen(self.start, self.stop, self.keys)

    @property
    def distance(self) -> Tensor:
        """(R, 1, t, s) query position − key position; negative for keys in the future."""
        b, _, i, j = self.pairs.indices(self.start, self.stop, self.keys)
        return self.pairs.separation(b, i, j)

    def softmax(self, logits: Tensor) -> Tensor:
        """Weights over the keys that are seen, and the layer's sink if it has one."""
        hidden = logits.masked_fill(~self.seen, -math.inf)
        if self._keep_logits:
            self.logits = hidden
        return softmax(hidden, self._sink)
