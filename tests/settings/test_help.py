"""Help on settings, and the check for misspelled options and settings before torch is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from errors import ConfigError, TrainingError
from run_directory.run_settings import RunSettings
from settings.command_line import COMMON, EXAMPLES, SCHEMAS, help_page, parse
from settings.help import describe_setting, named_settings
from settings.schema import leaves, read_schema, schema_of
from tests.settings.toy import Root

ROOT = Path(__file__).resolve().parents[2]
RUN = [schema_of(RunSettings)]


def names_in(page: str) -> list[str]:
    return [line.split()[0].rstrip("*") for line in page.splitlines() if line[:1].strip()]


@pytest.mark.parametrize("width", [60, 100])
def test_setting_descriptions_fit_width(width):
    page = describe_setting([schema_of(Root)], "all", width)
    shown = names_in(page)
    for name in leaves(schema_of(Root)):
        if not name.endswith(".name"):
            assert name in shown
    assert "model.position.name=yarn" not in shown and "model.position.scaling.name=yarn" in shown
    assert max(map(len, page.splitlines())) <= max(width, max(map(len, shown)))


def test_run_settings_have_descriptions():
    page = describe_setting(RUN, "all")
    shown = set(names_in(page))
    for name in leaves(RUN[0]):  # sources inside a source are not repeated
        if not {"kinds", "haystack", "text"} & set(name.split(".")[:-1]) and not name.endswith(
            ".name"
        ):
            assert name in shown, name


def test_choices_are_listed_one_per_line():
    page = describe_setting(RUN, "model.position", 100)
    choices = [
        line.split()[0] for line in page.splitlines() if line.startswith("  ") and line[2:3].strip()
    ]
    assert choices == list(RUN[0].fields["model"].group.fields["position"].choices)
    assert max(map(len, page.splitlines())) <= 100


def test_help_of_choice_by_path_and_by_name():
    page = describe_setting(RUN, "rope")
    assert names_in(page)[0] == "model.position.name=rope" and "model.position.theta" in names_in(
        page
    )
    for word in ("model.position.rope", "model.position.name=rope"):
        assert describe_setting(RUN, word) == page
    assert "model.position.theta" not in names_in(describe_setting(RUN, "alibi"))
    several = names_in(describe_setting(RUN, "linear"))
    assert {"training.lr_schedule.name=linear", "model.position.scaling.name=linear"} <= set(
        several
    )


def test_help_of_group_lists_settings():
    page = describe_setting(RUN, "training.checkpoint")
    inside = [name for name in leaves(RUN[0]) if name.startswith("training.checkpoint.")]
    assert names_in(page)[: len(inside) + 1] == ["training.checkpoint", *inside]
    assert "training.checkpoint.interval*" in page
    assert names_in(describe_setting(RUN, "training.ema.decay")) == ["training.ema.decay"]


def test_types_limits_and_defaults_are_shown():
    page = " ".join(describe_setting([schema_of(Root)], "all", 100).split())
    assert "base of the frequencies (number, greater than 0, default 10000)" in page
    assert "stretch (number or auto, at least 1, default auto)" in page
    assert "training.interval* cadence (whole number, at least 1, default 10)" in page

    class Plain(BaseModel):
        word: str = Field("", description="empty")
        other: str = Field("x", description="not")

    page = describe_setting([schema_of(Plain)], "all")
    assert page.count("default ''") == 1 and "default x" in page and "resumed" not in page


def test_names_of_settings_among_other_arguments():
    overrides = [
        "configs/tiny.yaml",
        "training.checkpoint",
        "seed=3",
        "runs/x",
        "model.position.name=rope",
    ]
    assert named_settings(RUN, overrides) == ["training.checkpoint", "model.position.name=rope"]
    assert named_settings(RUN, ["training", "tests"]) == ["training"]  # both are directories too
    for word, near in (
        ("training.chekpoint", "training.checkpoint"),
        ("model.position.alib", "model.position"),
    ):
        with pytest.raises(ConfigError, match=f"{word}.*{near}"):
            describe_setting(RUN, word)


@pytest.mark.parametrize("script", SCHEMAS)
def test_the_help_page_shows_the_common_settings(script):
    page = help_page(script, "USAGE", [])
    assert "USAGE" in page and len(page.splitlines()) < 80
    assert set(COMMON[script].split()) <= set(names_in(page)) and len(COMMON[script].split()) <= 10
    for word in EXAMPLES[script]:
        assert help_page(script, "USAGE", [word])


@pytest.mark.parametrize(
    "arguments",
    [["RUN", "--samples", "0"], ["RUN", "--stop", ""], ["RUN", "--greedy", "--temperature", "2"],
     ["RUN", "x"], ["RUN", "--seed", str(1 << 63)], []],
)  # fmt: skip
def test_options_of_generate_that_are_rejected(arguments):
    with pytest.raises(TrainingError):
        parse("generate", "", arguments)


def test_the_temperature_of_generate():
    found = [
        parse("generate", "", ["RUN", *more]).temperature
        for more in ([], ["--greedy"], ["--temperature=2"])
    ]
    assert found == [0.8, 0.0, 2.0]


# One interpreter that imports nothing else, and a fork of it for each command line.
CODE = """
import json, os, sys
from settings.command_line import answer_quickly
folder, statuses = sys.argv[1], []
for n, arguments in enumerate(json.loads(sys.argv[2])):
    child = os.fork()
    if child == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{n}.{name}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = arguments
        break
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(json.dumps(statuses))
    sys.exit()
