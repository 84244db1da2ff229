"""train.py end to end in one process: logs, exact resume, signals, stages, and what stops a run."""

import math
import shlex
import shutil
import signal
import sys

import numpy as np
import pytest
import torch

import evaluate
import generate
from errors import INTERRUPTED, REQUEUE, EvaluationError, TrainingError
from evaluation.monitor import monitor_targets
from generation import samples
from model import TokenPositions
from run_directory.checkpoints import steps_of
from run_directory.metrics_file import read_metrics
from run_directory.run import Run
from tests.training.tiny import cut, files_of, lines, same, trained, weights
from training.metrics import Metrics
from training.micro_batches import make_sampler
from training.parallel import Parallel


def losses(folder):
    return [line["loss"] for line in lines(folder, "train")]


def test_run_logs_every_step_and_validates_beyond_trained_length(whole, corpus):
    assert [line["step"] for line in lines(whole, "train")] == list(range(1, 13))
    validations = lines(whole, "validation")
    assert [line["step"] for line in validations] == [4, 8, 12]
    assert set(validations[0]["nll"]) == {"24", "48", "96"}
    assert {(line["targets"], line["documents"]) for line in validations} == {(4 * 8, 4)}
    assert abs(losses(whole)[0] - math.log(258)) < 0.06
    assert losses(whole)[-1] < losses(whole)[0] - 0.3
    (samples,) = lines(whole, "samples")
    (sample,) = samples["samples"]
    openings = [file.read_text()[:16] for file in corpus.iterdir()]
    assert sample["prompt"] in [text[: text.rindex(" ")] for text in openings]  # whole words


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, INTERRUPTED),
        (signal.SIGTERM, REQUEUE),
    ],
)
def test_signal_saves_checkpoint_and_exits(overrides, whole, tmp_path, capsys, number, status):
    folder = tmp_path / "a run"
    real = Metrics.log

    def log(self, state, *arguments, **options):
        if state.step == 6:
            signal.raise_signal(number)
        return real(self, state, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "log", log)
        words = [*overrides, "training.checkpoint.interval=null", "--run-dir", folder]
        assert trained(*words) == status
    assert f"stopped by {number.name} after step 7; saved" in capsys.readouterr().err
    assert steps_of(folder) == [7]
    assert trained(*overrides, "--run-dir", folder) == 0
    shown = capsys.readouterr().err.partition("next: ")[2].partition("   or   ")[0]
    assert shlex.split(shown) == ["python", "evaluate.py", str(folder)]  # can be pasted
    assert losses(folder) == losses(whole)
    assert same(weights(folder), weights(whole))


# 8 + 6 + 6 steps: 96 tokens, then 144, then 96 again; the second stage changes the base, the third
# drops RoPE.
STAGES = [
    "training.tokens=2208",
    "model.position.scaling={name: yarn, factor: auto}",
    "training.batch_size=4",
    "training.checkpoint={keep: 40, interval: 1}",
    "training.validation.interval=null",
    "training.micro_batch_size=3",
    "training.stages=[{length: 12, duration: 8}, {length: 24, batch_size: 6, duration: 6, "
    "overrides: [model.position.theta=500]}, {length: 8, warmup: 2, overrides: "
    "['model.position.scaling={name: drop}']}]",
]
SAMPLED = [
    "model.position.name=sinusoidal",
    "data.positions.name=cape",
    "data.packing=intra_document",
    "training.micro_batch_size=3",
    "training.checkpoint.keep=9",
]
CHOICES = [
    "training.optimizer={name: muon, adamw: {lr: 1e-3, positions_lr: 4e-3}}",
    "training.z_loss=0.1",
    "training.ema={decay: 0.8, start: 2}",
    "training.log_interval=5",
    "training.samples.interval=5",
    "training.checkpoint={interval: 1, keep: 12}",
]


@pytest.fixture(scope="module")
def runs(settings_of_runs, tmp_path_factory):
    """Uninterrupted runs by the name of their settings, each trained once."""
    cases = {"stages": STAGES, "sampled": SAMPLED, "choices": CHOICES}
    root = tmp_path_factory.mktemp("cases")
    for name, case in cases.items():
        assert trained(*settings_of_runs, *case, "--run-dir", root / name) == 0
    return root, cases


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("stages", [11, 13]),  # in a stage, and once more before an edge
        ("stages", [14]),  # at an edge
        ("sampled", [9]),
        ("choices", [6, 9]),
    ],
)
def test_resumes_are_bit_exact(runs, overrides, tmp_path, case, steps):
    root, cases = runs
    folder = tmp_path / "cut"
    shutil.copytree(root / case, folder)
    for step in steps:
        cut(folder, step)
        assert trained(*overrides, *cases[case], "--run-dir", folder) == 0
        assert lines(folder) == lines(root / case)
        last = steps_of(folder)[-1]
        assert files_of(folder, last) == files_of(root / case, last)


