"""Merging settings files and overrides; errors; dump, identity and differences."""

import shlex
from typing import ClassVar

import pytest
from pydantic import Field

from errors import ConfigError
from model import SCHEMES
from run_directory.run_settings import RunSettings
from settings.fields import RemovedSetting, StrictSettings, leaves
from settings.load import (
    apply_overrides,
    differences,
    dump,
    identity,
    load_settings,
)
from settings.messages import ALIASES
from tests.files import table
from tests.settings.toy import Alibi, Root, Rope, Yarn

INVALID = table("settings/invalid_settings.yaml")


def error_of(*overrides, cls=Root):
    with pytest.raises(ConfigError) as error:
        load_settings(cls, [str(word) for word in overrides])
    return str(error.value)


@pytest.fixture
def write(tmp_path):
    """Writes NAME.yaml for each text, and returns the paths."""

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return [str(tmp_path / f"{name}.yaml") for name in texts]

    return write


@pytest.mark.parametrize(("cls", "cases"), [(Root, INVALID["toy"]), (RunSettings, INVALID["run"])])
def test_errors_name_the_setting_and_a_fix(cls, cases):
    for words, expected in cases.items():
        overrides = words.split(" ") if words.count("=") > 1 and "{" not in words else [words]
        assert expected in error_of(*overrides, cls=cls), words


def test_later_files_and_then_overrides_win(write):
    a, b = write(
        a="train_length: 32\nmodel: {dim: 16}\ntraining: {tokens: 1e4, interval: 3}\n",
        b="model:\n  dim: 24\ntraining:\n  interval: 4\n",
    )
    s = load_settings(Root, ["training.interval=5", a, "training.interval=6", b])
    sizes = (s.train_length, s.model.dim, s.training.tokens, s.training.interval)
    assert sizes == (32, 24, 10000, 6)
    assert load_settings(Root, [b, a]).model.dim == 16


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("model.position.theta=6", Rope(theta=6, window=7)),
        ("model.position.name=alibi", Alibi()),
        ("'model.position={name: alibi, window: 3}'", Alibi(window=3)),
        ("model.position.name=rope model.position.name=alibi", Alibi()),
        (
            "model.position.scaling.name=yarn model.position.scaling.factor=4",
            Rope(theta=5, window=7, scaling=Yarn(factor=4)),
        ),
    ],
)
def test_a_name_replaces_the_choice_and_other_keys_change_it(write, overrides, expected):
    files = write(a="model: {position: {name: rope, theta: 5, window: 7}}\n")
    assert load_settings(Root, [*files, *shlex.split(overrides)]).model.position == expected


def test_extended_files_come_first(write):
    *_, child, several = write(
        base="train_length: 32\nmodel: {dim: 16}\n",
        other="training: {tokens: 99}\n",
        child="extends: base.yaml\nmodel: {dim: 24}\n",
        several="extends: [base.yaml, other.yaml]\n",
    )
    loaded = [load_settings(Root, [file]) for file in (child, several)]
    values = [(s.train_length, s.model.dim, s.training.tokens) for s in loaded]
    assert values == [(32, 24, 1000), (32, 16, 99)]


def test_files_that_cannot_be_read(write, tmp_path):
    write(a="extends: b.yaml", b="extends: a.yaml", c="extends: bb.yaml", d="x: 1\nextends: 3")
    for file, expected in {
        "a": "a.yaml -> ",
        "c": "did you mean",
        "d": "d.yaml:2: extends",
        "none/a": "no such YAML file",
    }.items():
        assert expected in error_of(tmp_path / f"{file}.yaml")


def test_choices_by_name_come_before_other_overrides():
    words = ["model.position.scaling.factor=4", "model.position.scaling.name=yarn"]
    for choice in ("model.position={name: rope, theta: 5}", "model.position.name=rope"):
        position = load_settings(Root, [*words, choice]).model.position
        assert position.scaling == Yarn(factor=4)
        assert position.theta == (5 if "theta" in choice else 10000)


def test_errors_are_reported_together_with_lines(write, tmp_path):
    a, b = write(
        a="model:\n  dmi: 3\ntraining:\n  optimizer:\n    lr: -1\n",
        b="# comment\nmodel: {position: {name: alibbi}}\n",
    )
    missing = tmp_path / "none.yaml"
    lines = error_of(a, b, "zzz=1", "training.interval=0", missing).splitlines()
    starts = [f"{a}:2: model.dmi", f"{a}:5: training.optimizer.lr", f"{b}:2: model.position.name"]
    starts += ["zzz", "training.interval = 0", f"{missing}: no such"]
    assert len(lines) == len(starts)
    assert all(any(line.strip().startswith(start) for line in lines) for start in starts)
    (c,) = write(c="model: {position: {name: rope, window: 0}}\n")
    assert c in error_of(c)
    assert c not in error_of(c, "model.position={name: alibi, window: 0}")


def test_large_numbers():
    for text, value in {
        "1.5B": 1_500_000_000, "2e6": 2_000_000, "12k": 12_000, "3G": 3 * 10**9, "1.1M": 1_100_000,
        "4_000": 4000, "0.3K": 300, "2T": 2 * 10**12,
    }.items():  # fmt: skip
        assert load_settings(Root, [f"training.tokens={text}"]).training.tokens == value
        assert load_settings(Root, [f"training.project='{text}'"]).training.project == text


def test_removed_settings_of_saved_files(write, capsys):
    class Kept(StrictSettings):
        removed: ClassVar = {
            "group.old": RemovedSetting(3, "it goes"),
        }
        group: dict[str, int] = Field({})

    files = write(a="group: {old: 3, x: 1}\n", b="group: {old: 4}\n")
    assert load_settings(Kept, files[:1]).group == {"x": 1}
    assert not capsys.readouterr().err
    assert load_settings(Kept, files).group == {"x": 1}
    assert f"{files[1]}:1: group.old = 4" in capsys.readouterr().err


def test_dump_reloads_equal_with_the_same_identity(write):
    kinds = "{a: {name: rope}, b: {name: alibi, window: 3}}"
    overrides = [f"model.position={{name: pattern, layers: [a, b], kinds: {kinds}}}"]
    overrides += ["training.project=on", "training.prompts=['1e-3', 'no', '']"]
    s = load_settings(Root, [*overrides, "training.optimizer.lr=1e-7"])
    again = load_settings(Root, write(settings=dump(s)))
    assert again == s
    assert dump(again) == dump(s)
    assert identity(again) == identity(s)


def test_differences():
    a = Root()
    overrides = ["training.interval=99", "train_length=31", "model.position.scaling.name=yarn"]
    assert differences(a, a) == []
    assert differences(a, apply_overrides(a, overrides)) == [
        ("train_length", 256, 31, False),
        ("model.position.scaling", {"name": "none"}, {"name": "yarn", "factor": "auto"}, False),
        ("training.interval", 10, 99, True),
    ]


def test_apply_overrides_keeps_other_settings():
    s = load_settings(Root, ["model.dim=16", "model.position.window=7"])
    t = apply_overrides(s, ["model.position.scaling.name=yarn"])
    assert t.model.dim == 16
    assert t.model.position == Rope(window=7, scaling=Yarn())


def test_aliases_name_settings_and_choices():
    known = {*leaves(RunSettings), *SCHEMES}
    aliases = " ".join(ALIASES.values()).split()
    assert set(ALIASES) <= known
    assert len(aliases) == len(set(aliases))
    assert not known & set(aliases)
