"""Every built-in method changes the loss of a run that supports it, equally with and without a
cache."""

import pytest
import torch

from errors import EvaluationError
from evaluation.methods import builtin_methods, compatible_methods, resolve_methods
from model import SCHEMES, ModelError, TokenPositions, Transformer
from run_directory.position_overrides import override
from run_directory.run_settings import RunSettings
from settings.load import ConfigError, apply_overrides
from tests.model.zoo import close

BUILTIN = builtin_methods()
L0 = 32
V = 23
SHAPE = ["model.dim=24", "model.heads=2", "model.layers=2", f"train_length={L0}"]
SHAPE += ["training.validation.targets=8"]
SAME = {"trained", "truncate"}  # no overrides of the model


def host_of(label):
    """(settings as trained, settings under the method) of the first scheme that can take a built-in
    method."""
    method = resolve_methods([label], L0)[-1]
    for scheme in ("rope", *SCHEMES):
        slow = ["model.position.theta=100.0"] if scheme == "rope" else []
        try:
            root = apply_overrides(RunSettings(), [*SHAPE, f"model.position.name={scheme}", *slow])
            return root, override(root, method.overrides)
        except (ModelError, ConfigError):
            continue
    raise AssertionError(f"no scheme can take {label}")


@pytest.mark.parametrize("label", BUILTIN)
@torch.no_grad()
def test_builtin_methods_change_long_inputs_and_match_with_cache(label):
    root, asked = host_of(label)
    trained = Transformer(root.model, V, L0).initialize(0).double().eval()
    ruled = Transformer(asked.model, V, L0).double().eval()
    ruled.load_state_dict(trained.state_dict())
    text = torch.arange(4 * L0)[None] % V
    length = 4 * L0
    whole = ruled(text, TokenPositions.plain(length))
    if trained.limit is None:
        apart = (whole - trained(text, TokenPositions.plain(length))).abs()[0].amax(-1)
        assert (apart.max() > 1e-6) == (label not in SAME)
        if {"remap", "window"} & {word.split("=")[0].split(".")[-1] for word in BUILTIN[label]}:
            assert apart[: L0 // 2].max() < 1e-10  # they leave short distances as they were trained
    else:
        with pytest.raises(ModelError, match=f"shorten the input to {trained.limit} tokens"):
            trained(text, TokenPositions.plain(length))
    # The declared length decides, not what is there so far.
    cache = ruled.make_cache(1, length)
    ruled(text[:, :-3], TokenPositions.plain(length - 3, length=length), cache=cache)
    rest = TokenPositions.plain(3, offset=length - 3, length=length)
    close(ruled(text[:, -3:], rest, cache=cache), whole[:, -3:])


def test_applicable_methods_are_identified(monkeypatch):
    def offered(*words):
        root = apply_overrides(RunSettings(), [*SHAPE, *words])

        def positions(overrides):
            return override(root, overrides).model.position.model_dump(mode="json")

        accepted, left_out = compatible_methods(L0, positions)
        return [method.label for method in accepted], left_out

    labels, left_out = offered("model.position.name=learned")
    assert labels[:2] == ["trained", "truncate"]
    assert not set(labels) & set(left_out)
    assert {"extend_interpolate", "extend_repeat", "extend_clip", "window", "log_n"} < set(labels)
    assert set(labels) | set(left_out) == set(BUILTIN)
    assert {"yarn", "rerope", "stretch", "theta_x8"} < set(left_out)
    assert left_out["theta_x8"].startswith("model.position.theta: ")
    # As trained, and the same as another, are no methods of their own.
    labels, left_out = offered("model.position.scaling={name: yarn, factor: auto}")
    assert "trained" in left_out["yarn"]
    assert "ntk" in labels
    twice = {"trained": [], "a": ["model.position.window=8"], "b": ["model.position.window=8"]}
    monkeypatch.setattr("evaluation.methods.builtin_methods", lambda: twice)
    assert offered() == (["trained", "a"], {"b": "the same as a here"})


@pytest.mark.parametrize("label", ["trained", "as trained", "truncate"])
def test_labels_of_the_baselines_are_refused_for_other_methods(label):
    with pytest.raises(EvaluationError, match=label):
        resolve_methods({label: ["model.position.window=8"]}, L0)
