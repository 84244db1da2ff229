"""Rows that join and leave a running batch, against `Generation` and full forward passes."""

import pytest
import torch

from generation.continuous_batch import ContinuousBatch, GenerationRow
from generation.sampling import SamplingParams
from model import ModelError, TokenPositions, Transformer
from model.settings import LinearMixer
from tests.generation.test_generation import POSITIONS, QUICK, RAGGED, rows, tiny

LONG = [7, 19, 2, 25, 11, 4, 4, 16, 30, 8, 21, 3, 13]
PROMPTS = [*RAGGED, LONG, [8], [23, 1]]
SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.3, top_p=0.95),
    SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.4),
]


def requests(**options) -> list[GenerationRow]:
    return [
        GenerationRow(list(prompt), 4 + 2 * i, SAMPLING[i % 3], seed=100 + i, **options)
        for i, prompt in enumerate(PROMPTS)
    ]


def run(batch, asked, every=2, cancel=()):
    """Admit one request every few steps and collect the tokens; rows in `cancel` stop at two
    tokens."""
    found = {row: [] for row in asked}
    waiting = list(asked)
    step = 0
    while waiting or len(batch):
        if waiting and step % every == 0:
            batch.admit(waiting.pop(0))
        for row, scores in batch.step():
            found[row] += scores
            if row in cancel and len(found[row]) == 2:
                row.finish = "stop"
        batch.remove_finished()
        step += 1
    return [found[row] for row in asked]


def alone(model, row, **options):
    return rows(model, [row.prompt], row.sampling, row.tokens, seeds=[row.seed], **options)[0]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in POSITIONS],
)
def test_rows_that_join_equal_rows_generated_alone(name):
    model = tiny(POSITIONS[name])
    asked = requests()
    found = run(ContinuousBatch(model, chunk=5), asked, cancel=asked[2:3])
    for row, scores in zip(asked, found, strict=True):
        expected = alone(model, row)
        tokens = [score.token for score in scores]
        assert tokens == (expected[:2] if row is asked[2] else expected)
        assert row.finish == ("stop" if row is asked[2] else "length")


@pytest.mark.parametrize(
    "position",
    [
        {"name": "rope", "window": 4, "sinks": 2},
        {"name": "rope", "window": 6, "sinks": 3, "remap": {"name": "streaming"}},
        {"name": "rope", "remap": {"name": "self_extend", "group": 2}},
    ],
)
def test_sinks_survive_changes_of_the_batch(position):
    model = tiny(position)
    asked = requests()
    found = run(ContinuousBatch(model, chunk=3), asked, every=1)
    for row, scores in zip(asked, found, strict=True):
        assert [score.token for score in scores] == alone(model, row)


def test_linear_attention_joins_too():
    plain = tiny({"name": "rope"})
    settings = plain.settings.model_copy(update={"mixer": LinearMixer(name="linear", chunk=4)})
    model = Transformer(settings, 31, 9).initialize(1).double()
    with torch.no_grad():
        model.head.weight.mul_(60)
    asked = requests()
    found = run(ContinuousBatch(model, chunk=5), asked, cancel=asked[2:3])
    for row, scores in zip(asked, found, strict=True):
        assert [score.token for score in scores] == alone(model, row)[: len(scores)]


@torch.no_grad()
def test_scores_equal_a_full_forward_pass():
    model = tiny({"name": "rope"})
    asked = requests(logprobs=3, score_prompt=True)
    found = run(ContinuousBatch(model, chunk=4), asked)
    for row, scores in zip(asked, found, strict=True):
        tokens = [score.token for score in scores]
        assert tokens[: len(row.prompt)] == row.prompt
        assert len(tokens) == row.length
        log_p = model(torch.tensor([tokens]), TokenPositions.plain(len(tokens)))[0].log_softmax(-1)
        assert scores[0].logprob is None
        for at, score in enumerate(scores[1:]):
            assert score.logprob == pytest.approx(float(log_p[at, score.token]), abs=1e-5)
            values, ids = log_p[at].topk(3)
            assert [i for i, _ in score.top] == ids.tolist()
            assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_prompt_alone_is_scored():
    model = tiny({"name": "alibi"})
    row = GenerationRow(LONG, 0, SAMPLING[0], logprobs=1, score_prompt=True)
    batch = ContinuousBatch(model, chunk=5)
    (scores,) = run(batch, [row])
    assert [score.token for score in scores] == LONG
    assert row.finish == "length"
    assert len(batch) == 0


def test_end_of_document_finishes_a_row():
    model = tiny({"name": "rope"})
    asked = GenerationRow(LONG, 12, SAMPLING[1], seed=3)
    free = alone(model, asked)
    eos = free[5]
    (scores,) = run(ContinuousBatch(model, eos_ids=[eos]), [asked])
    assert [score.token for score in scores] == free[: free.index(eos) + 1]
    assert asked.finish == "eos"


def test_invalid_rows_are_refused_and_others_continue():
    model = tiny({"name": "rope"})
    batch = ContinuousBatch(model)
    good = GenerationRow(LONG, 5, SAMPLING[0])
    batch.admit(good)
    for prompt in ([], [31], [-1]):
        with pytest.raises(ModelError):
            batch.admit(GenerationRow(prompt, 5, SAMPLING[0]))
    found = [score.token for _ in range(5) for _, scores in batch.step() for score in scores]
    assert found == alone(model, good)


def test_logits_that_are_not_finite_end_the_row():
    model = tiny({"name": "rope"})
    with torch.no_grad():
        model.embed.weight[9] = float("nan")
    batch = ContinuousBatch(model)
    bad = GenerationRow([3, 9], 4, SAMPLING[0])
    good = GenerationRow([3, 8], 4, SAMPLING[0])
    batch.admit(bad)
    batch.admit(good)
    while len(batch):
        batch.step()
        batch.remove_finished()
    assert isinstance(bad.error, ModelError)
    assert good.error is None and good.generated == 4


@pytest.mark.parametrize(
    "name", ["rope", "rope yarn auto", "alibi window", "fox", "pattern of biases"]
)
def test_rows_of_one_prompt_share_its_prefill(name):
    """Rows with the same prompt and declared length, of which one leaves during the prefill."""
    model = tiny(POSITIONS[name])
    passes = []
    model.register_forward_pre_hook(lambda module, inputs: passes.append(inputs[0].shape))
    asked = [GenerationRow(list(LONG), 6, SAMPLING[i % 3], seed=i, logprobs=0) for i in range(4)]
    asked[1].score_prompt = True
    other = GenerationRow(list(LONG), 5, SAMPLING[1], seed=9)  # of another declared length
    batch = ContinuousBatch(model, chunk=5)
    for row in [*asked, other]:
        batch.admit(row)
    found = {row: [] for row in [*asked, other]}
    while len(batch):
        for row, scores in batch.step():
            found[row] += [score.token for score in scores]
        asked[3].finish = asked[3].finish or "stop"
    assert [shape for shape in passes if shape[1] > 1] == [(1, 5), (1, 5), (1, 3)] * 2
    assert found.pop(asked[3]) == []
    assert found[asked[1]][: len(LONG)] == LONG
    found[asked[1]] = found[asked[1]][len(LONG) :]
    for row, tokens in found.items():
        assert tokens == alone(model, row)
