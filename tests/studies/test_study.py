"""study.py end to end: its files, what it reuses, what it rejects."""

import json
import shutil
from pathlib import Path

import pytest

from errors import StudyError
from studies.report.report import write_report
from studies.running.cell_record import VOLATILE
from tests.studies.conftest import ROOT, STUDY
from tests.studies.forks import call
from training.logging.metrics_file import read_metrics

CELLS = [f"scheme={scheme},seed={seed}" for scheme in ("rope", "learned") for seed in (0, 1)]


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def lasting(found: dict) -> dict:
    """Results without what a clock or a machine decides."""
    return found | {
        "cells": [{k: v for k, v in cell.items() if k != "timing"} for cell in found["cells"]]
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture
def clean(home, write_study, monkeypatch) -> tuple[Path, Path]:
    """(study file, folder of the study, done once)."""
    file = write_study()
    folder = home / "clean"
    if not folder.exists():
        assert call(monkeypatch, file, "--run-dir", folder, "--jobs", 2) == 0
    return file, folder


def test_a_study_trains_evaluates_and_gathers(clean):
    _, folder = clean
    found = results(folder)
    assert [cell["id"] for cell in found["cells"]] == CELLS
    assert all(cell["status"] == "done" and cell["error"] is None for cell in found["cells"])
    for cell in found["cells"]:
        run = folder / "runs" / cell["id"]
        losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl", "train")]
        training = cell["training"]
        timing = cell["timing"]
        assert len(losses) == training["steps"] == 6 and training["loss"] == losses[-1]
        assert training["tokens"] == 6 * 8 * 24 == training["steps"] * training["batch_size"] * 24
        assert (
            training["run"] == f"runs/{cell['id']}" and training["position"]["name"] in cell["id"]
        )
        assert training["flops"] == pytest.approx(training["tokens"] * training["flops_per_token"])
        assert (
            timing["tokens_per_second"] > 0
            and timing["peak_memory_bytes"] > 1e6
            and timing["machine"]
        )
        own = json.loads(
            (run / "evaluation" / "held-out" / "results.json").read_text(encoding="utf-8")
        )
        measured = cell["evaluations"]["held-out"]
        assert measured["cells"] == own["cells"] and not set(VOLATILE) & set(measured)
        assert measured["checkpoint_hash"] == training["checkpoint_hash"]
    # What the schemes share: the targets, although one of them ends at the trained length.
    assert len({cell["evaluations"]["held-out"]["targets_hash"] for cell in found["cells"]}) == 1
    assert str(folder) not in json.dumps([cell["evaluations"] for cell in found["cells"]])


def test_a_variant_adds_its_method_to_its_scheme_only(clean):
    for cell in results(clean[1])["cells"]:
        table = {
            (row["method"], row["length"]): row for row in cell["evaluations"]["held-out"]["cells"]
        }
        if cell["axes"]["scheme"] == "rope":
            assert {method for method, _ in table} == {"trained", "truncate", "yarn"}
            assert all(row["nll"] > 0 for row in table.values())
        else:
            assert {method for method, _ in table} == {"trained", "truncate"}
            beyond = table["trained", 48]
            assert beyond["nll"] is None and "positions end after 24" in beyond["failure"]
            assert table["trained", 24]["nll"] > 0


def test_cells_of_a_seed_share_data_and_order(clean):
    found = results(clean[1])
    orders = {cell["id"]: cell["training"]["data_order"] for cell in found["cells"]}
    assert orders[CELLS[0]] == orders[CELLS[2]] and orders[CELLS[1]] == orders[CELLS[3]]
    assert orders[CELLS[0]] != orders[CELLS[1]]
    groups = found["checks"]["data_order"]
    assert [(g["seed"], g["cells"], g["agree"]) for g in groups] == [(0, 2, True), (1, 2, True)]
    assert found["checks"]["equal_tokens"] is True


def test_finished_cells_are_not_run_again(clean, monkeypatch, capsys):
    file, folder = clean
    kinds = (".npz", ".safetensors")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix in kinds}
    logs = {path: path.read_bytes() for path in folder.glob("logs/*/*.log")}
    text = (folder / "results.json").read_bytes()
    assert call(monkeypatch, file, "--run-dir", folder) == 0
    assert {path: path.read_bytes() for path in folder.glob("logs/*/*.log")} == logs and len(
        logs
    ) == 8
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (folder / "results.json").read_bytes() == text
    assert "4 done" in capsys.readouterr().err


