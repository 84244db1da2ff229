"""Runs with Muon, learning rates per role, z-loss and EMA: exact resume, and settings take
effect."""

import shutil
import sys

import pytest
from safetensors.torch import load_file

import evaluate
import generate
from run_directory.metrics_file import read_metrics
from run_directory.run import Run
from tests.training.test_train import here, lines, weights

SETTINGS = [
    "training.optimizer={name: muon, adamw: {lr: 1e-3, groups: {embeddings: {lr: 4e-3}}}}",
    "training.z_loss=0.1",
    "training.ema={decay: 0.8, start: 2}",
    "training.checkpoint.keep=9",
]


def last(folder, name):
    return load_file(max((folder / "checkpoints").glob("step-*")) / name)


def test_muon_with_z_loss_and_ema(overrides, tmp_path, monkeypatch, capsys):
    overrides = [*overrides, *SETTINGS]
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    assert here(monkeypatch, *overrides, "--run-dir", str(whole)) == 0
    output = capsys.readouterr().err
    assert "adamw_lr 0.001: for 8,4" in output and "parameters: head, vectors" in output
    logged = lines(whole)
    rates = [line for line in logged if line["kind"] == "train"]
    assert all(line["lr"] == pytest.approx(2 * line["adamw_lr"]) for line in rates)
    assert all(line["embeddings_lr"] == pytest.approx(4 * line["adamw_lr"]) for line in rates)

    shutil.copytree(whole, cut)
    for folder in (cut / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 6:
            shutil.rmtree(folder)
    assert here(monkeypatch, *overrides, "--run-dir", str(cut)) == 0
    assert lines(cut) == logged
    for name in ("model.safetensors", "average.safetensors", "optimizer.safetensors"):
        ours = last(cut, name)
        theirs = last(whole, name)
        assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in theirs)

    # The loss is logged without the penalty: at the first step that is the whole difference.
    plain = tmp_path / "plain"
    assert (
        here(
            monkeypatch,
            *[word for word in overrides if "z_loss" not in word],
            "--run-dir",
            str(plain),
        )
        == 0
    )
    first = read_metrics(plain / "metrics.jsonl", "train")
    # With a coefficient of 1e-3, losses differ by less than float32 can tell on every machine.
    assert first[0]["loss"] == pytest.approx(rates[0]["loss"], abs=1e-5)
    assert first[0]["grad_norm"] != pytest.approx(rates[0]["grad_norm"], rel=1e-6)
    assert first[-1]["loss"] != pytest.approx(rates[-1]["loss"], rel=1e-6)

    mean = last(whole, "average.safetensors")
    model = weights(whole)
    usual = Run.open(whole).load()
    latest = Run.open(whole).load(weights="last")
    assert usual.weights == "ema" and usual.model.norm.weight.equal(mean["norm.weight"])
    assert latest.model.norm.weight.equal(model["norm.weight"]) and not mean["norm.weight"].equal(
        model["norm.weight"]
    )
    assert "exponential mean" in usual.changed and latest.changed == ""
    assert (
        usual.checkpoint_hash
        == Run.open(whole).load(weights="ema").checkpoint_hash
        != latest.checkpoint_hash
    )

    # Validation measured what evaluation will: the mean.
    small = [str(whole), "lengths=[24]", "targets=8", "documents=8", "contamination.check=false"]
    found = {}
    for choice in ("ema", "last", "null"):
        monkeypatch.setattr(
            sys, "argv", ["evaluate.py", *small, f"weights={choice}", f"folder=by-{choice}"]
        )
        assert evaluate.main() == 0
        found[choice] = (whole / "evaluation" / f"by-{choice}" / "results.csv").read_text()
    assert found["ema"] == found["null"] != found["last"]
    texts = []
    for more in ([], ["--weights", "last"], ["--weights", "ema"]):
        asked = [
            "generate.py",
            str(whole),
            "--prompt",
            "ab",
            "--greedy",
            "--tokens",
            "9",
            "--jsonl",
            *more,
        ]
        monkeypatch.setattr(sys, "argv", asked)
        capsys.readouterr()
        generate.main()
        texts.append(capsys.readouterr().out)
    assert (
        texts[0] == texts[2] and '"weights": "last"' in texts[1] and '"weights": "ema"' in texts[0]
    )
