"""study.py end to end: its files, what it reuses, what it rejects."""

import importlib
import json
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import study
from errors import StudyError
from run_directory.metrics_file import read_metrics
from studies.study_options import parse_options
from studies.study_report import write_report
from studies.study_results_reader import read_study
from studies.study_results_writer import VOLATILE
from tests.files import results_of
from tests.studies.conftest import STUDY
from tests.studies.forks import call

CELLS = [f"scheme={scheme},seed={seed}" for scheme in ("rope", "learned") for seed in (0, 1)]


def lasting(record: dict) -> dict:
    """Results without what a clock or a machine decides."""
    cells = [{k: v for k, v in cell.items() if k != "timing"} for cell in record["cells"]]
    return record | {"cells": cells}


@pytest.fixture(scope="module")
def clean(write_study, tmp_path_factory) -> tuple[Path, Path]:
    """(study file, folder of the study, done once)."""
    file = write_study()
    folder = tmp_path_factory.mktemp("study") / "clean"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert call(monkeypatch, file, "--run-dir", folder, "--jobs", 2) == 0
    return file, folder


@pytest.fixture
def copied(clean, tmp_path) -> tuple[Path, Path]:
    """(study file, a copy of its folder)."""
    shutil.copytree(clean[1], tmp_path / "copy")
    return clean[0], tmp_path / "copy"


def test_a_study_trains_evaluates_and_gathers(clean):
    folder = clean[1]
    record = results_of(folder)
    assert [cell["id"] for cell in record["cells"]] == CELLS
    assert {(cell["status"], cell["error"]) for cell in record["cells"]} == {("done", None)}
    for cell in record["cells"]:
        run = folder / "runs" / cell["id"]
        losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl", "train")]
        training = cell["training"]
        assert len(losses) == training["steps"] == 6
        assert training["loss"] == losses[-1]
        assert training["flops"] == pytest.approx(training["tokens"] * training["flops_per_token"])
        stored = results_of(run / "evaluation" / "held-out")
        measured = cell["evaluations"]["held-out"]
        assert measured["cells"] == stored["cells"]
        assert not set(VOLATILE) & set(measured)
        assert measured["checkpoint_hash"] == training["checkpoint_hash"]
    # What the schemes share: the targets, although one of them ends at the trained length.
    assert len({cell["evaluations"]["held-out"]["targets_hash"] for cell in record["cells"]}) == 1
    assert str(folder) not in json.dumps([cell["evaluations"] for cell in record["cells"]])


def test_directories_that_cannot_be_created(clean, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="--run-dir="):
        parse_options("", [str(clean[0]), "--run-dir", str(tmp_path / "file" / "runs")])


def test_a_variant_adds_its_method_to_its_scheme_only(clean):
    for cell in results_of(clean[1])["cells"]:
        rows = cell["evaluations"]["held-out"]["cells"]
        nll = {(row["method"], row["length"]): row["nll"] for row in rows}
        is_rope = cell["axes"]["scheme"] == "rope"
        methods = {"trained", "truncate", "yarn"} if is_rope else {"trained", "truncate"}
        assert {method for method, _ in nll} == methods
        assert (nll["trained", 48] is not None) == is_rope
        assert nll["trained", 24] > 0


def test_cells_of_a_seed_share_data_and_order(clean):
    record = results_of(clean[1])
    orders = [cell["training"]["data_order"] for cell in record["cells"]]
    assert orders[0] == orders[2]
    assert orders[1] == orders[3]
    assert orders[0] != orders[1]
    assert read_study(record).unfair == []


def test_finished_cells_are_not_run_again(clean, monkeypatch):
    file, folder = clean
    files = [*folder.rglob("*.npz"), *folder.rglob("*.safetensors")]
    before = [path.stat().st_mtime_ns for path in files]
    text = (folder / "results.json").read_bytes()
    assert call(monkeypatch, file, "--run-dir", folder) == 0
    assert [path.stat().st_mtime_ns for path in files] == before
    assert len(files) > 8
    assert (folder / "results.json").read_bytes() == text


def test_a_damaged_checkpoint_is_refused_and_a_damaged_result_replaced(clean, copied, monkeypatch):
    file, folder = copied
    last = folder / "runs" / CELLS[1] / "checkpoints" / "step-00000006"
    weights = last / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    stored = folder / "runs" / CELLS[2] / "evaluation" / "held-out" / "results.json"
    stored.write_text(stored.read_text().replace("fixed-targets", "fixed-tragets"))
    assert call(monkeypatch, file, "--run-dir", folder) == 1
    record = results_of(folder)
    assert [cell["status"] for cell in record["cells"]] == ["done", "failed", "done", "done"]
    error = record["cells"][1]["error"]
    assert all(text in error for text in (f"{last}: model.safetensors is altered", "step 3"))
    assert lasting(record)["cells"][2] == lasting(results_of(clean[1]))["cells"][2]
    shutil.rmtree(last)
    assert call(monkeypatch, file, "--run-dir", folder) == 0
    assert lasting(results_of(folder)) == lasting(results_of(clean[1]))


