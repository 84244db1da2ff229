"""Automatic factors that follow the declared length, skipped positions, and ALiBi by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from model import TokenPositions
from model.attention.kernels import attend
from model.position import AttentionContext, HeadGeometry
from model.position.schemes.alibi import Alibi, AlibiSettings
from tests.model.zoo import TRAIN, T, build, close, ids, schemes_of

RULES = ["linear", "ntk", "yarn", "llama3"]


def scaled(rule: str, factor: float | str) -> dict:
    return {"name": "rope", "scaling": {"name": rule, "factor": factor}}


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_ragged_batch_has_stretch_per_row(rule):
    model = build(scaled(rule, "auto"))
    counts = [T, 4, 13]
    tokens = ids(3, T)
    out = model(tokens, TokenPositions.left_padded(counts, T))
    stretches = set()
    for r, count in enumerate(counts):
        alone = model(tokens[r : r + 1, T - count :], TokenPositions.plain(count))
        close(out[r, T - count :], alone[0])
        stretches.add(schemes_of(model)[0].stretch(count))
    assert len(stretches) == 3


@pytest.mark.parametrize("case", ["rope", "alibi", "sinusoidal", "none", "alibi-window"])
@torch.no_grad()
def test_skipped_positions_between_cached_passes(case):
    """Each pass has unit steps and the whole has not: order decides who is seen, position what is
    seen."""
    model = build(case)
    tokens = ids(2, 12)
    plain = TokenPositions.plain(12)
    position = torch.cat([torch.arange(7), torch.arange(7, 12) + 20])[None]
    whole = model(tokens, replace(plain, position=position, position_end=32, unit_steps=False))
    if case in ("rope", "alibi", "sinusoidal"):
        assert (whole - model(tokens, plain)).abs().max() > 1e-3
    cache = model.make_cache(2, 12)
    first = model(tokens[:, :7], TokenPositions.plain(7, length=12), cache=cache)
    second = replace(TokenPositions.plain(5, offset=7), position=position[:, 7:], position_end=32)
    close(torch.cat([first, model(tokens[:, 7:], second, cache=cache)], dim=1), whole)


@pytest.mark.parametrize("layout", ["plain", "skipping"])
def test_alibi_by_hand(layout):
    """Two heads have slopes 1/16 and 1/256. Equal scores leave weights e^(−slope·d) over three
    keys."""
    positions = TokenPositions.plain(3)
    away = [2, 1, 0]
    if layout == "skipping":
        positions = replace(
            positions, position=torch.tensor([[0, 5, 9]]), position_end=10, unit_steps=False
        )
        away = [9, 4, 0]
    scheme = Alibi(AlibiSettings(), HeadGeometry(8, 2, 4, 16, 16, 2))
    context = AttentionContext(
        positions,
        positions.last(1),
        positions,
        1,
        2,
        torch.device("cpu"),
        scheme.tables(positions, torch.float64),
    )
    q = torch.zeros(1, 2, 1, 4).double()
    k = torch.randn(1, 2, 3, 4).double()
    v = torch.tensor([1.0, 10.0, 100.0]).double()[None, None, :, None].expand(1, 2, 3, 4)
    for kernel in ("blocks", "dense"):
        out = attend(scheme.plan(context).read(q, k), v, 0.5, kernel)
        for h, slope in enumerate((1 / 16, 1 / 256)):
            weights = [math.exp(-slope * d) for d in away]
            mean = (weights[0] + 10 * weights[1] + 100 * weights[2]) / sum(weights)
            close(out[0, h, 0], torch.full((4,), mean, dtype=torch.float64), atol=1e-12)


@torch.no_grad()
def test_each_table_is_built_once_per_batch(monkeypatch):
    built = []
    for case in (scaled("yarn", "auto"), {"name": "sinusoidal", "stretch": "auto"}):
        model = build(case)
        counts = list(range(TRAIN + 1, TRAIN + 21))
        tokens = ids(len(counts), max(counts))
        positions = TokenPositions.left_padded(counts, max(counts))
        model(tokens, positions)
        monkeypatch.setattr("model.position.table.LookupTable.__init__", lambda *_: built.append(1))
        model(tokens, positions)
        assert not built
        monkeypatch.undo()
