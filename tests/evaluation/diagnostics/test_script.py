"""evaluate.py with protocol=attention and protocol=generation on a run directory, end to end."""

import json
import math

import numpy as np
import pytest
import torch

from errors import EvaluationError
from evaluation.diagnostics.diagnostic_settings import GenerationDiagnosticSettings
from evaluation.diagnostics.generation import GenerationSession
from evaluation.reports import diagnostic_report, evaluation_report
from evaluation.scoring.methods import Method
from model import TokenPositions
from run_directory.console import Console
from tests.evaluation.conftest import MemoryModel
from tests.evaluation.test_evaluate_script import call, make_run, root  # noqa: F401


def touch(figure, folder, name):
    """Name a figure's file without rendering it."""
    (folder / f"{name}.svg").touch()
    (folder / f"{name}.png").touch()
    return folder / f"{name}.png"


def read(folder):
    return json.loads((folder / "results.json").read_text())


def test_attention_diagnostics_end_to_end(root, monkeypatch, capsys):  # noqa: F811
    overrides = ["protocol=attention", "lengths=[24,48,96]", "targets=8", "spans_per_document=2"]
    overrides += ["device=cpu", "windows=9", "methods=[trained,truncate,yarn]", "folder=a"]
    monkeypatch.setattr(evaluation_report, "save", touch)
    assert call(monkeypatch, root / "run", *overrides) == 0
    out = capsys.readouterr().out
    assert "\nFrom 24 to 96 tokens: as trained entropy" in out and "rotary pairs never" not in out
    folder = root / "run" / "evaluation" / "a"
    by_method = {"attention_by_length", "mass_by_distance"}
    figures = {"attention_by_method", "rotary_pairs", *(f"{name}-yarn" for name in by_method)}
    assert {path.stem for path in folder.glob("*.png")} == by_method | figures
    report = read(folder)
    assert report["kind"] == "attention" and report["windows"] == 9
    assert report["lengths"] == [24, 48, 96] and list(report["methods"]) == ["trained", "yarn"]
    assert report["mismatch"] < 1e-5
    keys = ("method", "length", "layer", "head", "measure")
    cells = {tuple(cell[key] for key in keys): cell for cell in report["cells"]}
    value = {where: cell["value"] for where, cell in cells.items()}
    assert len(cells) == len(report["cells"])
    heads = [value["trained", 48, 1, head, "entropy"] for head in range(6)]
    assert value["trained", 48, 1, None, "entropy"] == pytest.approx(np.mean(heads), rel=1e-4)
    whole = cells["trained", 96, None, None, "entropy"]
    assert whole["low"] < whole["value"] < whole["high"] < math.log(96)
    assert value["trained", 24, None, None, "mass_beyond"] == 0
    assert value["yarn", 96, 0, 0, "mass_beyond"] > 0
    # A method that does nothing at this length is the trained model.
    assert value["trained", 24, 0, 3, "entropy"] == value["yarn", 24, 0, 3, "entropy"]
    spread = next(row for row in report["by_distance"] if row["length"] == 96)
    assert spread["edges"] == [0, 1, 2, 4, 8, 16, 24, 32, 64, 96]
    assert sum(spread["mass"]) == pytest.approx(1, abs=1e-4) == sum(spread["uniform"])
    rotary = [row for row in report["pairs"] if (row["method"], row["length"]) == ("yarn", 96)]
    assert len(rotary) == 2
    monkeypatch.setattr(diagnostic_report, "attention_figures", lambda results: {})
    call(monkeypatch, root / "run", folder / "settings.yaml")
    assert read(folder)["cells"] == report["cells"]


def test_models_without_attention_or_positions(root, monkeypatch, capsys):  # noqa: F811
    # figures take time
    monkeypatch.setattr(diagnostic_report, "attention_figures", lambda results: {})
    overrides = ["protocol=attention", "targets=8", "spans_per_document=1", "windows=2"]
    assert call(monkeypatch, root / "learned", *overrides, "lengths=[24,48]", "folder=a") == 0
    assert "trained at 48: its positions end after 24 tokens" in capsys.readouterr().out
    report = read(root / "learned" / "evaluation" / "a")
    assert [row["length"] for row in report["absent"]] == [48]
    assert call(monkeypatch, root / "pattern", *overrides, "lengths=[24,48]", "folder=a") == 0
    assert read(root / "pattern" / "evaluation" / "a")["layer_kinds"] == ["a", "b"]
    make_run(root, "linear", "model.mixer.name=linear")
    with pytest.raises(EvaluationError, match=r"mixer\.name=linear"):
        call(monkeypatch, root / "linear", *overrides, "lengths=[24]")
    with pytest.raises(EvaluationError, match="longest usable length"):
        call(monkeypatch, root / "run", *overrides, "lengths=[4096]")
    with pytest.raises(EvaluationError, match="targets=32"):
        call(monkeypatch, root / "run", "protocol=attention", "lengths=[24]", "targets=32")