def test_stages_change_lengths_and_rates(runs):
    root = runs[0] / "stages"
    logged = lines(root, "train")
    sizes = [96] * 8 + [144] * 6 + [96] * 6
    assert [line["targets"] for line in logged] == sizes
    assert [line["tokens"] for line in logged] == np.cumsum(sizes).tolist()
    changes = [(x["step"], x["length"], x["batch_size"]) for x in lines(root, "change")]
    assert changes == [(8, 24, 6), (14, 8, 12)]
    # One schedule over all steps, but for the two in which it rises again.
    rates = [line["lr"] for line in logged]
    assert rates[14] == pytest.approx((rates[13] + rates[15]) / 4, rel=0.02)
    assert sorted(rates[:14], reverse=True) == rates[:14]
    assert rates[13] > rates[15] > rates[19]


@pytest.mark.parametrize(
    ("step", "overrides"),
    [
        (7, []),
        (8, ["model.position.theta=500"]),
        (13, []),
        (14, ["model.position.scaling={name: drop}"]),
    ],
)
def test_loss_of_the_first_and_last_step_of_a_stage(runs, step, overrides):
    """The logged loss and gradient norm of the update after `step` others, in micro-batches of
    different sizes, are those of the saved weights under the positions of its stage, declared at
    the length of its windows, in one pass."""
    run = Run(runs[0] / "stages")
    model = run.load(overrides, checkpoint=step).model
    batch = make_sampler(run.settings, run.open_data()).batch(step)
    places = TokenPositions.plain(batch.tokens.shape[1])
    tokens = torch.from_numpy(batch.tokens)
    nll = model(tokens, places, targets=torch.from_numpy(batch.targets)).mean()
    nll.backward()
    squares = [weight.grad.square().sum() for weight in model.parameters()]
    logged = lines(run.folder, "train")[step]
    assert logged["loss"] == pytest.approx(nll.item(), abs=1e-6)
    assert logged["grad_norm"] == pytest.approx(sum(squares).item() ** 0.5, rel=1e-4)


def test_optimizer_z_loss_and_average_take_effect(runs, overrides, tmp_path, capsys):
    whole = runs[0] / "choices"
    logged = lines(whole, "train")
    for line in logged:
        assert line["lr"] == pytest.approx(2 * line["adamw_lr"])
        assert line["positions_lr"] == pytest.approx(4 * line["adamw_lr"])
    # The loss is logged without the penalty: at the first step that is the whole difference.
    plain = [word for word in CHOICES if "z_loss" not in word]
    assert trained(*overrides, *plain, "--run-dir", tmp_path) == 0
    assert "positions_lr 0.004 (unused" in capsys.readouterr().err
    first, *_, last = lines(tmp_path, "train")
    assert first["loss"] == pytest.approx(logged[0]["loss"], abs=1e-5)
    assert first["grad_norm"] != pytest.approx(logged[0]["grad_norm"], rel=1e-6)
    assert last["loss"] != pytest.approx(logged[-1]["loss"], rel=1e-6)
    loaded = {which: Run.open(whole).load(weights=which) for which in (None, "ema", "last")}
    norms = {which: run.model.norm.weight for which, run in loaded.items()}
    assert norms["ema"].equal(weights(whole, kind="average")["norm.weight"])
    assert norms["last"].equal(weights(whole)["norm.weight"])
    assert norms[None].equal(norms["ema"])
    assert not norms["ema"].equal(norms["last"])
    assert loaded["ema"].checkpoint_hash != loaded["last"].checkpoint_hash
    with pytest.raises(TrainingError, match="no EMA weights"):
        Run.open(runs[0] / "sampled").load(weights="ema")


def test_intervals_count_from_the_first_step(runs):
    """... and the last step of 12 is one more."""
    folder = runs[0] / "choices"
    written = read_metrics(folder / "metrics.jsonl")
    timed = [line["step"] for line in written if "tokens_per_second" in line]
    assert timed == [line["step"] for line in lines(folder, "samples")] == [5, 10, 12]
    assert [line["step"] for line in lines(folder, "validation")] == [4, 8, 12]


