"""Merging settings files and overrides; errors; dump and hash."""

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from errors import ConfigError
from model import SCHEMES
from run_directory.run_settings import RunSettings
from settings.load import (
    apply_overrides,
    differences,
    dump,
    identity,
    load_settings,
    merge,
    split_arguments,
)
from settings.schema import leaves, schema_of
from settings.validate import ALIASES, RENAMED
from tests.settings.toy import Alibi, Root, Rope, S, Yarn


def complaint(*overrides, cls=Root):
    with pytest.raises(ConfigError) as error:
        load_settings(cls, [str(word) for word in overrides])
    return str(error.value)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return [folder / f"{name}.yaml" for name in files]


def test_overrides_come_after_files(tmp_path):
    a, b = write(
        tmp_path,
        a="train_length: 32\nmodel: {dim: 16, tie_embeddings: false}\ntraining: {tokens: 1e4, interval: 3}\n",
        b="model:\n  dim: 24\ntraining:\n  interval: 4\n",
    )
    s = load_settings(Root, ["training.interval=5", str(a), "training.interval=6", str(b)])
    assert (s.train_length, s.model.dim, s.model.tie_embeddings) == (32, 24, False)
    assert (s.training.tokens, s.training.interval) == (10000, 6)
    assert load_settings(Root, [str(b), str(a)]).model.dim == 16


def test_name_override_resets_choice(tmp_path):
    (a,) = write(tmp_path, a="model: {position: {name: rope, theta: 5, window: 7}}\n")
    assert load_settings(Root, [str(a), "model.position.theta=6"]).model.position == Rope(
        theta=6, window=7
    )
    assert load_settings(Root, [str(a), "model.position.name=alibi"]).model.position == Alibi()
    assert load_settings(Root, [str(a), "model.position.name=rope"]).model.position == Rope()
    overrides = ["model.position.scaling.name=yarn", "model.position.scaling.factor=4"]
    position = load_settings(Root, [str(a), *overrides]).model.position
    assert position == Rope(theta=5, window=7, scaling=Yarn(factor=4))
    assert load_settings(Root, ["model.position={name: alibi, window: 3}"]).model.position == Alibi(
        window=3
    )


def test_overrides_change_default_choice():
    assert load_settings(Root, ["model.position.theta=5e5"]).model.position == Rope(theta=500000)


def test_ineffective_override_is_rejected():
    text = complaint("model.position.scaling.factor=4", "model.position.scaling.name=yarn")
    assert "would discard model.position.scaling.factor=4" in text
    assert (
        load_settings(
            Root, ["model.position.name=rope", "model.position.name=alibi"]
        ).model.position
        == Alibi()
    )


def test_extends(tmp_path):
    (tmp_path / "sub").mkdir()
    write(
        tmp_path,
        base="train_length: 32\nmodel: {dim: 16}\n",
        other="model: {tie_embeddings: false}\n",
    )
    child, several = write(
        tmp_path / "sub",
        child="extends: ../base.yaml\nmodel: {dim: 24}\n",
        several="extends: [../base.yaml, ../other.yaml]\n",
    )
    s = load_settings(Root, [str(child)])
    assert (s.train_length, s.model.dim) == (32, 24)
    s = load_settings(Root, [str(several)])
    assert (s.train_length, s.model.dim, s.model.tie_embeddings) == (32, 16, False)


def test_extends_rejects_cycles_and_missing_files(tmp_path):
    a, _, c, d = write(
        tmp_path,
        a="extends: b.yaml\n",
        b="extends: a.yaml\n",
        c="extends: bb.yaml\n",
        d="x: 1\nextends: 3\n",
    )
    assert "extends itself" in complaint(a) and "a.yaml -> " in complaint(a)
    assert "did you mean" in complaint(c) and "extended by" in complaint(c)
    assert "d.yaml:2: extends must name a YAML file" in complaint(d)