def test_generation_diagnostics_end_to_end(root, monkeypatch, capsys):  # noqa: F811
    overrides = ["protocol=generation", "prompts=8", "length=72", "device=cpu", "folder=g"]
    monkeypatch.setattr(evaluation_report, "save", touch)
    assert call(monkeypatch, root / "run", *overrides, "methods=[trained,yarn]") == 0
    out, _ = capsys.readouterr()
    assert "\n4-grams repeated up to 72 tokens: as trained, greedy" in out
    folder = root / "run" / "evaluation" / "g"
    assert {path.stem for path in folder.glob("*.png")} == {"generation", "generation-yarn"}
    report = read(folder)
    assert report["edges"] == [12, 24, 36, 48, 60, 72] and report["prompts"] == 8
    assert {c["source"] for c in report["cells"]} == {"greedy", "temperature 1", "real text"}
    assert len(report["samples"]) == 6
    cells = [c for c in report["cells"] if c["measure"] == "nll" and c["source"] == "real text"]
    assert len(cells) == 10
    assert all(c["low"] < c["value"] < c["high"] and c["rows"] == 8 for c in cells)
    assert call(monkeypatch, root / "learned", *overrides) == 0
    assert "positions end after 24 tokens" in capsys.readouterr().out
    report = read(root / "learned" / "evaluation" / "g")
    assert {(c["start"], c["stop"]) for c in report["cells"]} == {(12, 24)}
    with pytest.raises(EvaluationError, match="less than a bucket"):
        call(monkeypatch, root / "run", "protocol=generation", "length=20")
    with pytest.raises(EvaluationError, match="no room for 12 new tokens after a prompt of 30"):
        call(monkeypatch, root / "learned", "protocol=generation", "prompt=30", "length=72")


@pytest.mark.parametrize(
    "overrides", [["protocol=attention", "targets=8"], ["protocol=generation", "prompts=4"]]
)
def test_dry_run_measures_nothing(root, monkeypatch, capsys, overrides):  # noqa: F811
    name = f"dry-{overrides[0].partition('=')[2]}"
    make_run(root, name, "model.position={name: rope}", "seed=3")
    length = "lengths=[24,48]" if "protocol=attention" in overrides else "length=48"
    assert call(monkeypatch, root / name, *overrides, length, "device=cpu", "--dry-run") == 0
    out, err = capsys.readouterr()
    assert not (root / name / "evaluation").exists() and "forecast: " in err and "GiB" in err
    assert "trained" in out and "48" in out


ROPE = {"name": "rope", "scaling": {"name": "yarn"}}


def measured(sharp, make_store, tokenizer, position, **keys):
    """What the model of a fixture writes, in memory."""
    model = sharp(position, train_length=16, dtype=torch.float64)
    subject = MemoryModel(model)
    settings = GenerationDiagnosticSettings(prompts=6, length=60, dtype="float64", **keys)
    tokenizer.decode = lambda row: " ".join(map(str, row))
    return model, GenerationSession(
        settings,
        subject,
        store=make_store([90, 80, 70, 100, 100, 95, 120]),
        tokenizer=tokenizer,
        methods=[Method("trained", ())],
        console=Console(quiet=True),
    ).run()


@pytest.mark.parametrize("position", [{"name": "alibi"}, ROPE])
def test_nll_of_generated_text_matches_sampling(position, sharp, make_store, tokenizer):
    """Step by step without a cache: greedy tokens are the likeliest, and the NLL is that of each
    choice."""
    model, result = measured(sharp, make_store, tokenizer, position, temperatures=[0.0])
    tokens, ends = result.tokens["trained", "greedy"]
    real, _ = result.tokens["trained", "real text"]
    assert result.edges == [8, 16, 24, 32, 40, 48, 60] and tokens.shape == (6, 60)
    for row in range(2):
        ids = tokens[row].tolist()
        assert ids[:8] == real[row, :8].tolist() and ids != real[row].tolist()
        losses = []
        for at in range(8, ends[row]):
            with torch.no_grad():
                logits = model(torch.tensor([ids[:at]]), TokenPositions.plain(at, length=60))[0, -1]
            assert int(logits.argmax()) == ids[at]
            losses.append(float(-logits.log_softmax(-1)[ids[at]]))
        for n, value in enumerate(result.values["trained", "greedy"]["nll"][row]):
            here = losses[result.edges[n] - 8 : result.edges[n + 1] - 8]
            assert value == pytest.approx(np.mean(here), abs=1e-9) if here else math.isnan(value)


def test_generation_stops_at_eos(sharp, make_store, tokenizer):
    _, result = measured(sharp, make_store, tokenizer, ROPE, temperatures=[2.0])
    tokens, ends = result.tokens["trained", "temperature 2"]
    assert (ends < 60).any(), "a row that ends is what this test is about"
    for row, end in zip(tokens, ends, strict=True):
        assert tokenizer.eos_id not in row[8:end]
        assert end == 60 or row[end] == tokenizer.eos_id
    text = " ".join(map(str, tokens[0, 8 : ends[0]]))
    assert result.text["trained", "temperature 2"] == text and len(set(ends)) > 1
    alive = np.isfinite(result.values["trained", "temperature 2"]["nll"])
    assert (alive == (np.array(result.edges[:-1]) < ends[:, None])).all()
    same = measured(sharp, make_store, tokenizer, ROPE, temperatures=[2.0])[1]
    other = measured(sharp, make_store, tokenizer, ROPE, temperatures=[2.0], seed=1)[1]
    assert (same.tokens["trained", "temperature 2"][0] == tokens).all()
    assert same.targets_hash != other.targets_hash
    # Rows that end early leave later buckets without a number; the cell is measured.
    tokenizer.eos_ids = tuple(range(0, tokenizer.vocab_size, 2))
    _, ended = measured(sharp, make_store, tokenizer, ROPE, temperatures=[2.0])
    nll = ended.values["trained", "temperature 2"]["nll"]
    assert not ended.failed and np.isfinite(nll[:, 0]).any() and np.isnan(nll[:, -1]).all()
