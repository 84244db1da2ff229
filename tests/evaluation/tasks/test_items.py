"""Exact match of task items on symbols: against generated answers, and from training to report."""

import shutil
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import evaluate as evaluate_script
import generate as generate_script
import train as train_script
from data.data_settings import DataSettings
from data.sampling.packing import IGNORED
from data.sampling.position_samplers import PLAIN
from data.task_data import generated
from errors import DataError, EvaluationError, TrainingError
from evaluation.monitor import monitor_targets
from evaluation.tasks import task_session
from evaluation.tasks.drawn_items import symbol_tokens
from evaluation.tasks.task_session import BatchScores, item_values, score_items
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import ModelSettings, TokenPositions, Transformer
from run_directory.run import Run
from tests.files import results_of
from tests.training.tiny import files_of

COUPLED = {"name": "addition", "positions": "coupled", "order": "reversed_answer"}
CASES = [
    ({"name": "copy", "symbols": 12}, "rope"),
    ({"name": "copy", "symbols": 12}, "none"),
    (COUPLED, "rope"),
    (COUPLED, "learned"),
    (COUPLED, "t5"),
    ({"name": "reverse", "symbols": 12, "positions": "coupled"}, "sinusoidal"),
]


def small(task, scheme, scale=3.0, **position):
    source = {"name": "symbols", "task": task, "lengths": [2, 5]}
    settings = DataSettings(source=source, tokenizer={"name": "symbols"})
    data = generated(settings)
    position |= {"name": scheme}
    model = ModelSettings(dim=24, layers=2, heads=6, kv_heads=2, ffn_dim=40, position=position)
    made = Transformer(model, data.tokenizer.vocab_size, data.longest).initialize(1)
    made = made.to(torch.float64).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 2:
                weight.mul_(scale)
    return data, made


def tokens_of(items, count=40):
    rows = items.rows(np.arange(count), items.data.longest)
    return rows, symbol_tokens(rows, rows.placed(PLAIN, 0, 0, np.arange(count)))


def nll_of(model, tokens, **more):
    """NLL of all targets, in their order."""
    scored = score_items(model, tokens, **more)
    return np.concatenate([s.nll[s.targets != IGNORED].numpy() for s in scored])


@pytest.mark.parametrize(("task", "scheme"), CASES, ids=str)
def test_exact_match_equals_greedy_decoding(task, scheme):
    """The targets are replaced by what the model writes, in half of the items with one error."""
    data, model = small(task, scheme)
    items = data.items("evaluation", 0)
    rows, tokens = tokens_of(items)
    expected = []
    for i, item in enumerate(items.drawn(np.arange(40))):
        prompt = [1, *item.prompt]
        (answers,) = np.nonzero(rows.targets[i] != IGNORED)
        positions = [data.positions(prompt, len(answers))] if "positions" in task else None
        greedy = SamplingParams(temperature=0)
        steps = Generation(model, [prompt], len(answers), greedy, positions=positions)
        written = [step[0] for step in steps]
        if i % 2:
            written[i % len(written)] = (written[i % len(written)] + 1) % 12
        expected.append(i % 2 == 0)
        rows.targets[i, answers] = written
        rows.inputs[i, answers[0] + 1 : answers[-1] + 1] = written[:-1]
    for batch in (7, 40):
        scored = score_items(model, tokens, length=data.longest, batch=batch)
        values = np.concatenate([item_values(scores, in_text=False) for scores in scored])
        assert values[:, 0].astype(bool).tolist() == expected


def test_numbers_of_an_item():
    data, _ = small(CASES[0][0], "rope")
    _, tokens = tokens_of(data.items("evaluation", 0), 3)
    targets = torch.from_numpy(tokens.targets)
    hits = torch.ones(targets.shape, dtype=torch.bool)
    hits[1][targets[1] != IGNORED] = False
    hits[2][targets[2] == 0] = False  # <end>
    symbols = ((targets != IGNORED) & (targets != 0)).sum((1, 2)).tolist()
    expected = [[1, symbols[0], symbols[0]], [0, 0, symbols[1]], [0, symbols[2], symbols[2]]]
    scores = BatchScores(np.arange(3), targets, torch.zeros(targets.shape), hits)
    assert item_values(scores, in_text=False).tolist() == expected


