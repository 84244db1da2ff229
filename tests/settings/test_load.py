"""Merging settings files and overrides; errors; dump and hash."""

from typing import ClassVar

import pytest
from hypothesis import strategies as st
from pydantic import Field

from errors import ConfigError
from model import SCHEMES
from run_directory.run_settings import RunSettings
from settings.accepted import leaves
from settings.fields import RemovedSetting, StrictSettings
from settings.load import (
    apply_overrides,
    differences,
    dump,
    identity,
    load_settings,
    split_arguments,
)
from settings.messages import ALIASES
from tests.settings.toy import Alibi, Root, Rope, Yarn


def error_of(*overrides, cls=Root):
    with pytest.raises(ConfigError) as error:
        load_settings(cls, [str(word) for word in overrides])
    return str(error.value)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return [str(folder / f"{name}.yaml") for name in files]


def test_overrides_come_after_files(tmp_path):
    a, b = write(
        tmp_path,
        a="train_length: 32\nmodel: {dim: 16}\ntraining: {tokens: 1e4, interval: 3}\n",
        b="model:\n  dim: 24\ntraining:\n  interval: 4\n",
    )
    s = load_settings(Root, ["training.interval=5", a, "training.interval=6", b])
    assert (s.train_length, s.model.dim, s.training.tokens, s.training.interval) == (
        32,
        24,
        10000,
        6,
    )
    assert load_settings(Root, [b, a]).model.dim == 16


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.position.theta=6"], Rope(theta=6, window=7)),
        (["model.position.name=alibi"], Alibi()),
        (["model.position.name=rope"], Rope()),
        (["model.position={name: alibi, window: 3}"], Alibi(window=3)),
        (["model.position.name=rope", "model.position.name=alibi"], Alibi()),
        (
            ["model.position.scaling.name=yarn", "model.position.scaling.factor=4"],
            Rope(theta=5, window=7, scaling=Yarn(factor=4)),
        ),
    ],
)
def test_a_name_replaces_the_choice_and_other_keys_change_it(tmp_path, overrides, expected):
    files = write(tmp_path, a="model: {position: {name: rope, theta: 5, window: 7}}\n")
    assert load_settings(Root, [*files, *overrides]).model.position == expected


def test_extended_files_come_first(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, base="train_length: 32\nmodel: {dim: 16}\n", other="training: {tokens: 99}\n")
    files = write(
        tmp_path / "sub",
        child="extends: ../base.yaml\nmodel: {dim: 24}\n",
        several="extends: [../base.yaml, ../other.yaml]\n",
    )
    loaded = [load_settings(Root, [file]) for file in files]
    found = [(s.train_length, s.model.dim, s.training.tokens) for s in loaded]
    assert found == [(32, 24, 1000), (32, 16, 99)]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("a", "a.yaml -> "),
        ("c", "did you mean"),
        ("d", "d.yaml:2: extends"),
        ("smal", "small.yaml?"),
        ("none/a", "does not exist"),
        ("zzzzzzz", "holds a.yaml, b.yaml"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, file, expected):
    texts = {"a": "extends: b.yaml\n", "b": "extends: a.yaml\n", "c": "extends: bb.yaml\n"}
    write(tmp_path, **texts, d="x: 1\nextends: 3\n", small="{}")
    assert expected in error_of(tmp_path / f"{file}.yaml")


