"""Positional schemes without a model, in float64, and attention from dense matrices of logits.

Sizes are those of zoo.py: H 6, G 3, D 10, C 28; B rows; original length 16.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model import SCHEMES, TokenPositions
from model.attention.kernels import attend
from model.position import AttentionContext, ContentPlan, HeadGeometry, PositionalScheme
from tests.model.zoo import C, D, G, H, close, packed

B = 2
L0 = 16
S = 13


def skipping() -> TokenPositions:
    """Plain rows whose positions skip, each row its own."""
    plain = TokenPositions.plain(S)
    position = torch.stack([plain.order[0] * 2, (plain.order[0] ** 2) // 3])
    return replace(plain, position=position, position_end=int(position.max()) + 1, unit_steps=False)


LAYOUTS = {
    "plain": TokenPositions.plain(S),
    "ragged": TokenPositions.left_padded([S, S - 4], S),
    "packed": packed([[5, S - 5], [7, 2, S - 9]]),
    "skipping": skipping(),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
windows = pytest.mark.parametrize("window", [{}, {"window": 4}, {"window": 3, "sinks": 2}], ids=str)


def doubles(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(queries: int, keys: int = 0, features: int = D, seed: int = 0) -> list[Tensor]:
    """q (B, H, Q, D), k and v (B, G, S, D); as many keys as queries unless given."""
    keys = keys or queries
    q = normal(B, H, queries, features, seed=seed)
    k = normal(B, G, keys, features, seed=seed + 1)
    return [1.5 * q, k, normal(B, G, keys, features, seed=seed + 2)]


def scheme_of(
    name: str,
    *,
    heads: int = H,
    groups: int = G,
    features: int = D,
    dim: int = C,
    train: int = L0,
    original: int = 0,
    spread: float = 0.0,
    **keys,
) -> PositionalScheme:
    """The scheme with its initial parameters, plus noise of this standard deviation."""
    settings, kind = SCHEMES[name]
    geometry = HeadGeometry(dim, heads, features, train, original or train, groups, features**-0.5)
    scheme = kind(settings.model_validate(keys), geometry).double()
    generator = torch.Generator().manual_seed(3)
    scheme.initialize(generator, 1.0)
    with torch.no_grad():
        for weight in scheme.parameters():
            weight += spread * torch.randn(weight.shape, generator=generator)
    return scheme


def put(scheme: PositionalScheme, **values) -> PositionalScheme:
    """The scheme with these parameters."""
    with torch.no_grad():
        for name, value in values.items():
            scheme.get_parameter(name).copy_(torch.as_tensor(value, dtype=torch.float64))
    return scheme


def context_of(
    scheme: PositionalScheme,
    new: TokenPositions,
    keys: TokenPositions | None = None,
    queries: int | None = None,
    rows: int = B,
    dtype: torch.dtype = torch.float64,
) -> AttentionContext:
    return AttentionContext(
        new=new,
        queries=new if queries is None else new.last(queries),
        keys=keys or new,
        batch=rows,
        heads=scheme.geometry.heads,
        device=torch.device("cpu"),
        tables=scheme.tables(new, dtype),
        window=scheme.settings.window,
        sinks=scheme.settings.sinks,
    )


def attended(
    scheme: PositionalScheme,
    positions: TokenPositions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str = "auto",
    x: Tensor | None = None,
) -> Tensor:
    """(B, H, Q, D) attention of the last Q tokens to all; x (B, Q, C) are the layer inputs."""
    context = context_of(scheme, positions.last(q.shape[2]), positions)
    plan = scheme.plan(context)
    if isinstance(plan, ContentPlan):
        assert x is not None
        plan = plan.bind(x, None)
    return attend(plan.read(q, plan.write(k)), v, q.shape[-1] ** -0.5, kernel)


def added(scheme: PositionalScheme, positions: TokenPositions, rows: int = 1) -> Tensor:
    """(rows, T, C) what the scheme adds to token embeddings."""
    x = torch.zeros(rows, positions.order.shape[1], scheme.geometry.dim, dtype=torch.float64)
    return scheme.embed(x, scheme.tables(positions, torch.float64), positions)


def pairs_of(
    scheme: PositionalScheme,
    queries: TokenPositions,
    keys: TokenPositions | None = None,
    rows: int = 1,
):
    """The mask of the scheme's only view."""
    context = context_of(scheme, queries, keys, rows=rows)
    tokens = queries.order.shape[1]
    q = torch.zeros(rows, scheme.geometry.heads, tokens, D, dtype=torch.float64)
    (view,) = scheme.plan(context).read(q, q)
    return view.mask


