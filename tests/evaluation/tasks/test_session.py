"""Task evaluation: scorers with known answers, and a model scored one item at a time."""

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from data import ByteTokenizer
from data.tasks.retrieval import PasskeyTask
from evaluation.scoring.methods import Method
from evaluation.scoring.scoring import CellFailed
from evaluation.tasks.drawn_items import draw_items
from evaluation.tasks.task_analysis import analyse_tasks
from evaluation.tasks.task_scoring import TaskAnswers, TaskScorer, read_items
from evaluation.tasks.task_session import TaskSession
from evaluation.tasks.task_settings import TaskEvaluationSettings
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import ModelSettings, TokenPositions, Transformer
from tests.evaluation.conftest import MemoryModel

TOKENIZER = ByteTokenizer()
TEXTS = [(f"doc{i}", f"The {i}th hill is steep, and the road goes on. " * 30) for i in range(7)]
TRAINED = Method("trained", ())
CUT = Method("truncate", ())


def draw(task=None, **settings):
    settings = TaskEvaluationSettings(
        **{"items": 30, "lengths": [100, 200], "depths": 3, "batch": 8, **settings}
    )
    return settings, draw_items(
        settings,
        task or PasskeyTask(digits=3),
        TOKENIZER,
        bos=True,
        trained_length=100,
        documents=lambda: TEXTS,
        origin="here",
    )


