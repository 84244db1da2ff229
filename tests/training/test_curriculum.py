"""A curriculum of lengths, end to end: boundaries of stages and epochs, interrupted and resumed."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data import DataError, open_prepared
from data.sampling.exposure import read_exposure
from errors import TrainingError
from run_directory.checkpoints import folder_of
from run_directory.exposure import exposure_of
from tests.training.test_train import here, lines, weights

# 8 + 6 + 6 steps: 96 tokens, then 144, then 96 again; the second stage turns the base, the third drops RoPE.
STAGES = [
    "training.tokens=2208",
    "training.batch_size=4",
    "training.checkpoint.keep=40",
    "training.checkpoint.interval=1",
    "training.validation.interval=null",
    "training.micro_batch_size=3",
    "training.stages=[{length: 12, duration: 8}, {length: 24, batch_size: 6, duration: 6, "
    "overrides: [model.position.theta=500]}, {length: 8, warmup: 2, "
    "overrides: ['model.position.scaling={name: drop}']}]",
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
    counted = exposure_of(whole, 20)
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


def test_mixture_with_stages_resumes_across_epochs(overrides, tmp_path, monkeypatch, capsys):
    more = tmp_path / "more"
    more.mkdir()
    for i in range(4):
        (more / f"{i}.txt").write_text(f"{i} " * 60, encoding="utf-8")
    text = f"{{share: 0.25, source: {{name: files, path: {more}}}}}"
    overrides = [
        *overrides,
        *STAGES,
        f"data.mixture=[{text}]",
        "data.max_bytes=1200",
        f"data.root={tmp_path}",
    ]
    whole = tmp_path / "whole"
    folder = tmp_path / "cut"
    assert here(monkeypatch, *overrides, "--run-dir", str(whole)) == 0
    output = capsys.readouterr().err
    logged = lines(whole)
    steps = [line for line in logged if line["kind"] == "train"]
    last = steps[-1]["passes"]
    assert [
        sum(n * size for n, size in zip(s["passes"].values(), sizes(whole), strict=True))
        for s in steps
    ] == (pytest.approx([step["tokens"] for step in steps], abs=0.01))
    (own, other) = last
    assert all(n > 1 for n in last.values()) and own != other
    assert f"epochs: {own} {last[own]:.2f}, {other} {last[other]:.2f}" in output
    # epochs end here
    edges = {k: next(s["step"] for s in steps if s["passes"][k] >= 1) for k in last}
    first, second = sorted(edges.values())
    assert first < second < 20
    shutil.copytree(whole, folder)
    for step in (second, first - 1):
        forget(folder, step)
        assert here(monkeypatch, *overrides, "--run-dir", str(folder)) == 0
        assert lines(folder) == logged
    ours = weights(folder)
    theirs = weights(whole)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    shown = exposure_of(whole, 20)
    assert shown is not None and shown.tokens == 2208
    # Other text under the same settings is no resume.
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (
        len(manifest["mixture"]) == 1
        and manifest["data_hash"] != open_prepared(manifest["data"]).train.hash
    )


def sizes(run: Path) -> list[int]:
    manifest = json.loads((run / "manifest.json").read_text())
    return [
        open_prepared(path).train.n_tokens - 1 for path in (manifest["data"], *manifest["mixture"])
    ]


def test_streaming_starts_on_first_group_and_resumes_across_groups(
    overrides, tmp_path, monkeypatch
):
    overrides = [
        *overrides,
        "training.tokens=15360",
        "data.group_bytes=4000",
        "training.batch_size=32",
    ]
    overrides += [
        "training.checkpoint.interval=1",
        "training.checkpoint.keep=40",
        "data.max_bytes=10000",
    ]
    overrides += ["training.validation.interval=null"]
    whole = tmp_path / "whole"
    folder = tmp_path / "cut"
    assert (
        here(monkeypatch, *overrides, f"data.root={tmp_path / 'a'}", "--run-dir", str(whole)) == 0
    )
    logged = lines(whole)
    assert {line["epoch"] for line in logged if line["kind"] == "train"} >= {0, 1, 2, 3}
    shutil.copytree(whole, folder)
    for step in (12, 5):
        forget(folder, step)
        assert (
            here(monkeypatch, *overrides, f"data.root={tmp_path / 'a'}", "--run-dir", str(folder))
            == 0
        )
        assert lines(folder) == logged
    states = [
        json.loads(p.read_text())["state"]
        for p in sorted((folder / "checkpoints").glob("*/state.json"))
    ]
    used = [len(state["groups"]) for state in states]
    assert used == sorted(used) and used[0] == 1 and used[-1] == 3
    manifest = json.loads((folder / "manifest.json").read_text())
    groups = json.loads(Path(manifest["groups"]).read_text())["folders"]
    assert [open_prepared(path).train.hash for path in groups] == states[-1]["groups"]
    # A group that is another now: no step is trained.
    state = max((folder / "checkpoints").glob("step-*"))
    forget(folder, 12)
    monkeypatch.setattr(
        "data.preparation.groups.TextGroups.used", lambda self, lines: ["another"] * lines
    )
    with pytest.raises(DataError, match=r"group 0 of .* has changed since this run was trained"):
        here(monkeypatch, *overrides, f"data.root={tmp_path / 'a'}", "--run-dir", str(folder))
    assert not state.exists()


def test_fork_of_streamed_run_with_other_data(overrides, tmp_path, monkeypatch):
    """The groups behind it are its parent's: what its own steps use is what is checked when it resumes."""
    overrides = [
        *overrides,
        "data.group_bytes=4000",
        "data.max_bytes=10000",
        "training.validation.interval=null",
    ]
    overrides += [f"data.root={tmp_path / 'a'}", "training.checkpoint.keep=40"]
    model = "data.tokenizer={name: sentencepiece, vocab_size: 280}"
    stem, same, fork = (tmp_path / name for name in ("stem", "same", "fork"))
    assert here(monkeypatch, *overrides, model, "--run-dir", str(stem)) == 0
    more = ["--fork", str(stem), "training.tokens=4608"]
    other = [*more, "data.group_bytes=5000"]
    assert here(monkeypatch, *other, "--run-dir", str(fork)) == 0
    state = json.loads((folder_of(fork, 24) / "state.json").read_text())["state"]
    groups = json.loads(
        Path(json.loads((fork / "manifest.json").read_text())["groups"]).read_text()
    )
    hashes = [open_prepared(path).train.hash for path in groups["folders"]]
    assert state["groups"] == hashes[: len(state["groups"])]
    monkeypatch.setattr(
        "data.preparation.groups.TextGroups.used", lambda self, lines: ["another"] * lines
    )
    forget(fork, 21)
    for folder, line in ((fork, other), (same, more)):  # its own later steps; the parent's text
        with pytest.raises(
            DataError, match=r"group 0 of .* has changed since this run was trained"
        ):
            here(monkeypatch, *line, "--run-dir", str(folder))


