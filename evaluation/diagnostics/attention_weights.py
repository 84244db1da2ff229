"""Record attention: what the last queries of a window attend to, read from the model's own
attention.

Hooks receive the views, values and scale of each layer's kernel (`Transformer.forward(hooks=)`) and
compute the weights of the same pairs in blocks of queries, so memory is linear in the length.
`mismatch` is the largest difference of the output of these weights from the kernel's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model import TokenPositions, Transformer
from model.attention.explicit import AttentionDetails, attention_details
from model.attention.kernels import AttentionHook
from model.attention.mask import AttentionView, mask_dtype, repeated

PAIRS_AT_ONCE = 1 << 22  # B·H·t·S of a block of queries
REACH = 0.9  # of the mass
ROUNDING = 1e-6  # a running sum that is this near to 90% has reached it

MEASURES = {
    "entropy": "entropy of the weights among the visible keys, nats",
    "entropy_relative": "entropy / ln(visible keys): 1 is uniform",
    "first_token": "mass on the first token of the window",
    "bos": "mass on BOS tokens, in windows that hold one",
    "mass_beyond": "mass at distances of the trained length and more",
    "mass_lost": "weight on no key: on a sink logit, or dropped",
    "logit_std": "standard deviation of the logits over the visible keys, bias included",
    "logit_max": "largest logit of a query",
    "reach_90": "distance that contains 90% of the mass, tokens",
    "distance_mean": "mean distance of the mass, tokens",
    "keys": "visible keys of a query",
    "unturned_variance": "share of the logits' variance from rotary pairs without a full turn in "
    "training",
}


def bucket_edges(longest: int, trained_length: int) -> list[int]:
    """0, 1, 2, 4, 8, ... and `longest` at the end, the trained length among them: bucket n holds
    the distances from edge n up to below edge n + 1."""
    edges = {0, trained_length}
    edge = 1
    while edge < longest:
        edges.add(edge)
        edge *= 2
    return [*sorted(edge for edge in edges if edge < longest), longest]


@dataclass(frozen=True)
class AttentionSample:
    """Measures of one batch of windows; float64 tensors on the CPU, NaN for undefined values.

    Attributes:
        values: name of a measure -> (B, layers, H), the mean over the queries.
        by_distance: (B, layers, H, buckets) mass.
        visible: (layers, buckets) the share of visible keys in each bucket: the mass of uniform
            attention.
        mismatch: largest |weights·values − output of the model's kernel|.
    """

    values: dict[str, Tensor]
    by_distance: Tensor
    visible: Tensor
    mismatch: float


class AttentionRecorder:
    """Collects one pass of the last K queries over L tokens.

    Args:
        tokens: (B, L) of the windows; BOS is looked for among them.
        edges: of the distance buckets.
        bos_id: None where there is none.
        unturned: for each layer the features (D,) of rotary pairs without a whole turn in training,
            or None.
    """

    def __init__(
        self,
        tokens: Tensor,
        keep: int,
        edges: Sequence[int],
        trained_length: int,
        bos_id: int | None,
        unturned: Sequence[Tensor | None],
    ):
        self.tokens = tokens
        self.first_query = tokens.shape[1] - keep
        self.edges = torch.tensor(list(edges), device=tokens.device)
        self.trained_length = trained_length
        self.unturned = unturned
        self.is_bos = None if bos_id is None else tokens == bos_id
        # numerators, denominators
        self.sums: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in unturned]
        self.mismatch = 0.0

    def hooks(self) -> list[AttentionHook]:
        return [functools.partial(self._record, layer) for layer in range(len(self.unturned))]

    def _record(
        self,
        layer: int,
        views: list[AttentionView],
        v: Tensor,
        scale: float,
        sink: Tensor | None,
        out: Tensor,
    ) -> None:
        mask = views[0].mask
        sums = self.sums[layer]
        size = max(1, PAIRS_AT_ONCE // (mask.batch * mask.heads * mask.keys))
        for start in range(0, mask.queries, size):
            stop = min(start + size, mask.queries)
            block = attention_details(views, v, scale, sink, start, stop, logits=True)
            off = (block.output - out[:, :, start:stop].to(block.output.dtype)).abs().max()
            self.mismatch = max(self.mismatch, float(off))
            b, _, i, j = mask.indices(start, stop, block.keys)
            distance = mask.separation(b, i, j)[:1]  # the same in every row of a plain batch
            measured = self._measured(block, distance, start)
            if (features := self.unturned[layer]) is not None:
                measured["unturned_variance"] = _variances(
                    views, block, features, scale, start, stop
                )
            for name, (value, count) in measured.items():
                total, counted = sums.get(name, (0, 0))
                sums[name] = total + value, counted + count

    def _measured(
        self, block: AttentionDetails, distance: Tensor, start: int
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums over a block of queries and the number of queries in them: (B, H), or (B, H,
        buckets)."""
        weights = block.weights
        logits = block.logits
        assert logits is not None
        # (B, H, t), (B, H, t, s)
        total = weights.sum(-1)
        finite = torch.isfinite(logits)
        attends = total > 0
        every = torch.ones_like(total, dtype=torch.bool)
        shares = weights / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
        seen = finite | (weights > 0)
        keys = seen.sum(-1)
        entropy = torch.special.entr(shares).sum(-1)
        position = self.first_query + start + torch.arange(weights.shape[2], device=weights.device)
        # (1, 1, t, s)
        first = distance == position[:, None]
        beyond = distance >= self.trained_length
        deviation = _centered(logits, finite).square().sum(-1) / finite.sum(-1).clamp(min=1)
        highest = logits.masked_fill(~finite, -torch.inf).amax(-1)
        measured = {  # of each query, and the queries that count
            "entropy": (entropy, attends),
            "entropy_relative": (entropy / keys.clamp(min=2).double().log(), attends & (keys > 1)),
            "first_token": ((weights * first).sum(-1), every),
            "mass_beyond": ((weights * beyond).sum(-1), every),
            "mass_lost": ((1 - total).clamp(min=0), every),
            "logit_std": (deviation.sqrt(), finite.any(-1)),
            "logit_max": (highest, finite.any(-1)),
            "reach_90": (_reach(shares, distance), attends),
            "distance_mean": ((shares * distance).sum(-1), attends),
            "keys": (keys, every),
        }
        if self.is_bos is not None:
            # (1, t, s) index of the key's token
            at = (position[:, None] - distance).clamp(min=0)[:, 0]
            marked = self.is_bos[:, at[0]][:, None]  # (B, 1, t, s)
            measured["bos"] = (weights * marked).sum(-1), self.is_bos.any(-1)[:, None, None] & every
        out = {
            name: (torch.where(counted, values.double(), 0.0).sum(-1), counted.sum(-1))
            for name, (values, counted) in measured.items()
        }
        index = torch.bucketize(distance.clamp(min=0), self.edges, right=True) - 1
        uniform = seen.to(weights.dtype) / keys.clamp(min=1)[..., None]
        queries = every.sum(-1)[..., None]
        for name, mass in (("by_distance", weights), ("visible", uniform)):
            out[name] = _by_bucket(mass, index, len(self.edges) - 1), queries
        return out

    def result(self) -> AttentionSample:
        """Means over all recorded queries."""

        def mean(name: str) -> Tensor:
            like = next(sums[name][0] for sums in self.sums if name in sums)
            nothing = torch.zeros_like(like), torch.zeros_like(like)  # 0 / 0 is NaN: undefined
            each = [sums.get(name, nothing) for sums in self.sums]
            return torch.stack([(value.double() / count).cpu() for value, count in each], 1)

        return AttentionSample(
            {name: mean(name) for name in MEASURES if any(name in sums for sums in self.sums)},
            mean("by_distance"),
            mean("visible").mean((0, 2)),
            self.mismatch,
        )