def test_missing_file_suggests_nearest(tmp_path):
    write(tmp_path, small="{}", tiny="{}")
    assert complaint(tmp_path / "smal.yaml").endswith(f"did you mean {tmp_path / 'small.yaml'}?")
    assert complaint(tmp_path / "small").endswith(f"did you mean {tmp_path / 'small.yaml'}?")
    assert "holds small.yaml, tiny.yaml" in complaint(tmp_path / "zzz.yaml")
    assert "does not exist" in complaint(tmp_path / "none" / "a.yaml")
    assert "a folder" in complaint(tmp_path)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("model.dmi=3", "model.dmi is not a setting; did you mean model.dim?"),
        ("lr=3", "lr is not a setting; did you mean training.optimizer.lr?"),
        ("theta=3", "did you mean model.position.theta?"),
        ("model.thetta=3", "did you mean model.position.theta?"),
        ("trainning.tokens=3", "did you mean training?"),
        ("qqqq=3", "the settings at the top level are train_length, model, training"),
        (
            "model.position.name=alibbi",
            "model.position.name = alibbi is unknown; did you mean alibi?",
        ),
        ("model.position.name=zzz", "known: rope, alibi, pattern"),
        ("model.position.name=null", "known: rope, alibi, pattern"),
        ("model.position=alibi", "did you mean model.position.name=alibi"),
        (
            "model.position.scaling.factor=4",
            "belongs to yarn, not to none; choose model.position.scaling.name=yarn",
        ),
        ("model.dim=4", "model.dim = 4: out of range, must be at least 8 and at most 512"),
        ("model.dim=2.5", "model.dim = 2.5: must be a whole number, at least 8 and at most 512"),
        ("model.dim=true", "model.dim = true: must be a whole number"),
        ("model.dim=010", "model.dim = 010: must be a whole number"),
        ("model.dim=[8]", "not a list"),
        ("model.dim=", "model.dim = null: must be a whole number"),
        ("model=3", "model = 3: must be a group of settings"),
        ("model.dim.x=3", "not a mapping"),
        ("model.tie_embeddings=no", "model.tie_embeddings = no: must be true or false"),
        ("model.tie_embeddings=1.5", "must be true or false"),
        ("training.mode=off", "must be one of disabled or offline"),
        ("training.project=123", "training.project = 123: must be text; put it between quotes"),
        ("training.prompts=[a, 1]", "training.prompts.1 = 1: must be text"),
        ("training.optimizer.lr=.nan", "must be a finite number"),
        ("model=.nan", "model = nan: must be a group of settings"),
        ("training.optimizer.lr=.inf", "must be a finite number"),
        ("training.optimizer.betas=[0.1]", "training.optimizer.betas"),
        ("training.tokens=8", "training.tokens is less than train_length"),
        ("model.position.name=pattern", "model.position.layers must be given: kind of each layer"),
        (
            "model.position={name: pattern, layers: [a], kinds: {a: {name: rope, windw: 1}}}",
            "kinds.a.window?",
        ),
        (
            "model.position={name: pattern, layers: [a], kinds: {a: {name: rope, window: 0}}}",
            "at least 1",
        ),
        ("model.dim=[8", "model.dim=[8: not valid YAML"),
        ("--fast", "settings are written without dashes"),
        ("training.tokens", "settings are written training.tokens=VALUE"),
        ("a b=3", "neither a YAML file nor a setting"),
    ],
)
def test_errors_suggest_a_fix(word, expected):
    assert expected in complaint(word)


def test_errors_are_reported_together_with_lines(tmp_path):
    a, b = write(
        tmp_path,
        a="model:\n  dmi: 3\ntraining:\n  optimizer:\n    lr: -1\n",
        b="# comment\nmodel: {position: {name: alibbi}}\n",
    )
    text = complaint(a, b, "zzz=1", "training.interval=0", tmp_path / "none.yaml")
    assert text.count("\n") == 5
    assert "a.yaml:2: model.dmi" in text and "a.yaml:5: training.optimizer.lr = -1" in text
    assert "b.yaml:2: model.position.name = alibbi" in text
    assert (
        "zzz is not" in text
        and "training.interval = 0" in text
        and "none.yaml: no such file" in text
    )


def test_file_of_another_script_is_reported_once(tmp_path):
    study, mixed = write(
        tmp_path, study="base: [x]\ngrid: {a: {}}\nreport: 3\n", mixed="grid: 3\ntrain_length: 32\n"
    )
    text = complaint(study, "model.dmi=3")
    assert (
        f"{study}: none of its settings (base, grid, report) is known here, where they are train_"
        in text
    )
    assert text.count("\n") == 1 and "model.dim?" in text and "another script?" in text
    text = complaint(mixed)
    assert text.startswith(f"{mixed}:1: grid is not a setting") and "another script" not in text


def test_overridden_file_is_not_reported(tmp_path):
    (a,) = write(tmp_path, a="model: {position: {name: rope, window: 0}}\n")
    assert "a.yaml:1" in complaint(a)
    assert "a.yaml" not in complaint(a, "model.position={name: alibi, window: 0}")