PATTERN = "model.position={name: pattern, layers: [a], kinds: {a: {name: rope, "


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("model.dmi=3", "did you mean model.dim?"),
        ("lr=3", "did you mean training.optimizer.lr?"),
        ("model.thetta=3", "did you mean model.position.theta?"),
        ("trainning.tokens=3", "did you mean training?"),
        ("qqqq=3", "train_length, model, training"),
        ("model.position.name=alibbi", "did you mean alibi?"),
        ("model.position.name=zzz", "known: rope, alibi, pattern"),
        ("model.position.name=null", "known: rope, alibi, pattern"),
        ("model.position=alibi", "did you mean model.position.name=alibi"),
        ("model.position.scaling.factor=4", "choose model.position.scaling.name=yarn"),
        ("model.dim=4", "model.dim = 4: out of range, must be at least 8 and at most 512"),
        ("model.dim=2.5", "model.dim = 2.5: expected whole number, at least 8 and at most 512"),
        ("model.dim=true", "model.dim = true: expected whole number"),
        ("model.dim=010", "model.dim = 010: expected whole number"),
        ("model.dim=[8]", "not a list"),
        ("model.dim=", "model.dim = null: expected whole number"),
        ("model=3", "model.dim=VALUE"),
        ("model.dim.x=3", "not a mapping"),
        ("model.tie_embeddings=no", "expected true or false"),
        ("model.tie_embeddings=1", "expected true or false"),
        ("training.mode=off", "disabled or offline"),
        ("training.project=123", "between quotes"),
        ("training.prompts=[a, 1]", "training.prompts.1 = 1"),
        ("training.optimizer.lr=.nan", "finite"),
        ("training.optimizer.lr=.inf", "finite"),
        ("training.optimizer.lr='1'", "expected number"),
        ("training.optimizer.betas=[0.1]", "training.optimizer.betas.1 is missing"),
        ("training.tokens=8", "training.tokens is less than train_length"),
        ("training.tokens=1.0005k", "expected whole number"),
        ("training.tokens=12X", "training.tokens = 12X"),
        ("model.position.name=pattern", "model.position.layers must be given: kind of each layer"),
        (f"{PATTERN}windw: 1}}}}}}", "did you mean model.position.kinds.a.window?"),
        (f"{PATTERN}window: 0}}}}}}", "model.position.kinds.a.window = 0: out of range"),
        ("model.dim=[8", "not valid YAML"),
        ("--fast", "without dashes"),
        ("training.tokens", "training.tokens=VALUE"),
        ("a b=3", "neither a YAML file nor a setting"),
    ],
)
def test_errors_name_the_setting_and_a_fix(word, expected):
    assert expected in error_of(word)


def test_an_override_that_a_later_choice_would_discard_is_an_error():
    text = error_of("model.position.scaling.factor=4", "model.position.scaling.name=yarn")
    assert "model.position.scaling.factor=4" in text


def test_errors_are_reported_together_with_lines(tmp_path):
    a, b = write(
        tmp_path,
        a="model:\n  dmi: 3\ntraining:\n  optimizer:\n    lr: -1\n",
        b="# comment\nmodel: {position: {name: alibbi}}\n",
    )
    lines = error_of(a, b, "zzz=1", "training.interval=0", tmp_path / "none.yaml").splitlines()
    starts = (f"{a}:2: model.dmi", f"{a}:5: training.optimizer.lr", f"{b}:2: model.position.name")
    starts += ("zzz", "training.interval = 0", f"{tmp_path / 'none.yaml'}: no such file")
    assert len(lines) == len(starts)
    assert all(any(line.strip().startswith(start) for line in lines) for start in starts)


def test_a_file_of_another_script_is_reported_once(tmp_path):
    study, mixed = write(
        tmp_path, study="base: [x]\ngrid: {a: {}}\nreport: 3\n", mixed="grid: 3\ntrain_length: 32\n"
    )
    text = error_of(study, "model.dmi=3")
    assert text.startswith(f"{study}: ") and text.count("\n") == 1 and "model.dim?" in text
    assert error_of(mixed).startswith(f"{mixed}:1: grid")


def test_values_that_are_replaced_are_not_reported(tmp_path):
    (a,) = write(tmp_path, a="model: {position: {name: rope, window: 0}}\n")
    assert a in error_of(a) and a not in error_of(a, "model.position={name: alibi, window: 0}")


@pytest.mark.parametrize(
    ("text", "value"),
    [("200M", 200_000_000), ("1.5B", 1_500_000_000), ("2e6", 2_000_000), ("12k", 12_000),
     ("3G", 3 * 10**9), ("1.1M", 1_100_000), ("4_000", 4000), ("0.3K", 300), ("2T", 2 * 10**12)],
)  # fmt: skip
def test_large_numbers(text, value):
    assert load_settings(Root, [f"training.tokens={text}"]).training.tokens == value
    assert load_settings(Root, [f"training.project='{text}'"]).training.project == text


