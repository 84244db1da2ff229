"""Record attention: what the last queries of a window attend to, read from the model's own attention.

The model runs as it always does; after each layer it shows the views, values and scale that its kernel was
given (`Transformer.forward(hooks=)`), and the same pairs are spelled out in blocks of queries. Memory is
linear in the length. How far the spelled-out output lies from the kernel's is kept as `mismatch`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model import Cache, TokenPositions, Transformer
from model.attention.kernels import AttentionDetails, AttentionHook, attention_details
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
    "unturned_variance": "share of the logits' variance from rotary pairs without a full turn in training",
}


def bucket_edges(longest: int, trained_length: int) -> list[int]:
    """0, 1, 2, 4, 8, ... and `longest` at the end, the trained length among them: bucket n holds the
    distances from edge n up to below edge n + 1."""
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
        visible: (layers, buckets) the share of visible keys in each bucket: the mass of uniform attention.
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
        unturned: for each layer the features (D,) of rotary pairs without a whole turn in training, or None.
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
        self.tokens, self.first_query = tokens, tokens.shape[1] - keep
        self.edges = torch.tensor(list(edges), device=tokens.device)
        self.trained_length, self.unturned = trained_length, unturned
        is_bos = None if bos_id is None else tokens == bos_id
        self.is_bos = is_bos if is_bos is not None and bool(is_bos.any()) else None
        self.sums: list[dict[str, Tensor]] = [{} for _ in unturned]
        self.mismatch = 0.0

    def hooks(self) -> list[AttentionHook]:
        return [functools.partial(self._watch, layer) for layer in range(len(self.unturned))]

    def _watch(
        self,
        layer: int,
        views: list[AttentionView],
        v: Tensor,
        scale: float,
        sink: Tensor | None,
        out: Tensor,
    ) -> None:
        pairs = views[0].pairs
        size = max(1, PAIRS_AT_ONCE // (pairs.batch * pairs.heads * pairs.keys))
        for start in range(0, pairs.queries, size):
            stop = min(start + size, pairs.queries)
            spelled = attention_details(views, v, scale, sink, start, stop, logits=True)
            off = (spelled.output - out[:, :, start:stop].to(spelled.output.dtype)).abs().max()
            self.mismatch = max(self.mismatch, float(off))
            b, _, i, j = pairs.indices(start, stop, spelled.keys)
            distance = pairs.separation(b, i, j)[:1]  # the same in every row of a plain batch
            found = self._measured(spelled, distance, start)
            features = self.unturned[layer]
            if features is not None:
                found |= _variances(views, spelled, features, scale, start, stop)
            sums = self.sums[layer]
            for name, value in found.items():
                sums[name] = sums[name] + value if name in sums else value

    def _measured(self, spelled: AttentionDetails, distance: Tensor, start: int) -> dict[str, Tensor]:
        """Sums over a block of queries, (B, H) each; `n:` the number of queries that are in a sum."""
        weights, logits = spelled.weights, spelled.logits
        assert logits is not None
        total = weights.sum(-1)  # (B, H, t)
        some = total > 0
        shares = weights / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
        seen = torch.isfinite(logits) | (weights > 0)
        keys = seen.sum(-1)
        entropy = torch.special.entr(shares).sum(-1)
        several = some & (keys > 1)
        position = self.first_query + start + torch.arange(weights.shape[2], device=weights.device)
        first = distance == position[:, None]  # (1, 1, t, s)
        index = torch.bucketize(distance.clamp(min=0), self.edges, right=True) - 1
        out = {
            "entropy": _sum(entropy, some),
            "n:entropy": some.sum(-1),
            "entropy_relative": _sum(entropy / keys.clamp(min=2).double().log(), several),
            "n:entropy_relative": several.sum(-1),
            "first_token": _sum((weights * first).sum(-1)),
            "mass_beyond": _sum((weights * (distance >= self.trained_length)).sum(-1)),
            "mass_lost": _sum((1 - total).clamp(min=0)),
            "reach_90": _sum(_reach(shares, distance), some),
            "n:reach_90": some.sum(-1),
            "distance_mean": _sum((shares * distance).sum(-1), some),
            "n:distance_mean": some.sum(-1),
            "keys": _sum(keys),
            "by_distance": _by_bucket(weights, index, len(self.edges) - 1),
            "visible": _by_bucket(
                seen.to(weights.dtype) / keys.clamp(min=1)[..., None], index, len(self.edges) - 1
            ),
            "n": torch.full(total.shape[:2], total.shape[2], device=total.device),
        }
        if self.is_bos is not None:
            at = (position[:, None] - distance).clamp(min=0)[:, 0]  # (1, t, s) index of the key's token
            marked = self.is_bos[:, at[0]][:, None]  # (B, 1, t, s)
            out["bos"] = _sum((weights * marked).sum(-1))
            out["n:bos"] = self.is_bos.any(-1)[:, None] * out["n"]
        return out | _of_logits(logits)

    def result(self) -> AttentionSample:
        """Means over all recorded queries."""

        def mean(sums: dict[str, Tensor], name: str) -> Tensor:
            count = sums.get(f"n:{name}", sums["n"])
            return (sums[name].double() / count).cpu()  # 0 / 0 is NaN: undefined

        plain = [name for name in MEASURES if name != "unturned_variance"]
        values = {
            name: torch.stack([mean(sums, name) for sums in self.sums], 1)
            for name in plain
            if all(name in sums for sums in self.sums)
        }
        if any("variance" in sums for sums in self.sums):
            nothing = torch.full_like(values["entropy"][:, 0], torch.nan)
            parts = [
                (sums["covariance"] / sums["variance"]).double().cpu() if "variance" in sums else nothing
                for sums in self.sums
            ]
            values["unturned_variance"] = torch.stack(parts, 1)

        def buckets(name: str) -> Tensor:
            return torch.stack([(s[name].double() / s["n"][..., None]).cpu() for s in self.sums], 1)

        return AttentionSample(values, buckets("by_distance"), buckets("visible").mean((0, 2)), self.mismatch)


def _sum(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, H, t) → (B, H) float64, of the queries that count."""
    values = values.double()
    return (values if counted is None else torch.where(counted, values, 0.0)).sum(-1)


