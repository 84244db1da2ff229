"""evaluate.py on a run directory, end to end."""

import json
import random
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import evaluate as script
from data import open_prepared
from data.preparation.preparation import prepare
from errors import EvaluationError
from evaluation.evaluated_model import EvaluatedModel, bos_first
from evaluation.methods import builtin_methods
from evaluation.scoring.cells import position_key
from run_directory.checkpoints import save_weights
from run_directory.position_overrides import make_model
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from tests.files import results_of

POSITIONS = {
    "run": "model.position={name: rope}",
    "learned": "model.position={name: learned}",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a prepared corpus of 40 documents and runs with random weights."""
    root = tmp_path_factory.mktemp("home")
    (root / "text").mkdir()
    rng = random.Random(5)
    for i in range(40):
        letters = "".join(rng.choices("abcdefgh ", k=150 + 10 * i))
        (root / "text" / f"{i:02}.txt").write_text(letters, encoding="utf-8")
    for name, position in POSITIONS.items():
        make_run(root, name, position)
    return root


def make_run(root, name, position, *more, source="{name: files, path: TEXT}"):
    settings = load_settings(
        RunSettings,
        [
            position,
            "train_length=24",
            "training.validation.targets=8",
            "model.dim=24",
            "model.layers=2",
            "model.heads=6",
            "model.kv_heads=2",
            "data.source=" + source.replace("TEXT", str(root / "text")),
            "data.tokenizer.name=bytes",
            "data.valid_fraction=0.4",
            f"data.root={root / 'prepared'}",
            *more,
        ],
    )
    prepared = prepare(settings.data, workers=1)
    model = make_model(settings, prepared.tokenizer.vocab_size).initialize(1 + settings.seed)
    about = {"data": str(prepared.folder), "data_hash": prepared.train.hash}
    run = Run.create(root / name, settings, prepared.tokenizer, ["test"], about).folder
    save_weights(run, 0, model)


def call(*overrides):
    return script.main([str(word) for word in overrides])


SMALL = ["lengths=[24,48,96]", "targets=8", "spans_per_document=2", "device=cpu", "--no-report"]


def test_evaluation_end_to_end(root, capsys):
    methods = "methods=[trained,truncate,linear,ntk,yarn,llama3,window]"
    assert call(root / "run", *SMALL[:-1], methods, "folder=first") == 0
    out, err = capsys.readouterr()
    # Of 18 cells, five change nothing at the trained length and share that of the trained model.
    assert "forecast: 13 cells" in err
    folder = root / "run" / "evaluation" / "first"
    # Random weights: a model that has learned nothing.
    assert_undertrained(folder, "Trained at 24 tokens, evaluated up to 96 (4×): ")
    assert out.count(" † ") == 8  # each method and the note
    assert {path.name for path in folder.iterdir()} == {
        "SHA256SUMS",
        "nll_by_length.png",
        "nll_by_length.svg",
        "results.csv",
        "results.json",
        "report.html",
        "report.md",
        "settings.yaml",
        "summary.txt",
        "targets.json",
    }
    report = results_of(folder)
    assert report["corpus"].endswith("/valid")
    assert report["unigram_nll"] < 3
    assert report["command"].startswith("python evaluate.py")
    assert len(report["cells"]) == 21
    schemes = {cell["method"]: cell["scheme"] for cell in report["cells"] if cell["length"] == 96}
    assert schemes["yarn"] == "rope, yarn factor 4 (auto)"
    assert schemes["window"] == "rope, window 24"
    for name in report["per_target_nll"].values():
        assert (root / "run" / "evaluation" / "cells" / name).is_file()
    # Its own settings file is the same evaluation: nothing is computed again.
    before = (folder / "results.csv").read_bytes()
    call(root / "run", folder / "settings.yaml")
    assert "18 of 18 cells are already done" in capsys.readouterr().err
    assert (folder / "results.csv").read_bytes() == before


def assert_undertrained(folder, more):
    """The first line reports a model that has learned nothing, and nothing says that it holds."""
    first, *lines = (folder / "summary.txt").read_text(encoding="utf-8").splitlines()
    assert first.startswith("Undertrained (†): ")
    assert more in first
    rows = pd.read_csv(folder / "results.csv")
    assert not {"held_to", "context_reach", "gain_shown_to"} & set(rows.metric)
    assert "held" not in set(rows.verdict)
    assert not any("held to" in line or "reach" in line for line in lines)


def test_text_seen_in_training_is_excluded(root):
    own = open_prepared(json.loads((root / "run" / "manifest.json").read_text())["data"])
    seen = [own.tokenizer.decode(own.train.document(i)[1:-1].tolist()) for i in (2, 3)]
    folder = root / "copies"
    folder.mkdir()
    rng = random.Random(8)
    texts = {"whole.txt": seen[0]}
    for i in range(7):
        words = ["".join(rng.choices("ijklmn", k=5)) for _ in range(50)]
        texts[f"{i}.txt"] = " ".join(words)
    texts["half.txt"] = texts.pop("6.txt")[:200] + seen[1][:200]
    for name, content in texts.items():
        (folder / name).write_text(content)
    data = ["data.source.name=files", f"data.source.path={folder}", "data.tokenizer.name=bytes"]
    data += ["data.valid_fraction=1", f"data.root={root / 'prepared'}"]
    copies = prepare(load_settings(RunSettings, data).data, workers=1)
    names = list(copies.valid.names)
    asked = [
        "device=cpu",
        "--no-report",
        "lengths=[24,48]",
        f"store={copies.folder}",
        "methods=[trained]",
    ]

    asked += ["targets=8", "spans_per_document=10", "folder=copies"]
    assert call(root / "run", *asked) == 0
    results = root / "run" / "evaluation" / "copies"
    share = results_of(results)["contamination"]
    targets = json.loads((results / "targets.json").read_text())
    # In every document but the one that was trained on, none in the half that was.
    assert {names[d] for d, _ in targets["spans"]} == texts.keys() - {"whole.txt"}
    ((half, start, end),) = targets["excluded"]
    assert names[half] == "half.txt"
    assert end - start > 170
    assert all(at <= start or at - 8 >= end for d, at in targets["spans"] if d == half)
    assert share["in_training"] == end - start
    assert share["share"] == (end - start) / share["tokens"]


def test_models_trained_with_bos_require_bos_in_every_window_for_sinks():
    ours = {"data": "prepared/some"}
    for overrides, manifest, known in (
        (["data.packing=concat"], ours, False),
        (["data.packing=intra_document", "data.bos=false"], ours, False),
        ([], {}, True),  # a model from elsewhere
    ):
        root = load_settings(RunSettings, ["model.position.name=rope", *overrides])
        model = make_model(root, 300)
        subject = EvaluatedModel("run", model, root, "hash", 0, bos_first(root, manifest))
        sinks = ["model.position.window=60", "model.position.sinks=4"]
        assert subject.offered(sinks, "every-window")["sinks"] == 4
        assert subject.offered(sinks[:1], "as-trained")["window"] == 60
        if known:
            with pytest.raises(EvaluationError, match="bos=every-window"):
                subject.offered(sinks, "as-trained")
        else:
            assert subject.offered(sinks, "as-trained")["sinks"] == 4


@pytest.mark.parametrize(
    "runs, asked, message",
    [
        (["run"], "methods={a: [model.position.fraction=0.5]}", r"'a'.*model\.position\.fraction"),
        (["run"], "store=gone", "store=FOLDER"),
        (["run", "learned"], "protocol=by-position", "protocol"),
        (["run", "learned"], "matrix=true", "matrix"),
        (["run", "learned"], "protocol=attention", "protocol"),
        (["run", "learned"], "targets_by=repetition", "targets_by"),
    ],
)
def test_what_cannot_be_evaluated_raises_one_error(root, runs, asked, message):
    with pytest.raises(EvaluationError, match=message):
        call(*(root / run for run in runs), *SMALL, asked)


def test_a_split_without_documents_is_refused(root):
    make_run(root, "all trained", POSITIONS["run"], "data.valid_fraction=0")
    with pytest.raises(EvaluationError, match="split=valid"):
        call(root / "all trained", *SMALL)


def test_runs_with_different_tokenizers_are_compared_by_bytes(root, capsys):
    pieces = "data.tokenizer={name: sentencepiece, vocab_size: 300, train_bytes: 20k}"
    make_run(root, "pieces", "model.position={name: rope}", pieces)
    runs = [root / "run", root / "pieces"]
    for run, other in (runs, runs[::-1]):
        store = json.loads((other / "manifest.json").read_text())["data"]
        with pytest.raises(EvaluationError, match="another tokenizer"):
            call(run, *SMALL, f"store={store}")
    with pytest.raises(EvaluationError, match="protocol=fixed-targets"):
        call(*runs, *SMALL, "protocol=sliding")
    asked = ["lengths=[24,48]", "targets=16", "spans_per_document=2", "device=cpu", "folder=bytes"]
    asked.append("--no-report")
    assert call(*runs, *asked) == 0
    assert "per byte" in capsys.readouterr().out
    folder = root / "run" / "evaluation" / "bytes"
    report = json.loads((folder / "results.json").read_text())
    spans = json.loads((folder / "targets.json").read_text())["bytes"]
    assert report["targets"] == sum(high - low for _, low, high in spans) > 100
    rows = numbers_of(folder)
    for run in runs:
        for key, losses in stored_cells(run, report):
            nats = losses.sum() / report["targets"]
            for metric, value in (("nll", nats), ("bits_per_byte", nats / np.log(2))):
                row = rows.pop((run.name, "trained", metric, key["length"]))
                assert row.value == pytest.approx(value, rel=1e-12)
    left = {row.method for row in rows.values() if row.metric == "nll"}
    assert left == {"truncate"}


def numbers_of(folder):
    """Rows of results.csv of several runs, by name of the run, method, metric and length."""
    rows = pd.read_csv(folder / "results.csv").itertuples()
    return {(Path(row.run).name, row.method, row.metric, row.length): row for row in rows}


def stored_cells(run, report):
    """(key, losses) of the stored cells of a run that hold the targets of a report."""
    for file in (Path(run) / "evaluation" / "cells").glob("*.npz"):
        held = np.load(file)
        key = json.loads(str(held["key"]))
        if key["targets"] == report["targets_hash"]:
            yield key, held["nll"]


def grid_of(out):
    """Rows of the printed table by method."""
    rows = {}
    for line in out.splitlines():
        if "│" in line:
            method, *cells = [cell.strip() for cell in line.split("│")[1:-1]]
            rows[method.removeprefix("as ").removesuffix(" †")] = cells
    return rows


def test_matrix_contains_every_applicable_method(root, capsys):
    short = [*SMALL[1:], "lengths=[24,48]", "folder=matrix"]
    assert call(root / "run", "--matrix", "--verbose", *short) == 0
    out = capsys.readouterr().out
    rows = grid_of(out)
    folder = root / "run" / "evaluation" / "matrix"
    report = results_of(folder)
    assert list(rows)[:2] == ["trained", "truncate"]  # the rest are ordered by their loss
    assert {"linear", "yarn", "rerope", "streaming", "window", "log_n", "drop"} < rows.keys()
    assert set(report["left_out"]) == builtin_methods().keys() - rows.keys()
    assert "extend_clip (model.position.extend belongs to learned, not to rope)" in out
    assert len(report["per_target_nll"]) == 2 * (len(rows) - 1)
    # methods without effect at 24 share a cell
    distinct = len(set(report["per_target_nll"].values()))
    assert len(rows) < distinct < 2 * (len(rows) - 1)
    # The numbers are those of the cells, the best first, and each method of its own.
    cells = {(cell["method"], cell["length"]): cell["nll"] for cell in report["cells"]}
    for method, row in rows.items():
        assert row[:2] == [f"{cells[method, length]:.3f}" for length in (24, 48)]
    last = [cells[method, 48] for method in rows][2:]
    assert last == sorted(last)


def test_runs_are_compared_with_the_first(root):
    """Other weights, another trained length, and positions that end: differences by hand from the
    losses of every target."""
    make_run(root, "longer", "model.position={name: rope}", "train_length=32", "seed=1")
    runs = [root / name for name in ("run", "longer", "learned")]
    asked = ["lengths=[24,48]", *SMALL[1:], "folder=compared", "methods=[trained]"]
    assert call(*runs, *asked) == 0
    folder = root / "run" / "evaluation" / "compared"
    assert_undertrained(folder, "")
    report = results_of(folder)
    assert [run["train_length"] for run in report["runs"]] == [24, 32, 24]
    rows = numbers_of(folder)
    nll = {}
    for run in runs:
        # other tests leave other methods
        trained = position_key(Run(run).settings.model.positions_record())
        for key, losses in stored_cells(run, report):
            if key["position"] == trained:
                nll[run.name, key["length"]] = losses.reshape(-1, 16).mean(axis=1)  # by document
    pairs = [(name, n) for name in ("longer", "learned") for n in (24, 32, 48) if (name, n) in nll]
    assert len(pairs) == report["family"] == 4
    for name, n in pairs:
        difference = nll[name, n] - nll["run", n]
        half = stats.t.ppf(1 - 0.05 / 4 / 2, len(difference) - 1) * stats.sem(difference)
        mean = difference.mean()
        row = rows.pop((name, "trained", "difference", n))
        found = (row.value, row.low, row.high)
        assert found == pytest.approx((mean, mean - half, mean + half), abs=1e-12)
        level = rows[name, "trained", "nll", n].value
        assert level == pytest.approx(nll[name, n].mean(), abs=1e-12)
    assert "difference" not in {row.metric for row in rows.values()}
    assert "24" in rows["learned", "trained", "failure", 48].note


def test_comparisons_show_the_baseline_and_no_method_twice(root, capsys):
    scaling = "{name: yarn, factor: 4}"
    make_run(root, "yarn", f"model.position={{name: rope, scaling: {scaling}}}")
    asked = ["lengths=[24,48]", *SMALL[1:], "folder=baseline", "dtype=bfloat16"]
    asked += [f"methods={{truncate: [], yarn4: ['model.position.scaling={scaling}']}}"]
    assert call(root / "run", root / "yarn", *asked) == 0
    assert "yarn4" in capsys.readouterr().err  # the second run was trained this way
    rows = numbers_of(root / "run" / "evaluation" / "baseline")
    shown = {("run", "yarn4"), *product(("run", "yarn"), ("trained", "truncate"))}
    assert {entry[:2] for entry in rows} == shown
    trained, truncated = (rows["run", name, "nll", 48].value for name in ("trained", "truncate"))
    difference = rows["run", "truncate", "difference", 48].value
    assert difference == pytest.approx(truncated - trained, abs=1e-9)


def test_text_of_imported_and_lost_training_is_named(root, capsys):
    manifest = json.loads((root / "run" / "manifest.json").read_text())
    store = manifest["data"]
    for name, data, named in (
        ("imported", None, "the text of an imported model is not known"),
        ("moved", str(root / "gone"), str(root / "gone")),
    ):
        shutil.copytree(root / "run", root / name, ignore=shutil.ignore_patterns("evaluation"))
        (root / name / "manifest.json").write_text(json.dumps(manifest | {"data": data}))
        short = ["lengths=[24]", *SMALL[1:], "methods=[trained]", f"store={store}"]
        assert call(root / name, *short) == 0
        assert named in capsys.readouterr().out
    with pytest.raises(EvaluationError, match=r"prepare\.py .*tokenizer=\{name: bytes\}.* store"):
        call(root / "imported", *SMALL)