SCHEMES = """    wide: [model.heads=5]
    gone: [configs/position/rpe.yaml]
    short: ["model.position={{name: learned, max_length: 9}}"]
    rope: ["""
EVALUATIONS = """evaluations:
  unknown: {{overrides: [protocol=sideways]}}
  wordy: {{overrides: [lenghts=3]}}
  elsewhere: {{overrides: [targets=8], data: ["data.source={{name: files, path: nowhere}}"]}}
  illegal: {{overrides: [targets=8, "methods={{other: [model.position.name=alibi]}}"]}}"""
KNOWN = """  known:
    overrides: ["lengths=[48]", targets=8, least_documents=20]
    data: ["data.source={{name: files, path: {corpus}}}"]
report:"""


@pytest.mark.parametrize(
    ("replaced", "by", "phrases"),
    [
        (
            "    rope: [",
            SCHEMES,
            ["6 of 10 cells", "seed=0: model: dim 24", "rpe.yaml", "the scheme has 9"],
        ),
        (
            "evaluations:",
            EVALUATIONS,
            ["4 of 4", "sideways", "mean lengths", "nowhere", "'other'"],
        ),
        ("primary: held-out", "primary: held-out, lengths: [48, 96]", ["does not measure 96"]),
        ("targets=8", "targets=25", ["targets=25 is more than the length 24"]),
        (
            "[24,48]",
            "[24,4096]",
            ["4 cells such as scheme=rope,seed=0: evaluations.held-out: length 4096"],
        ),
        ("report:", KNOWN, ["4 cells such as scheme=rope,seed=0: evaluations.known:"]),
    ],
)
def test_invalid_cells_are_reported_before_training(
    write_study, monkeypatch, tmp_path, replaced, by, phrases
):
    file = write_study(STUDY.replace(replaced, by, 1))
    with pytest.raises(StudyError) as caught:
        call(monkeypatch, file, "--run-dir", tmp_path / "other")
    for phrase in phrases:
        assert phrase in str(caught.value)
    assert not (tmp_path / "other" / "runs").exists()


def test_a_run_with_other_settings_is_not_touched(clean, write_study, monkeypatch):
    other = write_study(STUDY.replace("[{base}]", "[{base}, train_length=16]"))
    with pytest.raises(StudyError, match="4 of 4 cells") as caught:
        call(monkeypatch, other, "--run-dir", clean[1])
    lines = str(caught.value).splitlines()  # equal errors of cells are one
    assert len(lines) == 2 and "4 cells such as" in lines[1]
    assert "other settings (train_length" in lines[1]


def test_dry_run_starts_nothing(clean, monkeypatch, capsys, tmp_path):
    file, folder = clean
    assert call(monkeypatch, file, "--run-dir", folder, "--dry-run") == 0
    assert "everything is done" in capsys.readouterr().out
    assert call(monkeypatch, file, "--run-dir", folder, "--list") == 0
    assert capsys.readouterr().out == ""
    assert call(monkeypatch, file, "--run-dir", tmp_path / "new", "--dry-run") == 0
    output = capsys.readouterr().out
    assert "4 of 4 cells left\n" in output
    only = ["--dry-run", "--only", "*scheme=learned*"]
    assert call(monkeypatch, file, "--run-dir", tmp_path / "new", *only) == 0
    output = capsys.readouterr().out
    assert "2 of 2 cells left\n" in output
    assert "scheme=rope" not in output
    assert not (tmp_path / "new").exists()


def test_the_time_left_is_printed_before_the_first_cell(copied, monkeypatch, capsys):
    file, folder = copied
    shutil.rmtree(folder / "runs" / "scheme=learned,seed=1" / "evaluation")
    only = ["--only", "*seed=1"]
    assert call(monkeypatch, file, "--run-dir", folder, *only, "--dry-run") == 0
    left = capsys.readouterr().out.splitlines()[-1]
    assert left.startswith("1 of 2 cells left: about ")
    assert call(monkeypatch, file, "--run-dir", folder, *only) == 0
    assert "1 of 2 cells left: about " in capsys.readouterr().err.partition(": done in")[0]


def test_a_failed_evaluation_does_not_affect_others(copied, write_study, monkeypatch):
    folder = copied[1]
    tight = """  tight:
    overrides: ["lengths=[24]", targets=8, memory=0.000001]
    skip: [{{scheme: learned}}]
report:"""
    file = write_study(STUDY.replace("report:", tight))
    assert call(monkeypatch, file, "--run-dir", folder, "--only", "*seed=0") == 1
    cells = results_of(folder)["cells"]
    assert [cells[0]["status"], cells[2]["status"]] == ["failed", "done"]
    assert cells[0]["error"].startswith("tight: length 24 needs about")
    assert set(cells[0]["evaluations"]) == {"held-out"}


