"""Task evaluation: scorers with known answers, and a model scored one item at a time."""

import copy
import functools

import numpy as np
import pytest
import torch

from data import ByteTokenizer
from data.tasks import TaskItem
from data.tasks.retrieval import PasskeyTask
from evaluation.evaluation_settings import TaskEvaluationSettings
from evaluation.methods import Method
from evaluation.tasks.drawn_items import draw_text, text_tokens
from evaluation.tasks.task_analysis import analyse_tasks
from evaluation.tasks.task_session import TaskMeasurement, item_values, score_items
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
    return settings, draw_text(
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
    session = TaskMeasurement(
        settings,
        MemoryModel(small_model()),
        drawn,
        [TRAINED, CUT],
        cells=tmp_path / "cells",
        facts={"haystack": "here"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluation.tasks.task_session.score_batch", reader)
        return session.run()


def retriever(model, prompts, inputs, targets, *_):
    """Knows the answer where it still stands in what it is given, and otherwise guesses the first
    digits."""
    nll = torch.zeros(targets.shape, dtype=torch.float64)
    hits = torch.ones(targets.shape, dtype=torch.bool)
    for row, (prompt, options) in enumerate(zip(prompts.tolist(), targets.tolist(), strict=True)):
        text = bytes(t for t in prompt if t < 256)
        asked = text.rsplit(b"\n", 1)[1]
        for column, mark in enumerate(map(bytes, options)):
            known = asked + mark in text
            nll[row, column, -1] = 0.0 if known else 1 + mark[1] + 0.01 * mark[2]
            hits[row, column, -1] = known
    return nll, hits


def test_haystacks_cover_depths_and_items_are_nested():
    _, drawn = draw(items=42, haystacks=7)
    assert drawn.unit_kind == "haystack"
    assert len(drawn.unit_names) == 7
    counts = np.zeros((7, 3), dtype=int)
    np.add.at(counts, (drawn.unit, drawn.depth), 1)
    assert (counts == 2).all()
    assert drawn.chance == 1 / 3
    short = drawn.lengths[100].tokens
    long = drawn.lengths[200].tokens
    for i in range(42):
        assert (short.targets[i] == long.targets[i]).all()
        assert short.prompts[i][0] == long.prompts[i][0] == TOKENIZER.bos_id
        assert len(long.prompts[i]) - len(short.prompts[i]) == 100
        # all but the last token of an answer is read
        assert (short.inputs[i] == short.targets[i][:, :-1]).all()
        assert len(short.prompts[i]) + short.inputs[i].shape[1] == 100
    assert drawn.hash == draw(items=42, haystacks=7)[1].hash
    assert drawn.hash != draw(items=42, haystacks=7, seed=1)[1].hash
    _, more = draw(items=42, haystacks=7, lengths=[100, 150, 200])
    # another length in between moves nothing
    assert more.lengths[200].hash == drawn.lengths[200].hash


def test_retrieval_oracle_accuracy(tmp_path):
    result = answered(retriever, tmp_path)
    analysis = analyse_tasks(result)
    rows = {(row["method"], row["length"]): row for row in analysis["cells"]}
    for length in (100, 200):
        row = rows["trained", length]
        assert row["accuracy"] == row["exact"] == 1
        assert row["against_chance"] == "above chance"
        # Every haystack counts once where all answers are right: Wilson's low end is D / (D + z²).
        assert row["exact_low"] == pytest.approx(7 / (7 + 1.959964**2))
    # Cut to the trained length, an answer before the cut is lost.
    cut = rows["truncate", 200]
    items = result.drawn.lengths[200]
    # Six tokens of answer, the last of which is no input: 95 tokens of prompt are left.
    needed = []
    for prompt, options in zip(items.tokens.prompts, items.tokens.targets, strict=True):
        text = bytes(prompt[1:].tolist())
        stem = text.rsplit(b"\n", 1)[1]
        needed.append(len(text) - text.index(stem + bytes(options[0].tolist())))
    kept = np.array(needed) <= 95
    assert 0 < kept.mean() < 1
    assert cut["exact"] == kept.mean()
    gain = rows["trained", 200]["gain"]
    assert gain == pytest.approx(1 - cut["accuracy"])
    assert gain > 0
    assert rows["truncate", 100]["accuracy"] == 1
    assert rows["trained", 100]["gain"] is None
    # The cells by depth are all items, once, and nothing near the question is lost.
    assert sum(spot["share"]["n"] for spot in analysis["by_depth"]) == 30 * len(rows)
    near = [s["share"]["share"] for s in analysis["by_depth"] if s["where"] == 1]
    assert near == [1] * len(rows)


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


def values_of(model, tokens, length=100, **more):
    """The rows of a cell: NLL of each candidate, and exact match."""
    values = {}
    for scores in score_items(model, tokens, length=length, batch=2, **more):
        values |= dict(zip(scores.members.tolist(), item_values(scores, in_text=True), strict=True))
    return np.stack([values[i] for i in range(len(values))])


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize(("length", "cut"), [(100, None), (200, 100), (200, None)])
def test_cached_prefix_matches_full_forward(model, chunk, length, cut):
    """Also where the context is cut to the trained length."""
    tokens = draw(items=5)[1].lengths[length].tokens
    read = cut or length
    values = values_of(model, tokens, read, chunk=chunk, cut=cut)
    for row, (prompt, candidates) in enumerate(zip(tokens.prompts, tokens.targets, strict=True)):
        for column, candidate in enumerate(candidates):
            whole = torch.tensor([[*prompt, *candidate][-read - 1 :]])
            assert whole.shape == (1, read + 1)
            with torch.no_grad():
                nll = model(whole[:, :-1], TokenPositions.plain(read), targets=whole[:, 1:])
            expected = float(nll[0, -len(candidate) :].sum())
            assert values[row, column] == pytest.approx(expected, abs=1e-9)


def test_answers_of_one_token_are_read_from_the_prompt_alone(model):
    item = TaskItem([5, 6, 7, 8], [False, False, False, True], others=[[9], [10]])
    (values,) = values_of(model, text_tokens([item], 256))
    tokens = torch.tensor([[256, 5, 6, 7]])
    with torch.no_grad():
        logits = model(tokens, TokenPositions.plain(4, length=100))[0, -1]
    losses = torch.log_softmax(logits, dim=0).neg()
    assert values[:3] == pytest.approx([float(losses[i]) for i in (8, 9, 10)], abs=1e-9)
    assert bool(values[3]) == (int(logits.argmax()) == 8)


def rewritten(tokens, model, change=lambda i, answer: answer, **options):
    """Items whose answers are what the model writes, changed by `change(i, answer)`."""
    targets = []
    for i, (prompt, candidates) in enumerate(zip(tokens.prompts, tokens.targets, strict=True)):
        greedy = SamplingParams(temperature=0)
        count = candidates.shape[1]
        steps = Generation(model, [prompt.tolist()], count, greedy, **options)
        answer = change(i, [step[0] for step in steps])
        targets.append(np.array([answer, *candidates[1:]]))
    return tokens._replace(inputs=[x[:, :-1] for x in targets], targets=targets)


def test_exact_match_equals_greedy_decoding(model):
    """Answers are replaced by what the model writes, in full or up to a wrong token."""

    def change(i, answer):
        if i % 2:
            answer[i // 2] = (answer[i // 2] + 1) % 250
        return answer

    tokens = rewritten(draw(items=6)[1].lengths[100].tokens, model, change)
    assert values_of(model, tokens)[:, -1].tolist() == [1, 0, 1, 0, 1, 0]


def test_exact_match_ignores_padding_of_the_vocabulary(model):
    """With 200 ids, the answer to match is the most likely of these, and the loss still that of all
    rows."""
    tokens = draw(items=3)[1].lengths[100].tokens
    without_bos = tokens._replace(prompts=[prompt[1:] for prompt in tokens.prompts])
    tokens = rewritten(without_bos, model, vocab_size=200)
    whole = values_of(model, tokens)
    padded = values_of(model, tokens, vocab_size=200)
    assert padded[:, -1].all()
    assert not whole[:, -1].all()
    assert (padded[:, :-1] == whole[:, :-1]).all()


def test_a_tie_is_no_right_answer(tmp_path):
    def ties(model, prompts, inputs, targets, *_):
        nll = torch.zeros(targets.shape, dtype=torch.float64)
        nll[:, 2] = 3.0
        return nll, torch.zeros(targets.shape, dtype=torch.bool)

    result = answered(ties, tmp_path)
    assert not result.metrics(("trained", 100))["accuracy"].any()


def test_non_finite_loss_fails_the_cell(tmp_path):
    def broken(model, prompts, inputs, targets, *_):
        return torch.full(targets.shape, float("nan")), torch.zeros(targets.shape, dtype=torch.bool)

    result = answered(broken, tmp_path)
    assert len(result.failed) == 4
    assert "not finite at length 100" in result.failed["trained", 100]
    assert not result.answers