@pytest.mark.parametrize(("task", "scheme"), CASES, ids=str)
def test_padding_and_batch_change_nothing(task, scheme):
    data, model = small(task, scheme, scale=1.0)
    items = data.items("evaluation", 3)
    rows, tokens = tokens_of(items)
    before = nll_of(model, tokens, length=data.longest, batch=40)
    is_padding = tokens.placed.document < 0
    assert is_padding.any()
    rows.inputs[is_padding] = 5
    assert (before == nll_of(model, tokens, length=data.longest, batch=40)).all()
    alone = []
    for i in range(8):
        row = items.rows(np.array([i]))
        token = symbol_tokens(row, row.placed(PLAIN, 0, 0, np.array([i])))
        alone += nll_of(model, token, length=data.longest, batch=1).tolist()
    assert before[: len(alone)] == pytest.approx(alone, abs=1e-9)
    targets = monitor_targets(data, [data.longest], 4, 40, seed=3)
    ((mean, count),) = targets.measure(model).values()
    _, tokens = tokens_of(data.items("validation", 3))
    nll = nll_of(model, tokens, length=data.longest, batch=40)
    assert mean == pytest.approx(nll.mean())
    assert count == len(nll)


def test_items_are_read_at_their_declared_length():
    data, model = small(CASES[0][0], "rope", scaling={"name": "yarn", "factor": "auto"})
    rows, tokens = tokens_of(data.items("evaluation", 0), 1)
    expected = []
    for length in (40, 41):
        nll = nll_of(model, tokens, length=length, batch=1)
        places = TokenPositions.plain(rows.inputs.shape[1], length=length)
        logits = model(torch.from_numpy(rows.inputs), places)[0].detach()
        targets = torch.from_numpy(rows.targets[0])
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        assert nll == pytest.approx(losses[targets != IGNORED].numpy(), abs=1e-12)
        expected.append(losses.sum().item())
    assert abs(expected[0] - expected[1]) > 1e-4


BASE = [
    "data.tokenizer.name=symbols",
    "model={dim: 16, layers: 1, heads: 2, kv_heads: 2}",
    "training.batch_size=8",
    "training.precision=float32",
    "training.validation.spans=8",
    "training.checkpoint.interval=4",
]


def call(script, *words):
    return script.main([str(word) for word in words])