try:
    answer_quickly("USAGE")
    print("continues")
finally:
    slow = {"torch", "matplotlib", "datasets", "scipy"} & set(sys.modules)
    assert not slow, slow
"""
COMMANDS = {
    "train.py --help": (0, "training.batch_size"),
    "train.py --help rope": (0, "model.position.theta"),
    "train.py --help trainin": (2, "training"),
    "train.py configs/tiny.yaml training.token=5 model.dmi=3": (2, "training.tokens"),
    "train.py --restrat": (2, "--restart"),
    "train.py configs/extension/pi.yaml parent.run=runs/none seeed=1": (0, "continues"),
    "train.py configs/tiny.yaml model.position.name=alibi": (0, "continues"),
    "evaluate.py RUN length=[5]": (2, "lengths"),
    "evaluate.py RUN protocol=task": (2, "tasks"),
    "evaluate.py RUN protocol=tasks lengths=[5]": (0, "continues"),
    "study.py configs/studies/quick.yaml reprot.baseline=x": (2, "report"),
    "generate.py RUN --token 5": (2, "--tokens"),
    "generate.py RUN model.position.window=5": (0, "continues"),
    # A run with ALiBi.
    "generate.py ALIBI model.position.windw=5": (2, "model.position.window"),
    "generate.py ALIBI model.position.window=5": (0, "continues"),
}
TYPOS = "train.py configs/tiny.yaml training.token=5 model.dmi=3 seed=-1"


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """(status, stdout, stderr) of each command."""
    folder = tmp_path_factory.mktemp("answers")
    text = (ROOT / "configs" / "tiny.yaml").read_text().partition("\nmodel:")[0]
    (folder / "settings.yaml").write_text(text + "\nmodel: {position: {name: alibi}}\n")
    lines = [line.replace("ALIBI", str(folder)).split() for line in (*COMMANDS, TYPOS)]
    command = [sys.executable, "-c", CODE, str(folder), json.dumps(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return {
        line: (status, (folder / f"{n}.out").read_text(), (folder / f"{n}.err").read_text())
        for n, (line, status) in enumerate(
            zip((*COMMANDS, TYPOS), json.loads(done.stdout), strict=True)
        )
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_typos_import_no_torch(answers, command):
    (status, expected), (found, out, err) = COMMANDS[command], answers[command]
    assert found == status, err
    assert ("continues" in out) == (expected == "continues")
    assert expected in out + err


def test_all_typos_are_reported_together(answers):
    _, _, found = answers[TYPOS]
    assert "training.tokens?" in found and "model.dim?" in found and "seed = -1" in found


def test_committed_schemas_have_an_extends_key_for_editors():
    for names in SCHEMAS.values():
        for name in names:
            assert "extends" not in read_schema(name).fields