@pytest.mark.slow
def test_streaming_with_stages_resumes_across_boundaries(overrides, tmp_path, monkeypatch):
    stages = "training.stages=[{length: 12, duration: 0.5, batch_size: 32}, {length: 24, batch_size: 16}]"
    overrides = [
        *overrides,
        stages,
        "training.tokens=15360",
        "training.batch_size=16",
        "data.group_bytes=4000",
    ]
    overrides += [
        "training.checkpoint.interval=1",
        "training.checkpoint.keep=40",
        "data.max_bytes=10000",
    ]
    overrides += ["training.validation.interval=null", f"data.root={tmp_path / 'a'}"]
    whole = tmp_path / "whole"
    folder = tmp_path / "cut"
    assert here(monkeypatch, *overrides, "--run-dir", str(whole)) == 0
    logged = lines(whole)
    steps = [line for line in logged if line["kind"] == "train"]
    edge = next(line["step"] for line in logged if line["kind"] == "change")
    turns = [a["step"] for a, b in pairwise(steps) if a["epoch"] != b["epoch"]]  # groups end here
    assert min(turns) < edge < max(turns)
    shutil.copytree(whole, folder)
    for step in (edge + 1, min(turns)):
        forget(folder, step)
        assert here(monkeypatch, *overrides, "--run-dir", str(folder)) == 0
        assert lines(folder) == logged
