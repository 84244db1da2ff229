"""Record attention: what the last queries of a window attend to, read from the model's own
attention.

Hooks receive the views, values and scale of each layer's kernel (`Transformer.forward(hooks=)`) and
compute the weights of the same pairs in blocks of queries, so memory is linear in the length.
"""

import functools
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from model import TokenPositions, Transformer
from model.attention.kernels import AttentionDetails, AttentionHook, attention_details
from model.attention.mask import AttentionView, Normalizer

PAIRS_AT_ONCE = 1 << 22  # B·H·t·S of a block of queries
REACH = 0.9  # of the mass
ROUNDING = 1e-6  # a running sum that is this near to 90% has reached it

MEASURES = {
    "entropy": "entropy of the weights among the visible keys, nats",
    "entropy_relative": "entropy / ln(visible keys): 1 is uniform",
    "first_token": "mass on the first token of the window",
    "mass_beyond": "mass at distances of the trained length and more",
    "logit_std": "standard deviation of the logits over the visible keys, bias included",
    "logit_max": "largest logit of a query",
    "reach_90": "distance that contains 90% of the mass, tokens",
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


# Measures of windows; float64 tensors on the CPU, NaN for undefined values: name of a measure ->
# (B, layers, H), the mean over the queries; by_distance and visible (B, layers, H, buckets): the
# mass, and the share of visible keys, which is the mass of uniform attention, by distance.
AttentionSample = dict[str, Tensor]


class AttentionRecorder:
    """Collects one pass of the last K queries of a window, from position `first_query` on.

    Args:
        edges: of the distance buckets.
    """

    def __init__(self, layers: int, first_query: int, edges: Sequence[int], trained_length: int):
        self.first_query = first_query
        self.edges = torch.tensor(edges)
        self.trained_length = trained_length
        # numerators, denominators
        self.sums: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(layers)]

    def hooks(self) -> list[AttentionHook]:
        return [functools.partial(self._record, layer) for layer in range(len(self.sums))]

    def _record(
        self,
        layer: int,
        views: list[AttentionView],
        v: Tensor,
        scale: float,
        normalizer: Normalizer,
        out: Tensor,
    ) -> None:
        mask = views[0].mask
        sums = self.sums[layer]
        size = max(1, PAIRS_AT_ONCE // (mask.batch * mask.heads * mask.keys))
        for start in range(0, mask.queries, size):
            stop = min(start + size, mask.queries)
            block = attention_details(views, v, scale, normalizer, start, stop, logits=True)
            b, _, i, j = mask.indices(start, stop, block.keys)
            distance = mask.separation(b, i, j)[:1]  # the same in every row of a plain batch
            for name, (value, count) in self._measured(block, distance, start).items():
                total, counted = sums.get(name, (0, 0))
                sums[name] = total + value, counted + count

    def _measured(
        self,
        block: AttentionDetails,
        distance: Tensor,
        start: int,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums over a block of queries and the number of queries in them: (B, H), or (B, H,
        buckets)."""
        weights = block.weights  # (B, H, t, s), as the logits
        logits = block.logits
        assert logits is not None
        total = weights.sum(-1)  # (B, H, t)
        every = torch.ones_like(total, dtype=torch.bool)
        attends = total > 0
        tiny = torch.finfo(total.dtype).tiny
        shares = weights / total.clamp(min=tiny)[..., None]
        finite = torch.isfinite(logits)
        has_logits = finite.any(-1)
        seen = finite | (weights > 0)
        keys = seen.sum(-1)
        entropy = torch.special.entr(shares).sum(-1)
        uniform_entropy = keys.clamp(min=2).double().log()
        # (1, 1, t, s)
        position = self.first_query + start + torch.arange(weights.shape[2], device=weights.device)
        is_first = distance == position[:, None]
        is_beyond = distance >= self.trained_length
        highest = logits.masked_fill(~finite, -torch.inf).amax(-1)
        measured = {  # of each query, and the queries that count
            "entropy": (entropy, attends),
            "entropy_relative": (entropy / uniform_entropy, attends & (keys > 1)),
            "first_token": ((weights * is_first).sum(-1), every),
            "mass_beyond": ((weights * is_beyond).sum(-1), every),
            "logit_std": (_variance(logits, finite).sqrt(), has_logits),
            "logit_max": (highest, has_logits),
            "reach_90": (_reach(shares, distance), attends),
        }
        out = {}
        for name, (values, counted) in measured.items():
            summed = torch.where(counted, values.double(), 0.0).sum(-1)
            out[name] = (summed, counted.sum(-1))
        edges = self.edges.to(distance.device)
        bucket = torch.bucketize(distance.clamp(min=0), edges, right=True) - 1
        uniform = seen.to(weights.dtype) / keys.clamp(min=1)[..., None]
        queries = every.sum(-1)[..., None]
        for name, mass in (("by_distance", weights), ("visible", uniform)):
            out[name] = (_by_bucket(mass, bucket, len(self.edges) - 1), queries)
        return out

    def result(self) -> AttentionSample:
        """Means over all recorded queries; 0 / 0 is NaN: undefined."""
        values = {}
        for name in self.sums[0]:
            by_layer = []
            for sums in self.sums:
                total, count = sums[name]
                by_layer.append((total.double() / count).cpu())
            values[name] = torch.stack(by_layer, dim=1)
        return values


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


def _variance(values: Tensor, counted: Tensor) -> Tensor:
    """Of the counted values of the last axis; 0 where there are none."""
    count = counted.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(counted, values, 0.0).sum(-1, keepdim=True) / count
    return torch.where(counted, values - mean, 0.0).square().sum(-1) / count[..., 0]


@torch.no_grad()
def record_attention(
    model: Transformer,
    tokens: Tensor,
    keep: int,
    chunk: int,
    edges: Sequence[int],
    trained_length: int,
) -> AttentionSample:
    """What the last `keep` of tokens (B, L) attend to, the ones before them prefilled in chunks;
    `edges`: of buckets of distance."""
    rows, length = tokens.shape
    first = length - keep
    recorder = AttentionRecorder(len(model.layers), first, edges, trained_length)
    cache = model.make_cache(rows, length)
    for start, stop in pairwise([*range(0, first, chunk), first, length]):
        places = TokenPositions.plain(
            stop - start,
            offset=start,
            length=length,
            device=tokens.device,
        )
        part = tokens[:, start:stop]
        if stop < length:
            model(part, places, cache=cache, keep=0)
        else:
            model(part, places, cache=cache, keep=keep, hooks=recorder.hooks())
    return recorder.result()