def test_an_existing_run_is_reused(clean, monkeypatch, tmp_path):
    file, folder = clean
    other = tmp_path / "other"
    shutil.copytree(folder / "runs" / CELLS[0], other / "runs" / CELLS[0])
    assert (
        call(monkeypatch, file, "--run-dir", other, "--only", "scheme=rope*", "--no-training") == 0
    )
    found = {cell["id"]: cell for cell in results(other)["cells"]}
    assert not (other / "logs" / CELLS[0] / "training.log").exists()
    assert [cell["status"] for cell in found.values()] == ["done", "pending", "pending", "pending"]
    assert lasting(results(folder))["cells"][0] == lasting(results(other))["cells"][0]


def test_a_damaged_checkpoint_or_result_is_replaced(clean, monkeypatch, tmp_path):
    file, folder = clean
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    stored = next((other / "runs" / CELLS[1] / "checkpoints").glob("step-*/model.safetensors"))
    stored.write_bytes(stored.read_bytes()[:-1] + b"\0")
    touched = other / "runs" / CELLS[2] / "evaluation" / "held-out" / "results.json"
    touched.write_text(
        touched.read_text(encoding="utf-8").replace("fixed-targets", "fixed-tragets"), "utf-8"
    )
    # No checkpoint is left that could be resumed: train.py refuses, and the other cells go on.
    assert call(monkeypatch, file, "--run-dir", other) == 1
    found = {cell["id"]: cell for cell in results(other)["cells"]}
    assert (
        found[CELLS[1]]["status"] == "failed"
        and "no good checkpoint is left" in found[CELLS[1]]["error"]
    )
    assert "logs/scheme=rope,seed=1/training.log" in found[CELLS[1]]["error"]
    assert lasting(results(other))["cells"][2] == lasting(results(folder))["cells"][2]
    assert found[CELLS[0]]["status"] == found[CELLS[3]]["status"] == "done"
    shutil.rmtree(other / "runs" / CELLS[1])
    assert call(monkeypatch, file, "--run-dir", other) == 0
    assert lasting(results(other)) == lasting(results(folder))


def test_a_cell_of_an_array_is_gathered_by_the_next_call(clean, monkeypatch, tmp_path, capsys):
    file, folder = clean
    other = tmp_path / "other"
    assert call(monkeypatch, file, "--run-dir", other, "--cell", 2) == 0
    assert (
        not (other / "results.json").exists() and (other / "cells" / f"{CELLS[2]}.json").is_file()
    )
    with pytest.raises(StudyError, match="the cells are 0 to 3"):
        call(monkeypatch, file, "--run-dir", other, "--cell", 4)
    assert call(monkeypatch, file, "--run-dir", other, "--no-training") == 0
    assert lasting(results(other))["cells"][2] == lasting(results(folder))["cells"][2]


def test_all_invalid_cells_are_reported_before_training(write_study, monkeypatch, tmp_path):
    text = STUDY.replace(
        "    rope: [",
        """    wide: [model.heads=5]
    gone: [configs/position/rpe.yaml]
    short: ["model.position={{name: learned, max_length: 9}}"]
    rope: [""",
    ).replace(
        "evaluations:",
        """evaluations:
  unknown: {{overrides: [protocol=sideways]}}
  wordy: {{overrides: [lenghts=3]}}
  elsewhere: {{overrides: [targets=8], data: ["data.source={{name: files, path: nowhere}}"]}}
  illegal: {{overrides: [targets=8, "methods={{other: [model.position.name=alibi]}}"]}}
  wide-apart: {{overrides: [targets=64]}}""",
    )
    file = write_study(text)
    folder = tmp_path / "other"
    with pytest.raises(StudyError) as caught:
        call(monkeypatch, file, "--run-dir", folder)
    message = str(caught.value)
    for phrase in (
        "10 of 10 cells cannot run",
        "scheme=wide,seed=0; scheme=wide,seed=1: model: dim 24",
        "rpe.yaml: no such file",
        "longer than the 9 positions",
        "protocol=sideways is unknown",
        "did you mean lengths",
        "nowhere",
        "targets=64 exceeds train_length=24",
        "method 'other'",
    ):
        assert phrase in message, phrase
    assert not folder.exists()
    file = write_study(STUDY.replace("primary: held-out", "primary: held-out, lengths: [48, 96]"))
    with pytest.raises(StudyError, match=r"report\.lengths: 96 not among .*held-out: 24, 48"):
        call(monkeypatch, file, "--run-dir", folder)
    assert not folder.exists()
    # Errors that need the text come next, again for all cells and before any training.
    far = """  far: {{overrides: ["lengths=[8192]", targets=8]}}\nreport:"""
    file = write_study(STUDY.replace("[24,48]", "[24,4096]").replace("report:", far))
    with pytest.raises(
        StudyError, match=r"(?s)every cell: evaluations.held-out: length 4096.*longest usable"
    ):
        call(monkeypatch, file, "--run-dir", folder)
    with pytest.raises(StudyError, match=r"every cell: evaluations\.far: length 8192"):
        call(monkeypatch, file, "--run-dir", folder)
    with pytest.raises(StudyError, match=r"every cell: evaluations\.far: length 8192"):
        call(monkeypatch, file, "--run-dir", folder, "--dry-run")
    assert not (folder / "runs").exists()