def test_name_is_reserved_for_choices():
    class Bad(StrictSettings):
        name: str = "x"

    class Holder(StrictSettings):
        bad: Bad = Field(Bad())

    with pytest.raises(TypeError, match="reserved"):
        load_settings(Holder, [])
    assert load_settings(Bad, ["name=y"]) == Bad(name="y")


def test_removed_settings_of_saved_files(tmp_path, capsys):
    class Kept(StrictSettings):
        removed: ClassVar = {
            "group.old": RemovedSetting(3, "it goes"),
            "harmful": RemovedSetting(None, "it changed losses", changes_numbers=True),
        }
        group: dict[str, int] = Field({})

    files = write(tmp_path, a="group: {old: 3, x: 1}\nharmful: null\n", b="group: {old: 4}\n")
    assert load_settings(Kept, files[:1]).group == {"x": 1} and not capsys.readouterr().err
    assert load_settings(Kept, files).group == {"x": 1}
    assert f"{files[1]}:1: group.old = 4" in capsys.readouterr().err
    assert "harmful = 5" in error_of("harmful=5", cls=Kept)


keys = st.sampled_from(["a", "b", "name"])
value = st.recursive(
    st.integers(0, 3) | st.just([1]), lambda v: st.dictionaries(keys, v, max_size=3), max_leaves=8
)
layer = st.dictionaries(keys, value, max_size=3)


def leaf_paths(tree, path=()):
    """Every leaf (or empty mapping) of a tree with its path, in order."""
    if isinstance(tree, dict) and tree:
        return [found for key, item in tree.items() for found in leaf_paths(item, (*path, key))]
    return [(path, tree)]


def test_dump_reloads_equal_and_identity_is_stable(tmp_path):
    kinds = "{a: {name: rope}, b: {name: alibi, window: 3}}"
    overrides = [
        f"model.position={{name: pattern, layers: [a, b], kinds: {kinds}}}",
        "training.project=on", "training.prompts=['1e-3', 'no', '']", "training.optimizer.lr=1e-7",
    ]  # fmt: skip
    s = load_settings(Root, overrides)
    again = load_settings(Root, write(tmp_path, settings=dump(s)))
    assert again == s and dump(again) == dump(s) and identity(again) == identity(s)


def test_identity_excludes_what_may_change():
    s = Root()
    assert len(identity(s)) == 10 and int(identity(s), 16) >= 0
    assert identity(apply_overrides(s, ["training.interval=99"])) == identity(s)
    shaping = ["train_length=3", "model.position.window=2", "training.optimizer.lr=2e-3"]
    assert len({identity(s), *(identity(apply_overrides(s, [word])) for word in shaping)}) == 4


def test_differences():
    a = Root()
    b = apply_overrides(
        a, ["training.interval=99", "train_length=31", "model.position.scaling.name=yarn"]
    )
    assert differences(a, a) == []
    assert differences(a, b) == [
        ("train_length", 256, 31, False),
        ("model.position.scaling", {"name": "none"}, {"name": "yarn", "factor": "auto"}, False),
        ("training.interval", 10, 99, True),
    ]


def test_apply_overrides_keeps_other_settings_and_rejects_files():
    s = load_settings(Root, ["model.dim=16", "model.position.window=7"])
    t = apply_overrides(s, ["model.position.scaling.name=yarn"])
    assert t.model.dim == 16 and t.model.position == Rope(window=7, scaling=Yarn())
    with pytest.raises(ConfigError, match="use overrides"):
        apply_overrides(s, ["a/b.yaml"])


def test_files_and_overrides_are_told_apart():
    arguments = ["configs/a.yaml", "a.b=x=y", "runs/lr=3/settings.yaml", "c={d: 1}"]
    assert split_arguments(arguments) == (arguments[::2], arguments[1::2])


def test_aliases_name_settings_and_choices():
    known = {*leaves(RunSettings), *SCHEMES}
    assert set(ALIASES) <= known
    aliases = " ".join(ALIASES.values()).split()
    assert len(aliases) == len(set(aliases)) and not known & set(aliases)