def _reach(shares: Tensor, distance: Tensor) -> Tensor:
    """(B, H, t) the smallest r so that keys at distances below r have 90% of the mass. Keys stand in the
    order of time, so that reversed they stand in that of distance; those of the future have no mass."""
    running = shares.flip(-1).cumsum(-1)
    nearest = (running < REACH - ROUNDING).sum(-1, keepdim=True).clamp(max=shares.shape[-1] - 1)
    far = distance.flip(-1).expand(*shares.shape[:3], -1)
    return far.gather(-1, nearest)[..., 0] + 1


def _by_bucket(values: Tensor, index: Tensor, buckets: int) -> Tensor:
    """(B, H, t, s) → (B, H, buckets), summed over queries and keys; index (1, 1, t, s)."""
    flat = values.flatten(2)
    empty = flat.new_zeros(*flat.shape[:2], buckets)
    return empty.scatter_add(-1, index.flatten(2).expand_as(flat), flat).double()


def _of_logits(logits: Tensor) -> dict[str, Tensor]:
    finite = torch.isfinite(logits)
    some = finite.any(-1)
    deviation = _centred(logits, finite).square().sum(-1) / finite.sum(-1).clamp(min=1)
    highest = logits.masked_fill(~finite, -torch.inf).amax(-1)
    return {
        "logit_std": _sum(deviation.sqrt(), some),
        "n:logit_std": some.sum(-1),
        "logit_max": _sum(highest, some),
        "n:logit_max": some.sum(-1),
    }


def _centred(values: Tensor, counted: Tensor) -> Tensor:
    """Values less their mean over the counted keys, 0 elsewhere."""
    values = torch.where(counted, values, 0.0)
    mean = values.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(counted, values - mean, 0.0)


def _variances(
    views: list[AttentionView],
    spelled: AttentionDetails,
    features: Tensor,
    scale: float,
    start: int,
    stop: int,
) -> dict[str, Tensor]:
    """Variance of the logits over the keys, and its covariance with the part that some features of queries
    and keys make, summed over the queries: the parts of all features add up to the variance."""
    assert spelled.logits is not None
    part = torch.zeros_like(spelled.logits)
    for view in views:
        dtype = mask_dtype(view.q)
        q = view.q[:, :, start:stop].to(dtype) * features.to(view.q.device)
        k = repeated(view.k[:, :, spelled.keys].to(dtype), view.pairs.heads)
        part = part + (q @ k.mT * scale) * view.pairs.seen(start, stop, spelled.keys)
    finite = torch.isfinite(spelled.logits)
    logits, part = _centred(spelled.logits, finite).double(), _centred(part, finite).double()
    return {
        "variance": logits.square().sum((-1, -2)),
        "covariance": (logits * part).sum((-1, -2)),
    }


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
    """(B, keep, V) logits after the last `keep` of tokens (B, L), the ones before them prefilled in chunks.

    `length` is what the model is told the length of the sequence is; `watch` sees the last pass alone, in
    which there are exactly `keep` queries.
    """
    rows, inputs = tokens.shape
    cache = Cache(model, rows, inputs)
    before = inputs - keep
    for start in range(0, before, chunk):
        stop = min(before, start + chunk)
        places = TokenPositions.plain(stop - start, offset=start, length=length, device=tokens.device)
        model(tokens[:, start:stop], places, cache=cache, keep=0)
    places = TokenPositions.plain(keep, offset=before, length=length, device=tokens.device)
    return model(tokens[:, before:], places, cache=cache, hooks=hooks)