def test_a_run_with_other_settings_is_not_touched(clean, write_study, monkeypatch):
    other = write_study(STUDY.replace("[{base}]", "[{base}, train_length=16]"))
    with pytest.raises(StudyError, match=r"(?s)4 of 4 cells.*other settings \(train_length"):
        call(monkeypatch, other, "--run-dir", clean[1])


def test_dry_run_starts_nothing(clean, monkeypatch, capsys, tmp_path):
    file, folder = clean
    assert call(monkeypatch, file, "--run-dir", folder, "--dry-run") == 0
    output = capsys.readouterr().out
    assert output.count(" done") >= 4 and "everything is done" in output
    assert call(monkeypatch, file, "--run-dir", tmp_path / "new", "--dry-run") == 0
    output = capsys.readouterr().out
    assert (
        "4 of 4 cells left" in output and "left: training, held-out" in output and "1,152" in output
    )
    assert not (tmp_path / "new").exists()


def test_help_documents_the_file_format(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, "--help")
    output = capsys.readouterr().out
    assert end.value.code == 0
    for phrase in (
        "grid:",
        "variants:",
        "skip:",
        "evaluations",
        "report.tolerance",
        "--slurm",
        "--jobs",
    ):
        assert phrase in output, phrase
    with pytest.raises(StudyError, match="no study file"):
        call(monkeypatch)
    assert (ROOT / "configs" / "studies" / "quick.yaml").is_file()


def test_a_failed_evaluation_does_not_affect_others(clean, write_study, monkeypatch, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(clean[1], folder)
    tight = """  tight:
    overrides: ["lengths=[24]", targets=8, memory=0.000001]
    skip: [{{scheme: learned}}]
report:"""
    file = write_study(STUDY.replace("report:", tight))
    assert call(monkeypatch, file, "--run-dir", folder, "--only", "*seed=0") == 1
    found = results(folder)["cells"]
    assert found[0]["status"] == "failed" and found[0]["error"].startswith(
        "tight: length 24 needs about"
    )
    assert "logs/scheme=rope,seed=0/tight.log" in found[0]["error"]
    assert set(found[0]["evaluations"]) == {"held-out"} and found[2]["status"] == "done"


def test_evaluation_on_training_text_is_rejected_before_training(
    write_study, monkeypatch, tmp_path
):
    known = """  known:
    overrides: ["lengths=[48]", targets=8, least_documents=20]
    data: ["data.source={{name: files, path: {corpus}}}"]
report:"""
    file = write_study(STUDY.replace("report:", known))
    with pytest.raises(StudyError, match=r"every cell: evaluations\.known: .*training text"):
        call(monkeypatch, file, "--run-dir", tmp_path / "other")
    assert not (tmp_path / "other" / "runs").exists()


def test_the_report_needs_only_the_stored_results(
    clean, blank_figures, monkeypatch, tmp_path, capsys
):
    file, folder = clean
    at_the_end = json.loads((folder / "report.html").read_text(encoding="utf-8"))
    assert at_the_end == results(folder) and at_the_end["study"]["report"]["baseline"] == "rope"
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "results.json", alone)
    assert call(monkeypatch, "--report", "--run-dir", alone, report=write_report) == 0
    assert capsys.readouterr().out.strip() == f"report: {alone / 'report.html'}"
    assert "rope + yarn" in (alone / "report.md").read_text(encoding="utf-8")
    assert call(monkeypatch, file, "report.baseline=learned", "--report", "--run-dir", alone) == 0
    assert (
        json.loads((alone / "report.html").read_text("utf-8"))["study"]["report"]["baseline"]
        == "learned"
    )
    with pytest.raises(StudyError, match=r"results\.json does not exist"):
        call(monkeypatch, "--report", "--run-dir", tmp_path / "nowhere")
