"""Linear attention with positions: a mixer beside softmax attention that remembers sums in place of keys.

With weights that are products of features, w(n, m) = a(q_n)·b(k_m), the sums over the past Σ b(k_m) v_mᵀ say
all that a query will ever ask: decoding costs and remembers the same at any length. A scheme may touch
tokens, or queries and keys; there are no logits it could add to.

Su 2021 (kexue.fm/archives/8265, archives/8338); the feature elu + 1: Katharopoulos et al. 2020
(arXiv:2006.16236).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import LinearMemory, Sums
from model.errors import ModelError
from model.kernels import Watch
from model.pairs import Pairs, View, mask_dtype
from model.position import (
    SCHEMES,
    ContentPlan,
    Geometry,
    Places,
    Plan,
    PositionSettings,
    Span,
)
from model.position.temperature import NoTemperature
from model.projection import Projection
from model.settings import LinearMixer, ModelSettings

Compared = tuple[Tensor, Tensor]  # queries (B, H, K, E) and keys (B, G, T, E) whose products are weights


class LinearAttention(Projection):
    """Attention whose weights are products of features; R is what the scheme does to queries and keys.

    ``numerator``: o_n = Σ_m (R_n φ(q_n))·(R_m φ(k_m)) v_m / Σ_m φ(q_n)·φ(k_m) with φ = elu + 1. Rotated
    weights may be negative, and their sum zero: the denominator stays unrotated and positive.
    ``cosine``: weights 1 + (R_n q̂_n)·(R_m k̂_m) of unit vectors, over their own sum. They are not negative:
    what the scheme returns is brought to norm 1 once more, and an amplitude (YaRN's) falls away.

    Computed in chunks: within one, all pairs; between them, sums. Any chunk gives the same result, chunk 1
    is the recurrence. In float32, or float64 where the model is.
    """

    def __init__(self, s: ModelSettings, choice: PositionSettings):
        super().__init__(s, choice)
        assert isinstance(s.mixer, LinearMixer)
        self.mixer = s.mixer

    def forward(
        self,
        x: Tensor,
        span: Span,
        plan: Plan | ContentPlan,
        memory: LinearMemory | None,
        watch: Watch | None = None,
    ) -> Tensor:
        """x (B, T, C) → (B, K, C) for the span's K queries."""
        if watch is not None:
            raise ModelError(
                "linear attention (model.mixer.name = linear) remembers sums in place of keys: it has no "
                "attention weights to look at"
            )
        bound = plan.bind(x, None)
        q, k, v = self.queries(span.of_queries(x)), self.keys(x), self.values(x)
        with torch.autocast(x.device.type, enabled=False):
            q, k, values = (part.to(mask_dtype(v)) for part in (q, k, v))
            q, k = (positive(q), positive(k)) if self.mixer.form == "numerator" else (unit(q), unit(k))
            (view,) = bound.read(q, bound.write(k))
            if self.mixer.form == "numerator":
                compared, counted = (view.q, view.k), (q, k)
            else:
                # Unit once more: an amplitude or a mixture of frequencies would make weights negative.
                compared, counted = (with_one(unit(view.q)), with_one(unit(view.k))), None
            document = None if span.new.layout == "plain" else span.new.document
            out, sums = weighted_means(
                compared,
                counted,
                values,
                pairs=view.pairs,
                document=document,
                before=None if memory is None else memory.sums,
                chunk=self.mixer.chunk,
            )
        if memory is not None:
            memory.keep(sums)
        return self.joined(out.to(v.dtype))

    def pair_flops(self, length: int) -> float:
        """Training FLOPs per token beside the matrices: pairs of a chunk, sums read and written."""
        pairs = 12 * self.heads * self.features * (min(self.mixer.chunk, length) + 1) / 2
        return pairs + 6 * (self.heads + self.groups) * self.features**2


def positive(x: Tensor) -> Tensor:
    """elu(x) + 1, without the cancellation that makes it 0 in float32 below −17."""
    return x.relu() + x.clamp(max=0).exp()


def unit(x: Tensor) -> Tensor:
    """Vectors of norm 1."""
    return F.normalize(x, dim=-1)


def with_one(x: Tensor) -> Tensor:
    """A feature 1 before the others, so that a product is 1 + x·y and the sums are Σ v, Σ k vᵀ, n and Σ k."""
    return F.pad(x, (1, 0), value=1.0)


def weighted_means(
    compared: Compared,
    counted: Compared | None,
    v: Tensor,
    *,
    pairs: Pairs,
    document: Tensor | None,
    before: Sums | None,
    chunk: int,
) -> tuple[Tensor, Sums]:
    """Σ_m w(n, m) v_m / Σ_m u(n, m) over the keys m that query n may see.

    Args:
        compared: gives the weights w of values.
        counted: gives the weights u of the denominator; None where those are w.
        v: (B, G, T, D).
        pairs: of the K queries, the last of the T tokens, and the T keys.
        document: (B or 1, T) of the keys, each in one stretch; None where there is but one, also before.
        before: sums over earlier tokens.
        chunk: tokens of one block of pairs.

    Returns:
        (B, H, K, D), and the sums over all tokens of each row's last document.
    """
    q, k = compared
    counting = k if counted is None else counted[1]
    queries, groups = q.shape[2], k.shape[1]
    early = k.shape[2] - queries  # tokens that are remembered and do not ask
    size = max(1, min(chunk, queries))
    count = -(-queries // size)
    slots = torch.arange(count * size, device=v.device).clamp(max=max(queries - 1, 0))

    def chunks(x: Tensor) -> Tensor:  # (B, ·, K, E) → (B, ·, N, c, E), zeros behind the end
        return F.pad(x, (0, 0, 0, count * size - queries)).unflatten(2, (count, size))

    # Sums over what was there before, over the tokens that do not ask and over each chunk, in order of time.
    if before is None:
        before = Sums(
            v.new_zeros(v.shape[0], groups, 1, k.shape[3], v.shape[3]),
            v.new_zeros(v.shape[0], groups, 1, counting.shape[3]),
            None if document is None else document[:, :1],
        )
    parts = [before]
    if early:
        piece = None if document is None else document[:, None, :early]
        first = slice(0, early)
        parts.append(_summed(k[:, :, None, first], counting[:, :, None, first], v[:, :, None, first], piece))
    k_chunk, counting_chunk, v_chunk = (chunks(x[:, :, early:]) for x in (k, counting, v))
    pieces = None if document is None else document[:, early + slots].unflatten(1, (count, size))
    parts.append(_summed(k_chunk, counting_chunk, v_chunk, pieces))
    past = _accumulated(parts)
    known = past.of(-1 - count, -1)  # a chunk knows all that came before it

    # Which pairs of a chunk are compared (R, 1, N, 1, c, c), and which queries still are in the document that
    # the past ended in (R, 1, N, 1, c, 1).
    row = torch.arange(pairs.rows, device=v.device)[:, None, None, None]
    i, j = slots.view(count, size, 1), early + slots.view(count, 1, size)
    seen = pairs.rule(row, slots.new_zeros(()), i, j).expand(pairs.rows, count, size, size)
    seen = seen[:, None, :, None]
    if pieces is None or known.document is None:
        goes_on = None
    else:
        goes_on = (pieces == known.document[..., None])[:, None, :, None, :, None]

    def by_group(x: Tensor) -> Tensor:  # (B, H, N, c, E) → (B, G, N, H / G, c, E)
        return x.unflatten(1, (groups, -1)).transpose(2, 3)

    def weights(q: Tensor, k: Tensor) -> Tensor:  # → (B, G, N, H / G, c, c)
        return _product(q, k.transpose(-1, -2)) * seen

    def of_past(q: Tensor) -> Tensor:
        return q if goes_on is None else q * goes_on

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
    """x (B, G, N, r, c, E) times y (B, G, N, E, F), the same for the r query heads of a group."""
    return (x.flatten(3, 4) @ y).unflatten(3, x.shape[3:5])


def _summed(k: Tensor, counting: Tensor, v: Tensor, document: Tensor | None) -> Sums:
    """Sums over the tokens (B, G, N, c, ·) of each chunk that belong to the document it ends in."""
    if document is None:
        return Sums(k.transpose(-1, -2) @ v, counting.sum(-2), None)
    last = document[..., -1:]
    own = (document == last)[:, None, :, :, None]
    return Sums(k.transpose(-1, -2) @ (v * own), (counting * own).sum(-2), last[..., 0])


def _accumulated(parts: list[Sums]) -> Sums:
    """Sums of each stretch and of all before it that end in the same document."""
    values, keys = torch.cat([p.values for p in parts], 2), torch.cat([p.keys for p in parts], 2)
    ends = [p.document for p in parts if p.document is not None]
    if not ends:
        return Sums(values.cumsum(2), keys.cumsum(2), None)
    # Never a difference of running sums: what another document left would stay behind as rounding error.
    document = torch.cat(ends, 1)
    same = (document[:, :, None] == document[:, None, :]).tril()[:, None].to(values.dtype)  # (R, 1, M, M)
    return Sums((same @ values.flatten(3)).view_as(values), same @ keys, document)


def check_scheme(where: str, choice: PositionSettings, geometry: Geometry) -> None:
    """Refuse what needs a softmax, or logits to add to, before any compute.

    Args:
        where: the scheme's key in the settings.

    Raises:
        ModelError: naming the key and the mend.
    """
    advice = "set {} or choose model.mixer.name = attention"
    for key, wanted, kept in (
        ("window", "null", choice.window is None),
        ("sinks", "0", choice.sinks == 0),
        ("temperature", "{name: none}", isinstance(choice.temperature, NoTemperature)),
        ("sink_logit", "none", choice.sink_logit == "none"),
    ):
        if not kept:
            raise ModelError(
                f"{where}.{key}: linear attention (model.mixer.name = linear) sums over all past tokens, "
                f"without a softmax, and cannot have it: {advice.format(f'it to {wanted}')}"
            )
    # Two tokens through a throw-away instance show what the scheme asks for.
    with torch.device("cpu"), torch.no_grad():
        scheme = SCHEMES[choice.name][1](choice, geometry)
        places = Places.plain(min(2, scheme.limit or 2))
        tables = scheme.tables(places, torch.float32)
        span = Span(places, places, places, 1, geometry.heads, torch.device("cpu"), tables)
        plan = scheme.plan(span)
        if isinstance(plan, ContentPlan):
            asks = "reads the layer's input"
        else:
            q = torch.zeros(1, geometry.heads, places.reach, geometry.head_dim)
            views = plan.read(q, plan.write(q[:, : geometry.kv_heads]))
            asks = _beyond_products(views)
    if asks:
        raise ModelError(
            f"{where}: scheme '{choice.name}' {asks}, and linear attention (model.mixer.name = linear) can "
            "only compare each query and key in one form: choose a scheme that touches tokens, or rotates "
            "queries and keys, or model.mixer.name = attention"
        )


def _beyond_products(views: list[View]) -> str | None:
    """What these views ask for that a product of features cannot give."""
    if len(views) > 1 or any(view.weigh is not None or view.extra is not None for view in views):
        return "compares pairs of different distance in different forms, or weighs them by its own rule"
    if views[0].pairs.bias is not None:
        return "adds a bias to the logits"
    if not views[0].pairs.is_causal_only:
        return "hides some of the past"
    return None
