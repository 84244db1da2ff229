"""Passes of single tokens with a cache of fixed size: their logits, and the number of their graphs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

import generation.decoding
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import Cache, TokenPositions, Transformer, static_decoding
from model.static_decoding import StaticDecodePlan, decode_step
from tests.model.zoo import CASES, build, close, each_mechanism, ids, reach_of, shared

PROMPT = 7
# These cache extras of each token, and keep the growing cache.
GENERAL = ("fox", "path", "selective_rope", "carope")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(static_decoding, "BUCKET", 4)
    monkeypatch.setattr(static_decoding, "LEAST_PASSES", 2)


def is_general(case: str) -> bool:
    return case.removeprefix("pattern-").split("-")[0] in GENERAL


def plan_of(
    model: Transformer, tokens: torch.Tensor, positions: TokenPositions
) -> StaticDecodePlan | None:
    """The plan of all passes after a prompt of PROMPT columns."""
    length = tokens.shape[1]
    cache = Cache(model, len(tokens), length)
    model(tokens[:, :PROMPT], positions.part(0, PROMPT, position_end=PROMPT), cache=cache, keep=0)
    return StaticDecodePlan.create(model, cache, positions.part(PROMPT, length))


@each_mechanism(CASES)
@torch.no_grad()
def test_static_passes_match_full_forward(case):
    """In both layouts, after two passes that are repeated, as a recording of a CUDA graph begins."""
    model = shared(case)
    packed = copy.deepcopy(model).pack()
    length = reach_of(model)
    tokens = ids(2, length)
    ragged = TokenPositions.left_padded([PROMPT, 3], length, lengths=[length, length - PROMPT + 3])
    for positions in (TokenPositions.plain(length), ragged):
        plan = plan_of(packed, tokens, positions)
        assert (plan is None) == is_general(case)
        if plan is not None:
            for _ in range(2):
                plan(tokens[:, PROMPT])
            plan.cache.at.zero_()
            decoded = [plan(tokens[:, at]) for at in range(PROMPT, length)]
            close(torch.stack(decoded, 1), model(tokens, positions)[:, PROMPT:])


@torch.no_grad()
def test_windowed_layers_store_a_window():
    model = build("pattern-none").pack()
    tokens = ids(2, 60)
    plan = plan_of(model, tokens, TokenPositions.plain(60))
    assert plan is not None
    window = model.settings.kinds["near"].window
    assert window == 4
    near, far = plan.cache.sizes
    assert far == 60 and near <= PROMPT + window + 4


@pytest.mark.parametrize("name", ["rope", "stick_breaking", "cope"])
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("prompt", [1, 9])
@torch.no_grad()
def test_windows_that_wrap_several_times(name, sinks, prompt):
    """Weights that depend on the order of the keys need slots in the order of the tokens."""
    model = build({"name": name, "window": 4, "sinks": sinks}).pack()
    length = 40
    tokens = ids(2, length)
    positions = TokenPositions.plain(length)
    cache = Cache(model, 2, length)
    model(tokens[:, :prompt], positions.part(0, prompt, position_end=prompt), cache=cache, keep=0)
    plan = StaticDecodePlan.create(model, cache, positions.part(prompt, length))
    assert plan is not None
    decoded = [plan(tokens[:, at]) for at in range(prompt, length)]
    close(torch.stack(decoded, 1), model(tokens, positions)[:, prompt:])


@pytest.fixture
def counter(monkeypatch):
    """Compile all static passes, with a backend that counts graphs."""
    counter = CompileCounter()
    made = {}

    def compiled(*key):
        if key not in made:
            made[key] = torch.compile(decode_step, dynamic=False, fullgraph=True, backend=counter)
        return made[key]

    monkeypatch.setattr(static_decoding, "compiled_step", compiled)
    monkeypatch.setattr(static_decoding, "COMPILED_PASSES", 1)
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def generated(
    model: Transformer, plans: type, prompts: list[list[int]], tokens: int, monkeypatch
) -> list:
    monkeypatch.setattr(generation.decoding, "DecodePlan", plans)
    return [
        list(step) for step in Generation(model, prompts, tokens, SamplingParams(temperature=0))
    ]


def check_graphs(model: Transformer, counter: CompileCounter, monkeypatch) -> None:
    """Two generations whose lengths round to the same sizes share a graph; other sizes are another."""
    growing = generation.decoding.DecodePlan
    for prompts, tokens, graphs in (
        ([[1, 2, 3, 4], [5, 6, 7, 8]], 8, 1),
        ([[3, 1, 2], [7, 6, 4]], 7, 1),
        ([[3, 1, 2], [7, 6, 4], [1, 1, 1]], 7, 2),
    ):
        expected = generated(model, growing, prompts, tokens, monkeypatch)
        assert generated(model, StaticDecodePlan, prompts, tokens, monkeypatch) == expected
        assert counter.frame_count == graphs


@pytest.mark.parametrize("case", ["rope", pytest.param("pattern-t5", marks=pytest.mark.slow)])
def test_generations_of_equal_sizes_share_one_graph(case, counter, monkeypatch):
    check_graphs(build(case, layers=2).pack(), counter, monkeypatch)
