"""Help on settings, options of the scripts, and misspelled settings."""

import pytest

import evaluate
import generate
from errors import ConfigError
from run_directory.run_settings import RunSettings
from settings.fields import leaves
from settings.help import describe_setting
from studies import study_options
from tests.settings.toy import Root
from training import train_options

RUN = [RunSettings]
SCRIPTS = {
    "train": train_options,
    "evaluate": evaluate,
    "generate": generate,
    "study": study_options,
}


def names_in(page: str) -> list[str]:
    return [line.split()[0].rstrip("*") for line in page.splitlines() if line[:1].strip()]


def is_listed(name: str) -> bool:  # sources inside a source are not repeated
    *path, last = name.split(".")
    return last != "name" and not {"kinds", "haystack", "text"} & set(path)


@pytest.mark.parametrize("cls", [Root, RunSettings])
def test_help_on_all_settings(cls):
    page = describe_setting([cls], "all")
    shown = names_in(page)
    assert {name for name in leaves(cls) if is_listed(name)} <= set(shown)
    assert "model.position.scaling.name=yarn" in shown
    assert max(map(len, page.splitlines())) <= max(100, *map(len, shown))


def test_help_on_a_setting_and_on_a_choice():
    for word, first, inside, outside in (
        ("rope", "model.position.name=rope", "model.position.theta", "model.dim"),
        ("training.checkpoint", "training.checkpoint", "training.checkpoint.keep", "training.ema"),
        ("linear", "model.mixer.name=linear", "training.lr_schedule.name=linear", "model.dim"),
    ):
        names = names_in(describe_setting(RUN, word))
        assert names[0] == first
        assert inside in names
        assert outside not in names


def test_descriptions_keep_an_ellipsis():
    page = " ".join(describe_setting(evaluate.TOPICS.classes, "device").split())
    assert "cuda:1 ... (text" in page


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_pages(script, capsys):
    module = SCRIPTS[script]
    page = module.parser_of("USAGE").help_page([])
    assert "USAGE" in page
    assert set(module.TOPICS.common.split()) <= set(names_in(page))
    for word in (module.TOPICS.setting, module.TOPICS.choice):
        with pytest.raises(SystemExit) as end:
            module.parser_of("USAGE").parse(["--help", word])
        assert end.value.code == 0
        assert word in capsys.readouterr().out
    with pytest.raises(ConfigError, match="qqqqq"):
        module.parser_of("USAGE").parse(["--help", "qqqqq"])


def test_the_temperature_of_generate():
    cases = ([], ["--greedy"], ["--temperature=2"])
    assert [generate.parse_options(["RUN", *case]).temperature for case in cases] == [0.8, 0.0, 2.0]
