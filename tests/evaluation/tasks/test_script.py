"""evaluate.py protocol=tasks on run directories, end to end."""

from itertools import product

import pytest

from errors import EvaluationError
from tests.evaluation.test_evaluate_script import call, make_run
from tests.files import results_of

PASSKEY = "{name: passkey, haystack: {name: filler}, queries: 3}"
SOURCES = {
    "items": f"{{name: task, items: 20, length: 130, task: {PASSKEY}}}",
    "text": "{name: files, path: TEXT}",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run trained on items, and one trained on text, both with random weights."""
    root = tmp_path_factory.mktemp("home")
    (root / "text").mkdir()
    for i in range(16):
        (root / "text" / f"{i:02}.txt").write_text(f"Chapter {i}. The road went on and on. " * 20)
    for name, source in SOURCES.items():
        sizes = ["train_length=128", "data.valid_fraction=0.5"]
        make_run(root, name, "model.position.name=rope", *sizes, source=source)
    return root


SMALL = [
    "protocol=tasks",
    "items=12",
    "haystacks=6",
    "lengths=[128,160]",
    "device=cpu",
    "--no-report",
]


def test_run_is_evaluated_on_new_items_of_its_tasks(root, capsys):
    methods = "methods=[trained,truncate,yarn]"
    assert call(root / "items", *SMALL[:-1], methods, "folder=first") == 0
    out, err = capsys.readouterr()
    assert "\nAbove chance (33.3%) at 160 tokens: " in out
    assert "forecast: 4 cells" in err
    folder = root / "items" / "evaluation" / "first"
    report = results_of(folder)
    assert report["task"] == "passkey"
    assert report["task_settings"]["queries"] == 1
    assert report["haystack"].startswith("filler, ")
    assert report["unit_count"] == 6
    cells = {(cell["method"], cell["length"]): cell for cell in report["cells"]}
    assert cells.keys() == set(product(("trained", "truncate", "yarn"), (128, 160)))
    assert report["methods"]["yarn"]["position"]["scaling"]["name"] == "yarn"
    # As trained and cut to the trained length are the same at the trained length.
    assert cells["trained", 128]["unit_accuracy"] == cells["truncate", 128]["unit_accuracy"]
    before = (folder / "results.csv").read_bytes()
    call(root / "items", folder / "settings.yaml", "--no-report")
    assert "6 of 6 cells are already done" in capsys.readouterr().err
    assert (folder / "results.csv").read_bytes() == before


def test_haystacks_use_own_validation_data(root, capsys):
    assert call(root / "text", *SMALL, "task.name=needle", "folder=needle") == 0
    report = results_of(root / "text" / "evaluation" / "needle")
    assert report["haystack"].endswith("/valid")
    assert report["units"]["names"][0].endswith(".txt")
    assert len(report["units"]["names"]) == 6
    assert call(root / "text", *SMALL, "task.name=recall", "folder=recall") == 0
    report = results_of(root / "text" / "evaluation" / "recall")
    assert report["chance"] == 0.25
    assert report["unit"] == "item"
    for words, message in (
        (["task.name=parity"], "was not trained on parity"),
        ([], r"task\.name"),
        (["task.name=needle", "lengths=[5000]"], r"none of the 8 documents .* 5,001 tokens"),
        (["task.name=needle", "lengths=[50]"], "too short for the task needle"),
    ):
        with pytest.raises(EvaluationError, match=message):
            call(root / "text", *SMALL, *words)