def answered(reader, tmp_path, **changes):
    settings, drawn = draw(**changes)
    facts = {"task": drawn.task.name, "haystack": "here", "tokenizer_hash": TOKENIZER.hash}
    session = TaskSession(
        settings,
        MemoryModel(small_model()),
        drawn,
        [TRAINED, CUT],
        cells=tmp_path / "cells",
        facts=facts,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluation.tasks.task_session.TaskScorer", lambda *_: reader)
        return session.run()


def retriever(prompts, candidates, length):
    """Knows the answer where it still stands in what it is given, and otherwise guesses the first
    digits."""
    nll = np.empty(candidates.shape[:2])
    exact = np.zeros(len(prompts), dtype=bool)
    for row, (prompt, options) in enumerate(zip(prompts, candidates, strict=True)):
        text = bytes(t for t in prompt if t < 256)
        marks = [bytes(option.tolist()) for option in options]
        asked = text.rsplit(b"\n", 1)[1]
        for column, mark in enumerate(marks):
            guess = 1 + mark[1] + 0.01 * mark[2]
            nll[row, column] = 0.0 if asked + mark in text else guess
        exact[row] = asked + marks[0] in text
    return nll, exact


def test_haystacks_cover_depths_and_items_are_nested():
    _, drawn = draw(items=42, haystacks=7)
    assert drawn.unit_kind == "haystack"
    assert len(drawn.unit_names) == 7
    counts = np.zeros((7, 3), dtype=int)
    np.add.at(counts, (drawn.unit, drawn.depth), 1)
    assert (counts == 2).all()
    assert drawn.chance == 1 / 3
    for short, long in zip(drawn.items[100], drawn.items[200], strict=True):
        assert (short.answer, short.others) == (long.answer, long.others)
        assert len(long.prompt) - len(short.prompt) == 100
        # inputs: BOS, prompt, all but the last
        assert 1 + len(short.prompt) + len(short.answer) - 1 == 100
    assert drawn.hash == draw(items=42, haystacks=7)[1].hash
    assert drawn.hash != draw(items=42, haystacks=7, seed=1)[1].hash
    _, more = draw(items=42, haystacks=7, lengths=[100, 150, 200])
    assert more.hash_at(200) == drawn.hash_at(200)  # another length in between moves nothing


def test_retrieval_oracle_accuracy(tmp_path):
    result = answered(retriever, tmp_path)
    analysis = analyse_tasks(result)
    rows = {(row["method"], row["length"]): row for row in analysis["cells"]}
    for length in (100, 200):
        row = rows["trained", length]
        assert row["accuracy"] == row["exact"] == 1
        assert row["against_chance"] == "above chance"
        # Every haystack counts once where all answers are right: Wilson's low end is D / (D + z²).
        assert row["n_eff"] == 7
        assert row["wilson_low"] == pytest.approx(7 / (7 + 1.959964**2))
    # Cut to the trained length, an answer before the cut is lost.
    cut = rows["truncate", 200]
    items = result.drawn.items[200]
    # Six tokens of answer, the last of which is no input: 95 tokens of prompt are left.
    needed = []
    for item in items:
        stem = bytes(item.prompt).rsplit(b"\n", 1)[1]
        needed.append(item.distance + len(stem))
    kept = np.array(needed) <= 95
    assert 0 < kept.mean() < 1
    assert cut["exact"] == kept.mean()
    gain = rows["trained", 200]["gain"]
    assert gain == pytest.approx(1 - cut["accuracy"])
    assert gain > 0
    assert rows["truncate", 100]["accuracy"] == 1
    assert rows["trained", 100]["gain"] is None
    # The cells of a grid are all items, once.
    for spots in (analysis["by_depth"], analysis["by_distance"]):
        assert sum(spot["share"]["n"] for spot in spots) == 30 * len(rows)
    cut = [s for s in analysis["by_distance"] if s["method"] == "truncate"]
    assert all(s["share"]["share"] < 1 for s in cut if s["where"] >= 128)
    assert {s["share"]["share"] for s in cut if s["until"] <= 64} == {1.0}


@functools.cache
def small_model():
    settings = ModelSettings(
        dim=24,
        layers=2,
        heads=6,
        kv_heads=2,
        ffn_dim=40,
        # the declared length matters
        position={"name": "rope", "scaling": {"name": "yarn", "factor": "auto"}},
    )
    return Transformer(settings, TOKENIZER.vocab_size, 100).initialize(1).to(torch.float64).eval()


@pytest.fixture(scope="module")
def model():
    made = copy.deepcopy(small_model())
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 2:
                weight.mul_(3)
    return made


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize(("length", "cut"), [(100, None), (200, 100), (200, None)])
def test_cached_prefix_matches_full_forward(model, chunk, length, cut):
    """Also where the context is cut to the trained length."""
    _, drawn = draw(items=5)
    items = drawn.items[length]
    read = cut or length
    answers = read_items(
        TaskScorer(model, chunk=chunk),
        items,
        length,
        bos=256,
        batch=2,
        cut=cut,
    )
    for row, item in enumerate(items):
        for column, candidate in enumerate([item.answer, *item.others]):
            tokens = torch.tensor([[256, *item.prompt, *candidate][-read - 1 :]])
            assert tokens.shape == (1, read + 1)
            with torch.no_grad():
                nll = model(tokens[:, :-1], TokenPositions.plain(read), targets=tokens[:, 1:])
            expected = float(nll[0, -len(candidate) :].sum())
            assert answers.nll[row, column] == pytest.approx(expected, abs=1e-9)


def test_exact_match_equals_greedy_decoding(model):
    """Answers are replaced by what the model writes, in full or up to a wrong token."""
    _, drawn = draw(items=6)
    items = []
    expected = []
    for i, item in enumerate(drawn.items[100]):
        prompt = [256, *item.prompt]
        count = len(item.answer)
        written = [
            step[0] for step in Generation(model, [prompt], count, SamplingParams(temperature=0))
        ]
        wrong = [*written]
        if i % 2:
            wrong[i // 2] = (wrong[i // 2] + 1) % 250
        items.append(replace(item, answer=wrong))
        expected.append(i % 2 == 0)
    found = read_items(TaskScorer(model), items, 100, bos=256, batch=4)
    assert found.exact.tolist() == expected


def test_exact_match_ignores_padding_of_the_vocabulary(model):
    """With 200 ids, the answer to match is the most likely of these, and the loss still that of all
    rows."""
    _, drawn = draw(items=3)
    items = []
    for item in drawn.items[100]:
        sampling = SamplingParams(temperature=0)
        steps = Generation(model, [item.prompt], len(item.answer), sampling, vocab_size=200)
        items.append(replace(item, answer=[step[0] for step in steps]))
    whole = read_items(TaskScorer(model), items, 100, bos=None, batch=3)
    padded = read_items(TaskScorer(model, vocab_size=200), items, 100, bos=None, batch=3)
    assert padded.exact.all()
    assert not whole.exact.all()
    assert (padded.nll == whole.nll).all()


def test_a_tie_is_no_right_answer():
    nll = np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 3.0], [3.0, 2.0, 4.0]])
    assert TaskAnswers(nll, np.zeros(3, dtype=bool)).right.tolist() == [True, False, False]


def test_non_finite_loss_fails_the_cell(tmp_path):
    def broken(prompts, candidates, length):
        return np.full(candidates.shape[:2], np.nan), np.zeros(len(prompts), dtype=bool)

    _, drawn = draw(items=3)
    with pytest.raises(CellFailed, match="not finite at length 100"):
        read_items(broken, drawn.items[100], 100, bos=256, batch=2)
    result = answered(broken, tmp_path)
    assert len(result.failed) == 4
    assert not result.answers