def bias_of(scheme: PositionalScheme, tokens: int | TokenPositions, rows: int = 1) -> Tensor:
    """(R, H, T, T) bias of all pairs, those in the future 0; without gradients."""
    positions = TokenPositions.plain(tokens) if isinstance(tokens, int) else tokens
    mask = pairs_of(scheme, positions, rows=rows)
    count = positions.order.shape[1]
    bias = mask.bias(*mask.indices(0, count, slice(0, count)))
    if mask.forms.distance is not None and mask.is_by_distance:
        by_distance = mask.by_distance()[:, :count].flip(1)  # entry m is for d = T − 1 − m
        close(by_distance, bias[0, :, -1].flip(-1), atol=1e-12)
    return bias.detach().tril()


def at(positions: list, length: int) -> TokenPositions:
    """Tokens at any positions, of a sequence of this declared length."""
    return replace(
        TokenPositions.plain(len(positions)),
        position=torch.tensor(positions)[None],
        position_end=math.floor(max(positions)) + 1,
        lengths=(length,),
        unit_steps=False,
    )


def distances(positions) -> Tensor:
    """(T, T) n − m, 0 in the future."""
    n = doubles(list(positions))
    return (n[:, None] - n[None, :]).tril()


def by_head(x: Tensor) -> Tensor:
    """(B, G, S, D) → (B, H, S, D)."""
    return torch.stack([x[:, h // (H // G)] for h in range(H)], dim=1)


def visible(
    positions: TokenPositions, queries: int, window: int | None = None, sinks: int = 0
) -> Tensor:
    """(B, 1, Q, S) which keys the last queries attend to, from orders and documents."""
    order = positions.order.expand(B, -1)
    document = positions.document.expand(B, -1)
    back = order[:, -queries:, None] - order[:, None]
    near = (back < (window or 10**6)) | (order[:, None] < sinks)
    same = document[:, -queries:, None] == document[:, None]
    return ((back >= 0) & near & same)[:, None]


def weighted(logits: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """softmax(logits) v over the keys that are seen; None: the causal mask."""
    if seen is None:
        seen = torch.ones(logits.shape[-2:]).tril().bool()
    return logits.masked_fill(~seen, -math.inf).softmax(-1) @ by_head(v)


def close_for_tokens(a: Tensor, b: Tensor, positions: TokenPositions, atol: float = 1e-12) -> None:
    """(B, H, Q, D) agree except for padding."""
    is_token = positions.document.expand(B, -1)[:, -a.shape[2] :] >= 0
    close(a.transpose(1, 2)[is_token], b.transpose(1, 2)[is_token], atol=atol)


def documents(positions: TokenPositions) -> list[tuple[int, slice]]:
    """The row and the tokens of every document."""
    parts = []
    for b, row in enumerate(positions.document.expand(B, -1).tolist()):
        for value, group in itertools.groupby(range(len(row)), key=row.__getitem__):
            tokens = list(group)
            if value >= 0:
                parts.append((b, slice(tokens[0], tokens[-1] + 1)))
    return parts


def by_documents(
    positions: TokenPositions, logits_of: Callable, x: Tensor, q: Tensor, k: Tensor
) -> Tensor:
    """(B, H, S, S) logits of each document by itself, from logits_of(x (t, C), q (H, t, D), k (H,
    t, D)) → (H, t, t)."""
    k = by_head(k)
    logits = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for b, t in documents(positions):
        logits[b, :, t, t] = logits_of(x[b, t], q[b, :, t], k[b, :, t])
    return logits
