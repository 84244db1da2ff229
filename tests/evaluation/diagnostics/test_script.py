"""evaluate.py with protocol=attention and protocol=generation on a run directory, end to end."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from errors import EvaluationError
from evaluation.diagnostics.attention import ATTENTION as ATTENTION_MEASURES
from evaluation.diagnostics.generation import REAL, GenerationMeasurement
from evaluation.evaluation_settings import GenerationDiagnosticSettings
from evaluation.methods import Method
from evaluation.reports import report as reports
from evaluation.reports.diagnostic_report import TEXT
from evaluation.scoring.targets import EvaluationText
from model import TokenPositions
from tests.artists import close, labelled
from tests.evaluation.conftest import MemoryModel
from tests.evaluation.test_evaluate_script import SMALL, call, make_run, root  # noqa: F401
from tests.files import results_of

ATTENTION = ["protocol=attention", "lengths=[24,48,96]", "targets=8", "spans_per_document=2"]
ATTENTION += ["windows=9", "methods=[trained,truncate,yarn]"]
GENERATION = ["protocol=generation", "prompts=8", "length=72", "methods=[trained,yarn]"]


@pytest.fixture
def report(root, monkeypatch):  # noqa: F811
    """Evaluate `run`: the figures by name, which are not rendered, and results.json."""
    figures = {}

    def save(figure, folder, name):
        figures[name] = figure
        for suffix in ("svg", "png"):
            (folder / f"{name}.{suffix}").touch()
        return folder / f"{name}.png"

    monkeypatch.setattr(reports, "save", save)

    def run(*overrides):
        assert call(root / "run", *overrides, "device=cpu", "folder=a") == 0
        return figures, results_of(root / "run" / "evaluation" / "a")

    return run


def test_attention_diagnostics_end_to_end(report):
    figures, record = report(*ATTENTION)
    by_method = {"attention_by_length", "mass_by_distance"}
    by_method |= {f"{name}-yarn" for name in by_method}
    assert figures.keys() == by_method | {"attention_by_method"}
    assert list(record["methods"]) == ["trained", "yarn"]
    keys = ("method", "length", "layer", "head", "measure")
    cells = {tuple(cell[key] for key in keys): cell for cell in record["cells"]}
    value = {where: cell["value"] for where, cell in cells.items()}
    heads = [value["trained", 48, 1, head, "entropy"] for head in range(6)]
    assert value["trained", 48, 1, None, "entropy"] == pytest.approx(np.mean(heads), rel=1e-4)
    whole = cells["trained", 96, None, None, "entropy"]
    assert whole["low"] < whole["value"] < whole["high"] < math.log(96)
    assert value["trained", 24, None, None, "mass_beyond"] == 0
    assert value["yarn", 96, 0, 0, "mass_beyond"] > 0
    # A method that does nothing at this length is the trained model.
    assert value["trained", 24, 0, 3, "entropy"] == value["yarn", 24, 0, 3, "entropy"]
    for spread in record["by_distance"]:
        assert spread["edges"][-1] == spread["length"]
        assert sum(spread["mass"]) == pytest.approx(1, abs=1e-4) == sum(spread["uniform"])
    # The figures show these numbers.
    places = {"mean": (None, None), "layer 1": (0, None), "layer 2": (1, None)}
    for n, measure in enumerate(ATTENTION_MEASURES):
        shown = labelled(figures["attention_by_length-yarn"].axes[n])
        for name, place in places.items():
            values = [value["yarn", length, *place, measure] for length in (24, 48, 96)]
            close(shown[name], (24, 48, 96), values)
        close(
            labelled(figures["attention_by_method"].axes[n])["yarn"],
            *zip(*shown["mean"], strict=True),
        )
    (spread,) = [
        spread
        for spread in record["by_distance"]
        if [spread[key] for key in keys[:4]] == ["yarn", 96, 1, None]
    ]
    middles = [math.sqrt((low + 1) * high) for low, high in pairwise(spread["edges"])]
    lines = labelled(figures["mass_by_distance-yarn"].axes[1])
    close(lines["96 tokens"], middles, spread["mass"])
    close(lines["uniform attention"], middles, spread["uniform"])


def test_generation_diagnostics_end_to_end(report):
    figures, record = report(*GENERATION)
    assert figures.keys() == {"generation", "generation-yarn"}
    for axes, measure in zip(figures["generation-yarn"].axes, TEXT, strict=True):
        for source, line in labelled(axes).items():
            place = {"method": "yarn", "source": source, "measure": measure}.items()
            values = [cell["value"] for cell in record["cells"] if place <= cell.items()]
            assert [y for _, y in line] == pytest.approx(values, rel=1e-4)
    assert {c["source"] for c in record["cells"]} == {"greedy", "temperature 1", REAL}
    cells = [c for c in record["cells"] if c["measure"] == "nll" and c["source"] == REAL]
    assert len(cells) == 10
    assert all(c["low"] < c["value"] < c["high"] and c["rows"] == 8 for c in cells)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("linear", ATTENTION, r"mixer\.name=linear"),
        ("learned", ATTENTION[:4], "48 positions.*at most 24"),
        ("run", [*ATTENTION, "lengths=[4096]"], "longest usable length"),
        ("run", [*ATTENTION, "lengths=[24]", "targets=32"], "targets=32"),
        ("learned", GENERATION[:3], "71 positions.*at most 24"),
        ("run", [*GENERATION, "length=20"], "less than a bucket"),
    ],
)
def test_what_cannot_work_is_refused(root, name, overrides, message):  # noqa: F811
    if not (root / name).exists():
        make_run(root, name, f"model.mixer.name={name}")
    with pytest.raises(EvaluationError, match=message):
        call(root / name, *overrides)


@pytest.mark.parametrize("overrides", [ATTENTION, GENERATION, SMALL])
def test_dry_run_measures_nothing(root, capsys, overrides):  # noqa: F811
    make_run(root, overrides[0], "model.position={name: rope}", "seed=3")
    assert call(root / overrides[0], *overrides, "--dry-run") == 0
    out, err = capsys.readouterr()
    assert not (root / overrides[0] / "evaluation").exists()
    assert "forecast: " in err
    assert "trained" in out


ROPE = {"name": "rope", "scaling": {"name": "yarn"}}


def measured(sharp, make_store, tokenizer, position, temperature, **keys):
    """The model of a fixture, what it writes, and its tokens (prompts, N) with their number."""
    model = sharp(position, train_length=16, dtype=torch.float64)
    settings = GenerationDiagnosticSettings(
        prompts=6, length=60, dtype="float64", temperatures=[temperature], **keys
    )
    tokenizer.decode = lambda row: " ".join(map(str, row))
    session = GenerationMeasurement(
        settings,
        MemoryModel(model),
        EvaluationText(make_store([90, 80, 70, 100, 100, 95, 120])),
        tokenizer,
        methods=[Method("trained", ())],
    )
    result = session.run()
    ((*_, text, values), _) = result.continuations()
    return model, result, text, values, session._generate(model, session.real, temperature)


@pytest.mark.parametrize("position", [{"name": "alibi"}, ROPE])
def test_nll_of_generated_text_matches_sampling(position, sharp, make_store, tokenizer):
    """Step by step without a cache: greedy tokens are the likeliest, and the NLL is that of each
    choice."""
    model, result, _, values, (tokens, ends) = measured(sharp, make_store, tokenizer, position, 0.0)
    assert result.edges == [8, 16, 24, 32, 40, 48, 60]
    for row in range(2):
        ids = tokens[row].tolist()
        losses = []
        for at in range(8, ends[row]):
            with torch.no_grad():
                logits = model(torch.tensor([ids[:at]]), TokenPositions.plain(at, length=60))[0, -1]
            assert int(logits.argmax()) == ids[at]
            losses.append(float(-logits.log_softmax(-1)[ids[at]]))
        for n, value in enumerate(values["nll"][row]):
            here = losses[result.edges[n] - 8 : result.edges[n + 1] - 8]
            assert value == pytest.approx(np.mean(here), abs=1e-9) if here else math.isnan(value)


def test_generation_stops_at_eos(sharp, make_store, tokenizer):
    """Rows that end early leave later buckets without a number; the cell is measured."""
    tokenizer.eos_ids = (2, 4, 6)
    _, result, text, values, (tokens, ends) = measured(sharp, make_store, tokenizer, ROPE, 2.0)
    assert len(set(ends)) > 1
    assert not result.failed
    for row, end in zip(tokens, ends, strict=True):
        assert not set(row[8:end]) & {2, 4, 6}
        assert end == 60 or row[end] in (2, 4, 6)
    assert text == " ".join(map(str, tokens[0, 8 : ends[0]]))
    alive = np.isfinite(values["nll"])
    assert (alive == (np.array(result.edges[:-1]) < ends[:, None])).all()
    _, other, *_ = measured(sharp, make_store, tokenizer, ROPE, 2.0, seed=1)
    assert other.targets_hash != result.targets_hash
