"""Passes of single tokens that are prepared in chunks, against one pass over all tokens."""

from __future__ import annotations

import copy

import pytest
import torch

from model import Cache, TokenPositions, Transformer, decode_plan
from model.decode_plan import DecodePlan
from tests.model.zoo import build, close, every_case, ids, reach_of, shared

PROMPT = 7
PREPARED = (
    "rope",
    "rope-window",
    "xpos",
    "learned",
    "alibi",
    "fire-window",
    "none-sinks",
    "pattern-none",
)
GENERAL = ("rope-self-extend", "cope", "fox", "path", "pattern-fox")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(decode_plan, "CHUNK", 4)


def plan_of(
    model: Transformer, tokens: torch.Tensor, positions: TokenPositions
) -> DecodePlan | None:
    """The plan of all passes after a prompt of PROMPT columns."""
    length = tokens.shape[1]
    cache = Cache(model, len(tokens), length)
    model(tokens[:, :PROMPT], positions.part(0, PROMPT, position_end=PROMPT), cache=cache, keep=0)
    return DecodePlan.create(model, cache, positions.part(PROMPT, length))


def check(model: Transformer) -> None:
    """Every pass of a plan equals a column of one pass over all tokens, in both layouts."""
    packed = copy.deepcopy(model).pack()
    length = reach_of(model)
    tokens = ids(2, length)
    ragged = TokenPositions.left_padded([PROMPT, 3], length, lengths=[length, length - PROMPT + 3])
    for positions in (TokenPositions.plain(length), ragged):
        plan = plan_of(packed, tokens, positions)
        if plan is not None:
            decoded = [plan(tokens[:, at]) for at in range(PROMPT, length)]
            close(torch.stack(decoded, 1), model(tokens, positions)[:, PROMPT:])


@every_case
@torch.no_grad()
def test_prepared_passes_match_full_forward(case):
    check(shared(case))


@pytest.mark.parametrize(
    "settings",
    [
        {"qk_norm": "all_heads", "attention_bias": "all", "mlp_bias": True},
        {"norm_placement": "output", "residual_multiplier": 0.4, "embedding_multiplier": 3.0},
    ],
    ids=str,
)
@torch.no_grad()
def test_settings_of_blocks_in_prepared_passes(settings):
    check(build("rope", **settings))


@pytest.mark.parametrize("case", [*PREPARED, *GENERAL])
@torch.no_grad()
def test_plans_of_one_masked_view_are_prepared(case):
    model = copy.deepcopy(shared(case)).pack()
    tokens = ids(2, reach_of(shared(case)))
    plan = plan_of(model, tokens, TokenPositions.plain(tokens.shape[1]))
    assert (plan is not None) == (case in PREPARED)


@torch.no_grad()
def test_models_that_are_not_packed_are_not_prepared():
    model = build("rope")
    tokens = ids(2, 9)
    assert plan_of(model, tokens, TokenPositions.plain(9)) is None
    assert plan_of(model.pack().bfloat16(), tokens, TokenPositions.plain(9)) is None