def test_average_after_each_step(runs):
    """Up to step 2 it is the weights after the step, then 0.8 of itself and 0.2 of the weights."""
    folder = runs[0] / "choices"
    for step in range(1, 5):
        after = {name: x.double() for name, x in weights(folder, step).items()}
        if step <= 2:
            mean = after
        mean = {name: 0.8 * x + 0.2 * after[name] for name, x in mean.items()}
        for name, x in weights(folder, step, "average").items():
            assert torch.allclose(x.double(), mean[name], rtol=0, atol=1e-6), (step, name)
    assert not torch.allclose(mean["norm.weight"], after["norm.weight"], rtol=0, atol=1e-5)
    run = Run(folder)
    targets = monitor_targets(run.open_data(), [24, 48, 96], 8, 4, seed=run.settings.seed)
    measured = targets.measure(run.load(weights="ema", checkpoint=4).model)
    expected = {str(length): nll for length, (nll, _) in measured.items()}
    assert lines(folder, "validation")[0]["nll"] == pytest.approx(expected, abs=1e-6)


def test_evaluation_and_generation_use_the_average_by_default(runs, tmp_path, monkeypatch, capsys):
    whole = tmp_path / "run"
    shutil.copytree(runs[0] / "choices", whole)

    def call(main, *words):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["script.py", str(whole), *words])
        main()
        return capsys.readouterr().out

    results = []
    for choice in ("ema", "null", "last"):
        words = ["lengths=[24]", "targets=8", "documents=8", "contamination.check=false"]
        call(evaluate.main, *words, f"weights={choice}", "folder=a")
        results.append((whole / "evaluation/a/results.csv").read_text())
    assert results[0] == results[1] != results[2]
    for more, used in ((), "ema"), (("--weights", "last"), "last"):
        text = call(generate.main, "--prompt", "ab", "--tokens", "9", "--jsonl", *more)
        assert f'"weights": "{used}"' in text


def test_non_finite_loss_stops_before_update(overrides, tmp_path):
    folder = tmp_path / "broken"
    wild = [*overrides, "training.lr_schedule.warmup=0", "training.checkpoint.interval=1"]
    broken = [*wild, "training.optimizer.lr=1e18", "training.grad_clip=null"]
    message = r"step 2: .* the gradient norm nan.* step 1 is saved: lower training.optimizer.lr"
    for _ in range(2):  # also when it is started again
        with pytest.raises(TrainingError, match=message):
            trained(*broken, "--run-dir", folder)
    assert read_metrics(folder / "metrics.jsonl", "train")[-1]["grad_norm"] == "nan"
    assert steps_of(folder) == [1]
    message = r"step 1 is not saved, because embed\.weight has numbers of 1e\+30"
    with pytest.raises(TrainingError, match=message):
        trained(*wild, "training.optimizer.lr=1e30", "--run-dir", tmp_path / "dead")
    assert steps_of(tmp_path / "dead") == []


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (
            ["train_length=4096", "training.tokens=40k"],
            EvaluationError,
            r"none of \d+ held-out documents.*longest usable length.*lower train_length",
        ),
        (["data.valid_fraction=0"], TrainingError, "no documents: raise data.valid_fraction"),
        (
            [
                *("train_length=2000", "training.tokens=64000", "training.batch_size=2"),
                "training.stages=[{length: 20, duration: 0.5}, {length: 2000}]",
            ],
            TrainingError,
            "training.stages go up to 2000 tokens, but the longest document",
        ),
    ],
)
def test_text_that_does_not_fit_creates_no_run(overrides, tmp_path, words, error, message):
    with pytest.raises(error, match=message):
        trained(*overrides, *words, "--run-dir", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_processes_with_different_text_create_no_run(overrides, tmp_path, monkeypatch):
    """A second process that has all values of the first one but the hashes of the text."""

    def gather(self, value):
        return [value, ("0" * 64, "1" * 64)] if isinstance(value, tuple) else [value] * 2

    monkeypatch.setattr(Parallel, "gather", gather)
    with pytest.raises(TrainingError, match="hash of the training and validation text"):
        trained(*overrides, "--run-dir", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_samples_start_with_bos_and_use_a_learned_table_to_its_end(
    overrides, tmp_path, monkeypatch
):
    """Four tokens and 21 new ones, the last of which has no position, fit into 24."""
    calls = []
    real = samples.Generation

    def generation(model, ids, tokens, *args, **more):
        calls.append((ids, tokens))
        return real(model, ids, tokens, *args, **more)

    monkeypatch.setattr(samples, "Generation", generation)
    words = ["training.tokens=576", "data.bos=true", f"data.root={tmp_path / 'prepared'}"]
    words += ["training.samples={prompts: [abc], tokens: 99}", "data.eos=true"]
    words += ["model.position.name=learned", "training.validation.multiples=[1]"]
    assert trained(*overrides, *words, "--run-dir", tmp_path / "run") == 0
    tokenizer = Run(tmp_path / "run").tokenizer
    assert calls == [([[tokenizer.bos_id, *tokenizer.encode("abc")]], 21)]
