"""`protocol: attention`: attention weights of the last queries in windows of fixed targets, under
every method at every length.

Hooks receive the views, values and scale of each layer's kernel (`Transformer.forward(hooks=)`) and
compute the weights of the same pairs in blocks of queries, so memory is linear in the length.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from errors import EvaluationError
from evaluation.diagnostics.diagnostic_session import DiagnosticMeasurement
from evaluation.evaluated_model import EvaluatedModel
from evaluation.evaluation_settings import AttentionDiagnosticSettings
from evaluation.methods import Method
from evaluation.scoring.cells import Advance, EvaluationCell
from evaluation.scoring.evaluation_plan import fixed_plan
from evaluation.scoring.targets import EvaluationText
from evaluation.scoring.text_loss import spread
from model import TokenPositions, Transformer
from model.attention.kernels import AttentionDetails, attention_details
from model.attention.mask import AttentionView, Normalizer

PAIRS_AT_ONCE = 1 << 22  # pairs B·H·t·S of a block of queries
REACH = 0.9  # share of the mass
ROUNDING = 1e-6  # a running sum counts as 90% if it is at most this much below

ATTENTION = {  # heading and format in reports, meaning
    "entropy": ("entropy, nats", ".2f", "entropy of the weights among the visible keys, nats"),
    "entropy_relative": ("entropy / ln n", ".0%", "entropy / ln(visible keys): 1 is uniform"),
    "first_token": ("mass on first token", ".1%", "mass on the first token of the window"),
    "mass_beyond": (
        "mass beyond L0",
        ".1%",
        "mass at distances of the trained length and more",
    ),
    "logit_std": (
        "sd of logits",
        ".2f",
        "standard deviation of the logits over the visible keys, bias included",
    ),
    "logit_max": ("largest logit", ".2f", "largest logit of a query"),
    "reach_90": (
        "reach of 90%, tokens",
        ",.0f",
        "distance that contains 90% of the mass, tokens",
    ),
}

# Measures of windows, float64 tensors on the CPU, NaN for undefined values. By name of a measure:
# its mean over the queries, (B, layers, H). by_distance and visible (B, layers, H, buckets): the
# mass, and the mass of uniform attention (the share of visible keys), by distance.
AttentionSample = dict[str, Tensor]


class AttentionMeasurement(DiagnosticMeasurement):
    """The attention of the last queries of windows: one `AttentionSample` of all windows for each
    cell. The targets of the windows are the same at every length and under each method.

    Raises:
        EvaluationError: before any compute, if documents are too short or the model has no softmax
            attention.
    """

    settings: AttentionDiagnosticSettings

    def __init__(
        self,
        settings: AttentionDiagnosticSettings,
        subject: EvaluatedModel,
        text: EvaluationText,
        tokenizer,
        methods: list[Method],
        console=None,
    ):
        plan = fixed_plan(settings, text, tokenizer.hash, subject.trained_length)
        chosen = spread(len(plan.truncated_windows), settings.windows)
        self.plan = plan
        self.chosen = {length: windows[chosen] for length, windows in plan.windows.items()}
        needed = {length: length for length in plan.lengths}
        document = plan.truncated_windows[chosen, 0]
        super().__init__(settings, subject, text, tokenizer, methods, needed, document, console)
        if plan.note:
            self.warn(plan.note)
        self.title = f"attention in {len(self.unit)} windows"
        model = subject.under((), settings.dtype)
        self.layer_kinds = list(model.settings.layer_kinds)
        for block, kind in zip(model.layers, self.layer_kinds, strict=True):
            if not block.mixer.has_attention_weights:
                raise EvaluationError(
                    "protocol=attention requires attention weights, which layers with mixer.name="
                    f"{model.kinds[kind].mixer.name} do not have"
                )

    def edges(self, length: int) -> list[int]:
        """The edges of the buckets of distances."""
        return bucket_edges(length, self.subject.trained_length)

    def cells(self) -> list[EvaluationCell]:
        return [
            EvaluationCell(
                method,
                length,
                self.key(method, length),
                inputs=self.chosen[length][:, 2],
                keep=self.settings.targets,
                chunk=self.settings.chunk,
                windows=self.chosen[length],
            )
            for method, length in self.places()
        ]

    def score(
        self,
        cell: EvaluationCell,
        model: Transformer,
        batch: int,
        advance: Advance,
    ) -> AttentionSample:
        document, end, *_ = cell.windows.T
        tokens = self.text.windows(document, end, cell.length)
        tokens = torch.from_numpy(tokens).to(self.device)
        parts = []
        for rows in tokens.split(batch):
            sample = record_attention(
                model,
                rows[:, :-1],
                keep=cell.keep,
                chunk=cell.chunk,
                edges=self.edges(cell.length),
                trained_length=self.subject.trained_length,
            )
            parts.append(sample)
            advance(len(rows) / len(tokens))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def bucket_edges(longest: int, trained_length: int) -> list[int]:
    """The edges 0, 1, 2, 4, 8, ..., `longest`, with the trained length inserted. Bucket n holds the
    distances from edge n to before edge n + 1."""
    edges = {0, trained_length}
    edge = 1
    while edge < longest:
        edges.add(edge)
        edge *= 2
    return [*sorted(edge for edge in edges if edge < longest), longest]


class AttentionRecorder:
    """Collects the attention of one pass over the last K queries of a window, from position
    `first_query` on.

    Args:
        edges: edges of the distance buckets.
    """

    def __init__(self, layers: int, first_query: int, edges: Sequence[int], trained_length: int):
        self.first_query = first_query
        self.edges = torch.tensor(edges)
        self.trained_length = trained_length
        # numerators, denominators
        self.sums: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(layers)]

    def record(
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
        weights = block.weights  # (B, H, t, s), like the logits
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
        measured = {  # value of each query, and which queries count
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
        """Means over all recorded queries; NaN (0 / 0) if undefined."""
        values = {}
        for name in self.sums[0]:
            by_layer = []
            for sums in self.sums:
                total, count = sums[name]
                by_layer.append((total.double() / count).cpu())
            values[name] = torch.stack(by_layer, dim=1)
        return values


def _reach(shares: Tensor, distance: Tensor) -> Tensor:
    """(B, H, t) the smallest r such that keys at distances below r have 90% of the mass. Keys are
    ordered by time, so in reverse they are ordered by distance; future keys have no mass."""
    running = shares.flip(-1).cumsum(-1)
    nearest = (running < REACH - ROUNDING).sum(-1, keepdim=True).clamp(max=shares.shape[-1] - 1)
    far = distance.flip(-1).expand(*shares.shape[:3], -1)
    return far.gather(-1, nearest)[..., 0] + 1


def _by_bucket(values: Tensor, index: Tensor, buckets: int) -> Tensor:
    """Sum `values` (B, H, t, s) over queries and keys by bucket: (B, H, buckets). `index` (1, 1, t,
    s): the bucket of each pair."""
    flat = values.flatten(2)
    empty = flat.new_zeros(*flat.shape[:2], buckets)
    return empty.scatter_add(-1, index.flatten(2).expand_as(flat), flat).double()


def _variance(values: Tensor, counted: Tensor) -> Tensor:
    """Variance of the counted values along the last axis; 0 if none is counted."""
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
    """The attention of the last `keep` of the tokens (B, L), after the tokens before them are
    prefilled in chunks. `edges`: edges of the distance buckets."""
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
        is_last = stop == length
        hooks = [partial(recorder.record, layer) for layer in range(len(model.layers))]
        model(part, places, cache=cache, keep=keep * is_last, hooks=hooks if is_last else None)
    return recorder.result()