def _reach(shares: Tensor, distance: Tensor) -> Tensor:
    """(B, H, t) the smallest r so that keys at distances below r have 90% of the mass. Keys are
    ordered by time, so reversed they are ordered by distance; future keys have no mass."""
    running = shares.flip(-1).cumsum(-1)
    nearest = (running < REACH - ROUNDING).sum(-1, keepdim=True).clamp(max=shares.shape[-1] - 1)
    far = distance.flip(-1).expand(*shares.shape[:3], -1)
    return far.gather(-1, nearest)[..., 0] + 1


def _by_bucket(values: Tensor, index: Tensor, buckets: int) -> Tensor:
    """(B, H, t, s) → (B, H, buckets), summed over queries and keys; index (1, 1, t, s)."""
    flat = values.flatten(2)
    empty = flat.new_zeros(*flat.shape[:2], buckets)
    return empty.scatter_add(-1, index.flatten(2).expand_as(flat), flat).double()


def _centered(values: Tensor, counted: Tensor) -> Tensor:
    """Values less their mean over the counted keys, 0 elsewhere."""
    values = torch.where(counted, values, 0.0)
    mean = values.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(counted, values - mean, 0.0)


def _variances(
    views: list[AttentionView],
    block: AttentionDetails,
    features: Tensor,
    scale: float,
    start: int,
    stop: int,
) -> tuple[Tensor, Tensor]:
    """Covariance of the logits over the keys with the part of them that some features of queries
    and keys make, and their variance, summed over the queries: the parts of all features add up to
    the variance."""
    assert block.logits is not None
    part = torch.zeros_like(block.logits)
    for view in views:
        dtype = mask_dtype(view.q)
        q = view.q[:, :, start:stop].to(dtype) * features.to(view.q.device)
        k = repeated(view.k[:, :, block.keys].to(dtype), view.mask.heads)
        part = part + (q @ k.mT * scale) * view.mask.visible(start, stop, block.keys)
    finite = torch.isfinite(block.logits)
    logits = _centered(block.logits, finite).double()
    part = _centered(part, finite).double()
    return (logits * part).sum((-1, -2)), logits.square().sum((-1, -2))


@torch.no_grad()
def last_outputs(
    model: Transformer,
    tokens: Tensor,
    keep: int,
    *,
    length: int,
    chunk: int,
    hooks: Sequence[AttentionHook] | None = None,
) -> Tensor:
    """(B, keep, V) logits after the last `keep` of tokens (B, L), the ones before them prefilled in
    chunks.

    `length`: declared length of the sequence. `hooks` are called in the last pass, which has `keep`
    queries.
    """
    rows, inputs = tokens.shape
    cache = model.make_cache(rows, inputs)
    before = inputs - keep
    out = torch.empty(0)
    for start in [*range(0, before, chunk), before]:
        stop = min(before, start + chunk) if start < before else inputs
        places = TokenPositions.plain(
            stop - start, offset=start, length=length, device=tokens.device
        )
        last = stop == inputs
        out = model(
            tokens[:, start:stop],
            places,
            cache=cache,
            keep=keep if last else 0,
            hooks=hooks if last else None,
        )
    return out
