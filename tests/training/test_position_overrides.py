"""Which position overrides a trained checkpoint accepts: the specification's table, row by row."""

import pytest

from errors import ConfigError, TrainingError
from model import ModelError
from run_directory.position_overrides import meta_model, override, why, widens
from run_directory.run_settings import RunSettings
from settings.load import apply_overrides
from tests.files import table

L0 = 32
SHAPE = ["model.dim=24", "model.heads=2", "model.layers=3", f"train_length={L0}"]
SHAPE += ["training.validation.targets=8"]
PATTERN = [
    "model.pattern=[near, near, far]",
    "model.kinds={near: {position: {name: rope, window: 8}}, far: {position: {name: none}}}",
]
TABLE = table("training/position_overrides.yaml")


def methods(cells: list[str]) -> list[list[str]]:
    """The overrides of each method in the cells of a row."""
    listed = [method for cell in cells for method in TABLE["lists"].get(cell, [cell])]
    return [
        [f"model.position.{word}".replace(":", ": ") for word in method.split()]
        for method in listed
    ]


def legal(scheme: str) -> list[list[str]]:
    return methods(["all", *TABLE["schemes"][scheme]["legal"]])


def trained(*overrides: str) -> RunSettings:
    return apply_overrides(RunSettings(), [*SHAPE, *overrides])


@pytest.mark.parametrize("scheme", TABLE["schemes"])
def test_valid_overrides_keep_all_weights(scheme):
    root = trained(f"model.position.name={scheme}")
    shapes = {name: weight.shape for name, weight in meta_model(root).state_dict().items()}
    for method in legal(scheme):
        asked = override(root, method)
        assert asked != root, method
        assert asked.model.position.name == scheme, method
        state = meta_model(asked).state_dict()
        assert {name: weight.shape for name, weight in state.items()} == shapes, method


@pytest.mark.parametrize("scheme", TABLE["schemes"])
def test_invalid_overrides_name_valid_settings(scheme):
    root = trained(f"model.position.name={scheme}")
    valid = {word.split("=")[0] for method in legal(scheme) for word in method}
    for (word,) in methods([*TABLE["schemes"][scheme]["illegal"], "sink_logit=zero"]):
        with pytest.raises((ModelError, ConfigError)) as refused:
            override(root, [word])
        key = word.split("=")[0]
        head, listed = str(refused.value).split(f"legal for a checkpoint trained with '{scheme}': ")
        assert key in head
        assert "first" not in head
        assert {f"model.position.{name}" for name in listed.split(", ")} == valid
        reason = why(refused.value)
        assert "legal for" not in reason
        assert key.rpartition(".")[2] in reason


def test_computed_overrides_and_those_outside_the_scheme_or_its_sizes():
    root = trained("model.position.theta=300")
    assert override(root, ["model.position.theta={theta*8}"]).model.position.theta == 2400
    for word, message in (
        ("training.optimizer.lr=1.0", "training.optimizer.lr cannot be changed"),
        ("model.position.scaling={name: longrope, long_factor: [1, 2, 3]}", "6 numbers.*got 3"),
        ("model.position.remap={name: dual_chunk, chunk: 4}", "remap.chunk 4"),
        ("model.position.window={offset*2}", "offset does not exist for 'rope'"),
        ("model.position.window={window*2}", "window is not a number in training for 'rope'"),
    ):
        with pytest.raises((ModelError, ConfigError, TrainingError), match=message):
            override(trained(), [word])


def schemes(settings: RunSettings) -> dict:
    return {name: kind.position for name, kind in settings.model.resolved_kinds.items()}


def test_pattern_applies_override_to_every_supporting_kind():
    root = trained(*PATTERN)
    far = schemes(root)["far"]

    def changed(*words):
        return schemes(override(root, [f"model.position.{word}" for word in words]))

    scaled = changed("scaling.name=yarn")
    assert scaled["near"].scaling.name == "yarn"
    assert scaled["far"] == far
    warmer = changed("temperature={name: log_n}")
    assert warmer["near"].temperature.name == warmer["far"].temperature.name == "log_n"
    assert warmer["near"].window == 8
    # All of a method or none of it: no rotation, no window for a remap either.
    remapped = changed("window=7", "sinks=3", "remap={name: lambda}")
    assert (remapped["near"].window, remapped["near"].remap.name) == (7, "lambda")
    assert remapped["far"] == far
    # One kind by its name, beside a method for all.
    both = ["model.position.window=4", "model.kinds.far.position.window=20"]
    windows = {name: scheme.window for name, scheme in schemes(override(root, both)).items()}
    assert windows == {"near": 4, "far": 20}


def test_pattern_keeps_narrower_windows_by_default():
    root = trained(*PATTERN)
    same = override(root, ["model.position.window=16"])
    assert [scheme.window for scheme in schemes(same).values()] == [8, 16]
    assert not widens(root, same)
    for window in ("16", "null"):
        assert widens(root, override(root, [f"model.kinds.near.position.window={window}"]))
    narrow = apply_overrides(root, ["model.kinds.far.position.window=8"])
    with pytest.raises(ModelError, match=r"(?s)no layer kind .*near: its window of 8 is narrower"):
        override(narrow, ["model.position.window=16"])


@pytest.mark.parametrize(
    ("word", "message"),
    TABLE["pattern"],
)
def test_pattern_errors_name_valid_overrides_per_kind(word, message):
    with pytest.raises((ModelError, ConfigError), match=message) as refused:
        override(trained(*PATTERN), [f"model.{word}"])
    text = str(refused.value)
    for kind in ("'near' trained with 'rope': remap, ", "'far' trained with 'none': sinks, "):
        assert text.count(f"legal for layers of kind {kind}") == 1
