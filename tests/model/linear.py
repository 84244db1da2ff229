"""Reference linear attention: over pairs, and as a recurrence in plain Python; models that use
it."""

from __future__ import annotations

import math

import pytest
import torch

from model import TokenPositions, Transformer
from model.mixers.base import AttentionPass
from model.position import AttentionContext
from tests.model.zoo import C, D, G, H, build

FORMS = ("numerator", "cosine")
YARN = {
    "name": "rope",
    "scaling": {"name": "yarn", "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.2},
}
LEGAL: dict[str, dict] = {
    "none": {"name": "none"},
    "sinusoidal": {"name": "sinusoidal"},
    "learned": {"name": "learned"},
    "rope": {"name": "rope"},
    "partial": {"name": "rope", "fraction": 0.5, "layout": "interleaved"},
    "yarn": YARN,
    "auto": {"name": "rope", "scaling": {"name": "yarn"}},
    "pattern": {
        "name": "pattern",
        "layers": ["a", "b"],
        "kinds": {"a": {"name": "rope", "theta": 50.0}, "b": {"name": "none"}},
    },
}

every_form = pytest.mark.parametrize("form", FORMS)


def linear(scheme: str | dict, form: str, chunk: int = 4, **keys) -> Transformer:
    position = LEGAL[scheme] if isinstance(scheme, str) else scheme
    return build(position, mixer={"name": "linear", "form": form, "chunk": chunk}, **keys)


def turn(
    x: list[float], position: float, theta: float = 10_000.0, amplitude: float = 1.0
) -> list[float]:
    """R(nθ) x in the layout `half`, one pair after the other."""
    half = len(x) // 2
    out = list(x)
    for k in range(half):
        angle = position * theta ** (-2 * k / len(x))
        c = math.cos(angle) * amplitude
        s = math.sin(angle) * amplitude
        out[k] = c * x[k] - s * x[k + half]
        out[k + half] = s * x[k] + c * x[k + half]
    return out


def dot(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def phi(x: list[float]) -> list[float]:
    return [a + 1 if a > 0 else math.exp(a) for a in x]


def unit(x: list[float]) -> list[float]:
    return [a / math.sqrt(dot(x, x)) for a in x]


def mean(weights: list[float], counts: list[float], v: list[list[float]]) -> list[float]:
    return [
        sum(w * row[e] for w, row in zip(weights, v, strict=True)) / sum(counts)
        for e in range(len(v[0]))
    ]


def by_definition(q, k, v, positions, form: str, turned: bool = True) -> list[list[float]]:
    """One head: q, k, v lists of T vectors at these positions. Equations of F8, a sum over pairs
    each."""
    out = []
    for n in range(len(q)):
        weights = []
        counts = []
        for m in range(n + 1):
            if form == "numerator":
                x = phi(q[n])
                y = phi(k[m])
                counts.append(dot(x, y))
                weights.append(
                    dot(turn(x, positions[n]), turn(y, positions[m])) if turned else counts[-1]
                )
            else:
                x = unit(q[n])
                y = unit(k[m])
                cosine = dot(turn(x, positions[n]), turn(y, positions[m])) if turned else dot(x, y)
                weights.append(1 + cosine)
                counts.append(1 + cosine)
        out.append(mean(weights, counts, v[: n + 1]))
    return out


def recurrent(q, k, v, positions, form: str) -> list[list[float]]:
    """One head, token by token, with the sums of F8: Σ k vᵀ and Σ k, or Σ v, Σ k vᵀ, Σ k and their
    number."""
    features = len(q[0])
    width = len(v[0])
    product = [[0.0] * width for _ in range(features)]
    keys = [0.0] * features
    values = [0.0] * width
    out = []
    for n in range(len(q)):
        feature = phi if form == "numerator" else unit
        x = feature(q[n])
        y = feature(k[n])
        x_turned = turn(x, positions[n])
        y_turned = turn(y, positions[n])
        counted = y if form == "numerator" else y_turned
        for a in range(features):
            keys[a] += counted[a]
            for e in range(width):
                product[a][e] += y_turned[a] * v[n][e]
        values = [s + b for s, b in zip(values, v[n], strict=True)]
        top = [dot(x_turned, [product[a][e] for a in range(features)]) for e in range(width)]
        if form == "numerator":
            out.append([t / dot(x, keys) for t in top])
        else:
            out.append(
                [(s + t) / (n + 1 + dot(x_turned, keys)) for s, t in zip(values, top, strict=True)]
            )
    return out


def mixed(
    model: Transformer, x: torch.Tensor, positions: TokenPositions, keep: int | None = None
) -> torch.Tensor:
    """What the first layer's heads give for inputs x (B, T, C), before they are joined: (B, H, K,
    D)."""
    scheme = next(iter(model.position.values()))
    attention = model.layers[0].attention
    queries = positions if keep is None else positions.last(keep)
    tables = scheme.tables(positions, x.dtype)
    context = AttentionContext(positions, queries, positions, x.shape[0], H, x.device, tables)
    caught = {}

    def keep_heads(heads, x):
        caught["heads"] = heads
        return heads.transpose(1, 2).flatten(2)

    attention.joined = keep_heads
    try:
        attention(x, AttentionPass(context, scheme.plan(context), None), None)
    finally:
        del attention.joined
    return caught["heads"]


def projected(model: Transformer, x: torch.Tensor, b: int, h: int) -> tuple[list, list, list]:
    """q, k and v of one row and query head, as lists, by plain matrix products."""
    attention = model.layers[0].attention
    g = h // (H // G)
    q = x[b] @ attention.wq.weight[h * D : (h + 1) * D].T
    k, v = (x[b] @ w.weight[g * D : (g + 1) * D].T for w in (attention.wk, attention.wv))
    return q.tolist(), k.tolist(), v.tolist()


def inputs(rows: int, tokens: int) -> torch.Tensor:
    return torch.randn(
        rows, tokens, C, dtype=torch.float64, generator=torch.Generator().manual_seed(7)
    )