@pytest.mark.parametrize(
    ("text", "value"),
    [("200M", 200_000_000), ("1.5B", 1_500_000_000), ("2e6", 2_000_000), ("12k", 12_000), ("3G", 3 * 10**9),
     ("1.1M", 1_100_000), ("4_000", 4000), ("0.3K", 300), ("2T", 2 * 10**12)],
)  # fmt: skip
def test_large_numbers(text, value):
    assert load_settings(Root, [f"training.tokens={text}"]).training.tokens == value


def test_invalid_large_numbers():
    assert "must be a whole number" in complaint("training.tokens=1.0005k")
    assert "must be a whole number" in complaint("training.tokens=12X")
    assert load_settings(Root, ["training.project='12M'"]).training.project == "12M"


def test_name_is_reserved_below_the_root():
    class Bad(S):
        name: str = "x"

    class Holder(S):
        name: str = "free at the root"
        bad: Bad = Field(Bad())

    class Fine(S):
        name: str = Field("x")
        other: int = Field(1)

    with pytest.raises(TypeError, match="reserved"):
        load_settings(Holder, [])
    assert load_settings(Fine, ["other=2", "name=y"]) == Fine(name="y", other=2)


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


def oracle(layers):
    """The reference: a store of leaves, where writing removes conflicting entries."""
    store = {}
    for tree in layers:
        for path, item in leaf_paths(tree) if tree else []:
            for length in range(1, len(path) + 1):
                above = tree
                for key in path[:length]:
                    above = above[key]
                # a fresh choice: older leaves below it go
                if isinstance(above, dict) and "name" in above:
                    store = {
                        p: v
                        for p, v in store.items()
                        if p[:length] != path[:length] or v[1] is tree
                    }
                store.pop(path[:length], None) if length < len(path) else None
            below = [p for p in store if p[: len(path)] == path and len(p) > len(path)]
            if item == {} and below:
                continue
            store = {p: v for p, v in store.items() if p not in below}
            store[path] = (item, tree)
    built = {}
    for path, (item, _) in store.items():
        place = built
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = item
    return built


@settings(max_examples=200)
@given(st.lists(layer, min_size=1, max_size=4))
def test_merge_equals_reference(layers):
    layers = [deepcopy(one) for one in layers]  # the oracle distinguishes layers by identity
    merged = {}
    for one in layers:
        before = repr(merged)
        result = merge(merged, one)
        assert repr(merged) == before  # nothing is changed in place
        merged = result
    assert merged == oracle(layers)


def test_dump_reloads_equal_and_identity_is_stable(tmp_path):
    kinds = "{a: {name: rope}, b: {name: alibi, window: 3}}"
    overrides = [
        f"model.position={{name: pattern, layers: [a, b], kinds: {kinds}}}",
        "training.project=on", "training.prompts=['1e-3', 'no', '']", "training.optimizer.lr=1e-7",
    ]  # fmt: skip
    s = load_settings(Root, overrides)
    file = tmp_path / "settings.yaml"
    file.write_text(dump(s))
    again = load_settings(Root, [str(file)])
    assert again == s and dump(again) == dump(s) and identity(again) == identity(s)


def test_identity_excludes_mutable_settings():
    s = Root()
    assert len(identity(s)) == 10 and int(identity(s), 16) >= 0
    assert identity(apply_overrides(s, ["training.interval=99"])) == identity(s)
    seen = {identity(s)}
    for word in (
        "train_length=3",
        "model.position.window=2",
        "model.tie_embeddings=false",
        "training.optimizer.lr=2e-3",
    ):
        seen.add(identity(apply_overrides(s, [word])))
    assert len(seen) == 5


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


def test_split_overrides():
    overrides = ["configs/a.yaml", "a.b=x=y", "runs/lr=3/settings.yaml", "c={d: 1}"]
    assert split_arguments(overrides) == (
        [overrides[0], overrides[2]],
        [overrides[1], overrides[3]],
    )


def test_every_alias_maps_to_a_setting_or_choice():
    known = {*leaves(schema_of(RunSettings)), *SCHEMES}
    assert set(ALIASES) <= known
    aliases = " ".join(ALIASES.values()).split()
    assert len(aliases) == len(set(aliases)) and not known & set(aliases)


@pytest.mark.parametrize(
    "old", [old for old in RENAMED if old.startswith(("training", "checkpoint"))]
)
def test_old_key_suggests_new_key(old):
    assert f"did you mean {RENAMED[old]}?" in complaint(
        f"training.{old.removeprefix('training.')}=3", cls=RunSettings
    )
