"""A curriculum of lengths, end to end: boundaries of stages and epochs, interrupted and resumed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data import open_prepared
from data.sampling.exposure import read_exposure
from errors import TrainingError
from run_directory.exposure import exposure_of
from run_directory.run import Run
from tests.training.test_train import here, lines, weights

# 8 + 6 + 6 steps: 96 tokens, then 144, then 96 again; the second stage turns the base, the third
# drops RoPE.
STAGES = [
    "training.tokens=2208",
    "training.batch_size=4",
    "training.checkpoint.keep=40",
    "training.checkpoint.interval=1",
    "training.validation.interval=null",
    "training.micro_batch_size=3",
    "training.stages=[{length: 12, duration: 8}, {length: 24, batch_size: 6, duration: 6, "
    "overrides: [model.position.theta=500]}, {length: 8, warmup: 2, overrides: "
    "['model.position.scaling={name: drop}']}]",
]


def forget(folder: Path, step: int) -> None:
    """Cut a run down to its first `step` steps."""
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)


def test_resume_is_bit_exact_across_stage_boundaries(overrides, tmp_path, monkeypatch, capsys):
    overrides = [*overrides, *STAGES]
    whole = tmp_path / "whole"
    assert here(monkeypatch, *overrides, "--run-dir", str(whole)) == 0
    output = capsys.readouterr().err
    assert "training 20 steps of 8 × 12, then 6 × 24, then 12 × 8 tokens: 0.00M tokens" in output
    assert output.count("after step 8 windows of 24 tokens, 6 a step; positions change: ") == 2
    logged = lines(whole)
    steps = [line for line in logged if line["kind"] == "train"]
    assert [line["targets"] for line in steps] == [96] * 8 + [144] * 6 + [96] * 6
    assert [line["tokens"] for line in steps] == np.cumsum([96] * 8 + [144] * 6 + [96] * 6).tolist()
    assert [(x["step"], x["length"], x["batch_size"]) for x in logged if x["kind"] == "change"] == [
        (8, 24, 6),
        (14, 8, 12),
    ]
    # One schedule over all steps, but for the two in which it rises again.
    rates = [line["lr"] for line in steps]
    assert rates[14] == pytest.approx((rates[13] + rates[15]) / 4, rel=0.02)
    assert sorted(rates[:14], reverse=True) == rates[:14] and rates[13] > rates[15] > rates[19]
    exposure = read_exposure(whole)
    counted = exposure_of(Run(whole), 20)
    assert exposure is not None and counted is not None
    assert exposure.positions.tolist() == [8 * 8 + 6 * 6 + 6 * 12] * 8 + [100] * 4 + [36] * 12
    assert exposure.tokens == counted.tokens == 2208
    for step in (11, 14):  # in a stage and then before an edge, at an edge
        folder = tmp_path / f"cut-{step}"
        shutil.copytree(whole, folder)
        for again in (step, 13) if step == 11 else (step,):
            forget(folder, again)
            assert here(monkeypatch, *overrides, "--run-dir", str(folder)) == 0
            assert lines(folder) == logged
            ours = weights(folder)
            theirs = weights(whole)
            assert all(ours[name].equal(theirs[name]) for name in theirs)
    manifest = json.loads((whole / "manifest.json").read_text())
    assert [entry["after_step"] for entry in manifest["changes"]] == [8, 14]
    assert open_prepared(manifest["data"]).train.hash == manifest["data_hash"]


def test_stages_longer_than_every_document_are_rejected(overrides, tmp_path, monkeypatch):
    folder = tmp_path / "never"
    long = [*overrides, "train_length=2000", "training.tokens=64000", "training.batch_size=2"]
    stages = "training.stages=[{length: 20, duration: 0.5}, {length: 2000}]"
    with pytest.raises(
        TrainingError, match=r"training.stages go up to 2000 tokens, and the longest document"
    ):
        here(monkeypatch, *long, stages, "--run-dir", str(folder))
    assert not folder.exists()


def sizes(run: Path) -> list[int]:
    manifest = json.loads((run / "manifest.json").read_text())
    return [
        open_prepared(path).train.n_tokens - 1 for path in (manifest["data"], *manifest["mixture"])
    ]