def test_the_report_needs_only_the_stored_results(clean, figures, monkeypatch, tmp_path, capsys):
    file, folder = clean
    shutil.copy(folder / "results.json", tmp_path)
    assert call(monkeypatch, "--report", "--run-dir", tmp_path, report=write_report) == 0
    assert f"report: {tmp_path / 'report.html'}" in capsys.readouterr().out
    assert "rope + yarn" in (tmp_path / "report.md").read_text(encoding="utf-8")
    words = ["report.baseline=learned", "--report", "--run-dir", tmp_path]
    assert call(monkeypatch, file, *words) == 0
    reported = json.loads((tmp_path / "report.html").read_text("utf-8"))
    assert reported["study"]["report"]["baseline"] == "learned"
    for words in (["--report", "--run-dir", tmp_path / "nowhere"], []):
        with pytest.raises(StudyError):
            call(monkeypatch, *words)


def test_the_listed_commands_finish_the_study(copied, clean, monkeypatch, capsys):
    file, folder = copied
    words = [file, "--run-dir", folder, "--list"]
    shutil.rmtree(folder / "runs" / CELLS[1] / "evaluation")
    shutil.rmtree(folder / "runs" / CELLS[2])
    assert call(monkeypatch, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["train.py", "evaluate.py", "evaluate.py"]
    for line in lines:
        _, script, *arguments = shlex.split(line)
        assert importlib.import_module(script.removesuffix(".py")).main(arguments) == 0
    capsys.readouterr()
    assert call(monkeypatch, *words) == 0
    assert capsys.readouterr().out == ""
    assert call(monkeypatch, file, "--run-dir", folder) == 0
    assert lasting(results_of(folder)) == lasting(results_of(clean[1]))


@pytest.mark.parametrize("lists", [True, False])
def test_only_listed_commands_go_to_standard_output(lists, capsys):
    """A shell reads them; the table of a text that is prepared for them goes elsewhere."""
    console = study.study_call(SimpleNamespace(list=lists, jobs=1)).console
    console.table("prepared", ["documents"], [["3"]])
    assert ("prepared" in capsys.readouterr().out) == (not lists)


class FakeExecutor:
    """submitit.AutoExecutor, whose jobs run at once."""

    def __init__(self, folder: Path, cluster: str):
        self.parameters = {"cluster": cluster}

    def update_parameters(self, **parameters: int) -> None:
        self.parameters |= parameters

    def map_array(self, work, *arguments) -> list[SimpleNamespace]:
        assert self.parameters == {"cluster": "slurm", "slurm_array_parallelism": 2}
        [work(*each) for each in zip(*arguments, strict=True)]
        return [SimpleNamespace(job_id=f"7_{n}") for n, _ in enumerate(arguments[0])]


def test_jobs_of_a_scheduler_finish_the_study(copied, clean, monkeypatch, capsys):
    file, folder = copied
    words = [file, "--run-dir", folder, "--jobs", 2, "--launcher", "slurm"]
    for cell in CELLS[:2]:
        shutil.rmtree(folder / "runs" / cell / "evaluation")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(StudyError, match=r"\[slurm\]"):
        call(monkeypatch, *words)
    fake = SimpleNamespace(AutoExecutor=FakeExecutor)
    monkeypatch.setitem(sys.modules, "submitit", fake)
    assert call(monkeypatch, *words) == 0
    assert "2 jobs submitted: 7_0, 7_1" in capsys.readouterr().out
    assert call(monkeypatch, file, "--run-dir", folder, "--list") == 0
    assert capsys.readouterr().out == ""
    assert call(monkeypatch, file, "--run-dir", folder) == 0
    assert lasting(results_of(folder)) == lasting(results_of(clean[1]))


@pytest.mark.parametrize("changed", ["targets=7", "seed=1"])
def test_an_evaluation_with_another_setting_is_left(
    copied, write_study, monkeypatch, capsys, changed
):
    file = write_study(STUDY.replace("targets=8", f"targets=8, {changed}"))
    assert call(monkeypatch, file, "--run-dir", copied[1], "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["evaluate.py"] * 4


def test_a_study_whose_text_is_gone_is_reported_from_its_results(
    copied, write_study, monkeypatch, capsys
):
    folder = copied[1]
    file = write_study(STUDY.replace("[{base}]", "[{base}, data.source.path=nowhere]"))
    assert call(monkeypatch, file, "--run-dir", folder, "--report") == 0
    assert "nowhere" in capsys.readouterr().err
    assert json.loads((folder / "report.html").read_text("utf-8")) == results_of(folder)


def test_an_evaluation_of_another_checkpoint_is_left(copied, monkeypatch, capsys):
    file, folder = copied
    stored = folder / "runs" / CELLS[0] / "evaluation" / "held-out" / "results.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"checkpoint_hash": "0"}))
    assert call(monkeypatch, file, "--run-dir", folder, "--list") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[1] == "evaluate.py"
