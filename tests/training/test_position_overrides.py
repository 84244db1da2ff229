"""Which position overrides a trained checkpoint accepts: the specification's table, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from errors import TrainingError
from model import SCHEMES, ModelError, Transformer
from run_directory.position_overrides import longest_input, override, why, widens
from run_directory.run_settings import RunSettings
from settings.load import ConfigError, apply_overrides

L0 = 32
SHAPE = ["model.dim=24", "model.heads=2", "model.layers=3", f"train_length={L0}"]
SHAPE += ["training.validation.targets=8"]
PATTERN = [
    "model.pattern=[near, near, far]",
    "model.kinds={near: {position: {name: rope, window: 8}}, far: {position: {name: none}}}",
]

ALL = [
    ["window=16"],
    ["window=12", "sinks=4"],
    ["temperature={name: fixed, value: 1.2}"],
    ["temperature={name: log_n}"],
    ["temperature={name: stretch}"],
]
ROTARY = [
    ["scaling={name: linear, factor: 4}"],
    ["scaling={name: ntk, factor: auto}"],
    ["scaling={name: dynamic}"],
    ["scaling={name: by_parts, factor: auto}"],
    ["scaling={name: yarn, factor: auto}"],
    ["scaling={name: llama3, factor: 8}"],
    ["scaling={name: longrope, long_factor: [1, 2, 3, 4, 5, 6]}"],
    ["scaling={name: drop}"],
    ["resonance=true"],
    ["remap={name: rerope}"],
    ["remap={name: leaky_rerope}"],
    ["remap={name: self_extend}"],
    ["remap={name: dual_chunk}"],
    ["window=22", "sinks=10", "remap={name: lambda}"],
    ["window=28", "sinks=4", "remap={name: streaming}"],
]
NO_ROTATION = ["scaling={name: yarn}", "remap={name: rerope}", "resonance=true"]
# Scheme: (legal beside what is legal for all, illegal).
ROWS: dict[str, tuple[list[list[str]], list[str]]] = {
    "rope": ([*ROTARY, ["theta=500000"]], ["layout=interleaved", "fraction=0.5", "stretch=auto"]),
    "p_rope": (ROTARY, ["share=0.5", "reversed=true", "max_wavelength=1", "theta=500000"]),
    "he_xu": ([*ROTARY, ["theta=500000"]], ["max_length=64", "layout=interleaved"]),
    "sinusoidal": (
        [["stretch=auto"], ["stretch=4"], ["theta=500000"], ["offset=3"]],
        ["layout=half", "scale_tokens=true", *NO_ROTATION],
    ),
    "learned": (
        [["extend=interpolate"], ["extend=repeat"], ["extend=clip"]],
        ["max_length=64", "stretch=auto", "theta=500000", *NO_ROTATION],
    ),
    "alibi": (
        [["stretch=auto"], ["stretch=4"], ["slopes=[0.5, 0.125]"]],
        ["theta=500000", *NO_ROTATION],
    ),
    "kerple": ([["stretch=auto"]], ["form=power", *NO_ROTATION]),
    "sandwich": ([["stretch=auto"]], ["dims=64", *NO_ROTATION]),
    "t5": ([["max_distance=512"]], ["buckets=64", *NO_ROTATION]),
    "fire": ([["threshold=64"]], ["width=16", *NO_ROTATION]),
    "none": ([], ["stretch=auto", "theta=500000", *NO_ROTATION]),
}


def trained(*overrides: str) -> RunSettings:
    return apply_overrides(RunSettings(), [*SHAPE, *overrides])


def of(scheme: str, overrides: list[str]) -> list[str]:
    return [f"model.position.{word}" for word in overrides]


LEGAL = [(scheme, overrides) for scheme, (own, _) in ROWS.items() for overrides in [*ALL, *own]]
ILLEGAL = [
    (scheme, word)
    for scheme, (_, overrides) in ROWS.items()
    for word in [*overrides, "sink_logit=zero"]
]


@pytest.mark.parametrize(("scheme", "overrides"), LEGAL)
def test_valid_overrides_keep_all_weights(scheme, overrides):
    root = trained(f"model.position.name={scheme}")
    asked = override(root, of(scheme, overrides))
    assert asked != root and asked.model.position.name == scheme
    with torch.device("meta"):
        shapes = [
            {key: value.shape for key, value in Transformer(one.model, 9, L0).state_dict().items()}
            for one in (root, asked)
        ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("scheme", "word"), ILLEGAL)
def test_invalid_overrides_name_valid_settings(scheme, word):
    root = trained(f"model.position.name={scheme}")
    with pytest.raises((ModelError, ConfigError)) as refused:
        override(root, of(scheme, [word]))
    message = str(refused.value)
    key = word.split("=")[0]
    head, legal = message.split(f"legal for a checkpoint trained with '{scheme}': ")
    assert f"model.position.{key}" in head and "first" not in head
    expected = {w.split("=")[0] for overrides in [*ALL, *ROWS[scheme][0]] for w in overrides}
    assert set(legal.split(", ")) == expected
    assert "legal for" not in why(refused.value) and key in why(refused.value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scheme_name_cannot_be_overridden(scheme):
    settings = SCHEMES[scheme][0]
    assert settings.test_time <= set(settings.model_fields) - {"name", "sink_logit"}
    assert {"window", "sinks", "temperature"} <= settings.test_time
    other = "alibi" if scheme != "alibi" else "rope"
    root = trained(f"model.position.name={scheme}")
    for word in (f"model.position.name={other}", f"model.position={{name: {other}}}"):
        with pytest.raises(
            ModelError, match=f"trained with '{scheme}', cannot become '{other}'; legal for"
        ):
            override(root, [word])


@pytest.mark.parametrize("word", ["temperature={name: ssmax}", "temperature={name: head}"])
def test_learned_temperature_cannot_be_overridden(word):
    with pytest.raises(ModelError, match=r"temperature.*is learned.* legal for a checkpoint"):
        override(trained(), of("rope", [word]))
    with pytest.raises(ModelError, match="is learned"):
        override(trained(*of("rope", [word])), ["model.position.temperature={name: none}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scaling={name: longrope, long_factor: [1, 2, 3]}"], "6 numbers.*got 3"),
        (
            ["remap={name: self_extend, neighbors: 12, group: 8}"],
            "12 must be a multiple of remap.group 8",
        ),
        (["remap={name: self_extend, group: 64}"], "remap.group 64"),
        (["remap={name: dual_chunk, chunk: 4}"], "remap.chunk 4"),
        (["scaling={name: yarm}"], "yarn"),
        (["window=0"], "at least 1"),
    ],
)
def test_invalid_sizes_are_rejected_before_loading_weights(overrides, message):
    with pytest.raises((ModelError, ConfigError), match=message):
        override(trained(), of("rope", overrides))


def test_only_positions_may_change():
    with pytest.raises(ModelError, match=r"model.dim is part of the trained weights.*legal for"):
        override(trained(), ["model.dim=48"])
    with pytest.raises(TrainingError, match=r"training.optimizer.lr cannot be changed"):
        override(trained(), ["training.optimizer.lr=1.0"])


def test_override_may_multiply_trained_value():
    root = trained("model.position.theta=300")
    assert override(root, ["model.position.theta={theta*8}"]).model.position.theta == 2400
    with pytest.raises(
        ModelError, match=r"model.position.window: offset does not exist for 'rope'"
    ):
        override(root, ["model.position.window={offset*2}"])
    with pytest.raises(ModelError, match="window is not a number in training for 'rope'"):
        override(root, ["model.position.window={window*2}"])


def test_position_limits():
    root = trained("model.position.name=learned")
    assert longest_input(root) == L0
    assert longest_input(override(root, ["model.position.extend=clip"])) is None
    assert longest_input(trained()) is None


def schemes(settings: RunSettings) -> dict[str, Any]:
    return {name: kind.position for name, kind in settings.model.resolved_kinds.items()}


def test_pattern_applies_override_to_every_supporting_layer_type():
    root = trained(*PATTERN)
    far = schemes(root)["far"]
    changed = schemes(override(root, ["model.position.scaling.name=yarn"]))
    assert changed["near"].scaling.name == "yarn" and changed["far"] == far
    changed = schemes(override(root, ["model.position.temperature={name: log_n}"]))
    assert changed["near"].temperature.name == changed["far"].temperature.name == "log_n"
    assert changed["near"].window == 8
    # All of a rule or none of it: no rotation, no window for a remap either.
    changed = schemes(
        override(root, of("pattern", ["window=7", "sinks=3", "remap={name: lambda}"]))
    )
    assert (changed["near"].window, changed["near"].remap.name) == (7, "lambda")
    assert changed["far"] == far
    # One kind by its name, beside a rule for all.
    both = ["model.position.window=4", "model.kinds.far.position.window=20"]
    changed = schemes(override(root, both))
    assert (changed["near"].window, changed["far"].window) == (4, 20)


def test_pattern_keeps_narrower_windows_by_default():
    root = trained(*PATTERN)
    kinds = schemes(override(root, ["model.position.window=16"]))
    assert (kinds["near"].window, kinds["far"].window) == (8, 16)
    wide = override(root, ["model.kinds.near.position.window=16"])
    assert schemes(wide)["near"].window == 16 and widens(root, wide)
    assert widens(root, override(root, ["model.kinds.near.position.window=null"]))
    assert not widens(root, override(root, ["model.position.window=16"]))
    narrow = apply_overrides(root, ["model.kinds.far.position.window=8"])
    with pytest.raises(ModelError, match=r"(?s)no layer kind .*near: its window of 8 is narrower"):
        override(narrow, ["model.position.window=16"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.kinds.far.position.scaling.name=yarn"], "model.kinds.far.position.scaling"),
        (
            ["model.kinds.near.position.layout=interleaved"],
            "model.kinds.near.position.layout cannot be",
        ),
        (
            ["model.kinds.far.position.name=alibi"],
            "kinds.far.position.name: trained with 'none', cannot become",
        ),
        (["model.pattern=[near, far]"], "model.pattern is part of the trained weights"),
        (["model.kinds.far.gate=head"], "model.kinds.far: only its position"),
        (["model.position.kinds.near.window=4"], "model.kinds.KIND.position"),
        (["model.position.stretch=auto"], r"no layer kind supports it\n +near: .*\n +far: .*"),
        (
            ["model.position.layout=interleaved"],
            r"near: .*layout cannot be changed after training\n",
        ),
    ],
)
def test_pattern_errors_name_valid_overrides_per_layer_type(overrides, message):
    with pytest.raises((ModelError, ConfigError), match=message) as refused:
        override(trained(*PATTERN), overrides)
    text = str(refused.value)
    assert (
        text.count("legal for layers of kind 'near' trained with 'rope': remap, resonance, ") == 1
    )
    assert (
        text.count("legal for layers of kind 'far' trained with 'none': sinks, temperature, window")
        == 1
    )