def trained(folder: Path, task: str, length: int, *more) -> Path:
    source = f"data.source={{name: symbols, task: {task}, lengths: [2, 6]}}"
    sizes = [f"train_length={length}", f"training.tokens={8 * length * 8}"]
    call(train_script, source, *BASE, *sizes, "--run-dir", folder, *more)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on coupled addition whose positions cover 12 digits."""
    return trained(
        tmp_path_factory.mktemp("runs") / "addition",
        "{name: addition, positions: coupled, max_position: 16}",
        22,
        "model.position={name: learned, max_length: 17}",
    )


def report_of(run: Path, name: str) -> dict:
    return results_of(run / "evaluation" / name)


def test_run_is_evaluated_at_lengths_of_problems(run, capsys, monkeypatch):
    declared = []

    def answer(*args, length, **more):
        declared.append(length)
        return score_items(*args, length=length, **more)

    monkeypatch.setattr(task_session, "score_items", answer)
    call(evaluate_script, run, "protocol=tasks", "lengths=[[2,6],9,12]", "items=20", "folder=one")
    report = report_of(run, "one")
    assert report["lengths"] == [[2, 6], [9, 9], [12, 12]]
    # <begin>, two terms, + and =, and a sum of one more digit
    assert declared == [3 * 6 + 4, 3 * 9 + 4, 3 * 12 + 4]
    assert [cell["length"] for cell in report["cells"]] == [6, 9, 12]
    assert all(len(cell["unit_exact"]) == 20 for cell in report["cells"])
    assert report["methods"].keys() == {"trained"}  # no item is cut
    cell = report["cells"][1]
    assert cell["chance"] == pytest.approx(1e-10)
    # Wilson's interval of 0 of 20 items, simultaneous over three lengths
    square = NormalDist().inv_cdf(1 - 0.05 / 3 / 2) ** 2
    assert (cell["exact"], cell["exact_low"]) == (0, 0)
    assert cell["exact_high"] == pytest.approx(square / (20 + square))
    assert cell["against_chance"] == "not distinguishable from chance"
    first = (run / "evaluation" / "one" / "results.csv").read_bytes()
    capsys.readouterr()
    call(evaluate_script, run, run / "evaluation" / "one" / "settings.yaml")
    assert "3 of 3 cells are already done" in capsys.readouterr().err
    assert (run / "evaluation" / "one" / "results.csv").read_bytes() == first
    again = ["protocol=tasks", "lengths=[6]", "items=20", "folder=two", "seed=1", "--no-report"]
    call(evaluate_script, run, *again)
    assert report_of(run, "two")["items_hash"] not in report["items_hash"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["lengths=[6,30]"], "length 30 requires 34 positions"),
        (["lengths=[4,[2,4]]"], "same maximum"),
        (["task={name: passkey}"], "symbols differ from those"),
        (["task={name: addition, hints: 3}"], "symbols differ from those"),
    ],
)
def test_evaluations_that_cannot_work_are_rejected(run, words, match):
    with pytest.raises(EvaluationError, match=match):
        call(evaluate_script, run, "protocol=tasks", "items=5", *words)
    with pytest.raises(EvaluationError, match="protocol=tasks"):
        call(evaluate_script, run)


def test_generation_uses_the_positions_of_the_task(run, capsys):
    call(generate_script, run, "--prompt", "1 2 + 3 4 =", "--greedy", "--tokens", "3")
    with_cache = capsys.readouterr().out
    call(generate_script, run, "--prompt", "1 2 + 3 4 =", "--greedy", "--tokens", "3", "--no-cache")
    assert capsys.readouterr().out == with_cache
    with pytest.raises(DataError, match="whole problem"):
        call(generate_script, run, "--prompt", "1 2 + 3 4", "--greedy")
    # a table of 17 positions holds longer prompts than 17 tokens
    prompt = "1 2 3 4 5 6 7 8 + 1 2 3 4 5 6 7 8 ="
    call(generate_script, run, "--prompt", prompt, "--greedy", "--tokens", "9")


def test_training_resumes_exactly(tmp_path, run):
    """Bit for bit, from the checkpoint in the middle."""
    copied = tmp_path / "again"
    shutil.copytree(run, copied)
    shutil.rmtree(copied / "checkpoints" / "step-00000008")
    task = "{name: addition, positions: coupled, max_position: 16}"
    trained(copied, task, 22, "model.position={name: learned, max_length: 17}")
    assert files_of(copied, 8)[:2] == files_of(run, 8)[:2]
    assert Run(run).manifest["data_hash"] == Run(copied).open_data().hash


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["train_length=30"], "set train_length to 22"),
        (["model.position={name: learned, max_length: 12}"], "needs 17 positions"),
        (["data.positions.name=pose"], "data.positions.name=pose"),
        (["training.stages=[{length: 11, duration: 0.5}, {}]"], "stages"),
    ],
)
def test_trainings_that_cannot_work_are_rejected(tmp_path, words, match):
    task = "{name: addition, positions: coupled, max_position: 16}"
    with pytest.raises((TrainingError, DataError), match=match):
        trained(tmp_path / "never", task, 22, *words)
    assert not (tmp_path / "never").exists()


def test_random_positions_at_test_time(tmp_path):
    run = trained(
        tmp_path / "random",
        "{name: copy, symbols: 40}",
        14,
        "data.positions={name: random_subset, max_length: 60}",
    )
    hashes = set()
    for positions in ("fixed", "redrawn", "null"):
        words = ["protocol=tasks", "items=20", f"positions={positions}", f"folder=by-{positions}"]
        words.append("--no-report")
        call(evaluate_script, run, *words)
        hashes.add(report_of(run, f"by-{positions}")["items_hash"])
    assert len(hashes) == 3
    with pytest.raises(EvaluationError, match=r"positions=fixed.*max_length = 60"):
        call(evaluate_script, run, "protocol=tasks", "lengths=[40]", "positions=fixed")
