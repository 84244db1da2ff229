"""Checkpoints: exact, atomic under kill and full disk, verified by hash with fallback, pruned."""

import json
import math
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from errors import TrainingError
from run_directory import checkpoints as module
from run_directory.checkpoints import (
    clean_leftovers,
    find_checkpoint,
    find_damage,
    folder_of,
    prune,
    save_weights,
    steps_of,
)
from run_directory.training_settings import AdamWSettings, CheckpointSettings, MuonSettings
from run_directory.weights import load_weights, weights_of
from tests.processes import ScriptProcess
from tests.training.net import Net, save, state_of, trained, update
from tests.training.tiny import FILES, same


def bits(state):
    """All tensors of a state, as bytes."""
    return {
        (kind, name): tensor.detach().clone().reshape(-1).view(torch.uint8)
        for kind, tensors in state.capture().items()
        for name, tensor in tensors.items()
    }


def assert_same(a, b):
    assert same(bits(a), bits(b))


@pytest.mark.parametrize("optimizer", [AdamWSettings(), MuonSettings()], ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_resume_is_bit_exact(tmp_path, dtype, optimizer):
    straight = trained(3, dtype=dtype, settings=optimizer)
    saved = save(tmp_path, 3, straight, {"tokens": 45})
    expected = [update(straight) for _ in range(4)]
    # other weights, moments, step and generator
    resumed = trained(1, seed=99, dtype=dtype, settings=optimizer)
    newest = find_checkpoint(tmp_path)
    assert newest == saved
    assert newest.state == {"tokens": 45}
    resumed.restore(newest)
    assert resumed.step == 3
    assert [update(resumed) for _ in range(4)] == expected
    assert_same(straight, resumed)


def test_moments_are_restored_under_other_options(tmp_path):
    state = trained(2)
    saved = save(tmp_path, 2, state)
    settings = AdamWSettings(positions_lr=0.5, weight_decay=0.2, betas=(0.5, 0.6))
    changed = trained(0, seed=1, settings=settings)
    changed.restore(saved)
    assert_same(state, changed)
    options = {group["name"]: group["weight_decay"] for group in changed.optimizer.groups}
    assert options == {"matrices": 0.2, "embeddings": 0, "vectors": 0, "positions": 0}
    assert all(group["betas"] == (0.5, 0.6) for group in changed.optimizer.groups)


def test_names_have_no_wrappers_and_tied_weights_are_stored_once(tmp_path):
    state = trained(1)
    names = ["embed.weight", "position.weight", "mix.weight", "mix.bias", "norm.weight"]
    wrapped = nn.Module()
    wrapped.module = nn.Module()  # of DDP and of torch.compile
    wrapped.module._orig_mod = state.model
    assert list(weights_of(state.model)) == list(weights_of(wrapped)) == names
    saved = save(tmp_path, 1, state_of(wrapped, state.optimizer))
    assert set(load_file(saved.folder / "model.safetensors")) == set(names)
    moments = load_file(saved.folder / "optimizer.safetensors")
    assert {"exp_avg/mix.weight", "exp_avg_sq/embed.weight", "generator/cpu"} <= moments.keys()
    fresh = trained(0, seed=8)
    fresh.restore(saved)
    assert_same(state, fresh)
    assert fresh.model.head.weight is fresh.model.embed.weight


def test_weights_that_do_not_fit_or_are_alone_are_refused(tmp_path):
    checkpoint = save_weights(tmp_path, 0, Net(tie_embeddings=False))
    with pytest.raises(TrainingError, match="only weights"):
        trained(0).restore(checkpoint)
    lean = Net(tie_embeddings=False)
    del lean.mix
    richer = Net(tie_embeddings=False)
    richer.extra = nn.Linear(2, 3)
    before = richer.mix.weight.clone()
    for model, message in (
        (Net(dim=8), r"embed.weight has shape \(11, 6\), in the model \(11, 8\)"),
        (lean, "mix.weight is unknown to the model"),
        (richer, "extra.weight is missing"),
    ):
        with pytest.raises(TrainingError, match=message):
            load_weights(model, checkpoint.folder)
    assert torch.equal(richer.mix.weight, before)  # refused before anything was copied


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


HARMS = {
    "flip": lambda file: flip(file, file.stat().st_size // 2),
    "truncate": lambda file: os.truncate(file, file.stat().st_size - 9),
    "empty": lambda file: os.truncate(file, 0),
    "remove": lambda file: file.unlink(),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", HARMS)
def test_corruption_is_detected_and_previous_checkpoint_used(tmp_path, name, harm):
    state = trained(1)
    save(tmp_path, 3, state, {"n": 3})
    save(tmp_path, 5, state, {"n": 5})
    HARMS[harm](folder_of(tmp_path, 5) / name)
    lines = []
    assert find_checkpoint(tmp_path, warn=lines.append).state == {"n": 3}
    (line,) = lines
    assert "step-00000005" in line
    assert name in line
    assert line.endswith("going back to step 3")
    for step in (None, 5):
        with pytest.raises(TrainingError, match=rf"{name}.* step 3, which is intact"):
            find_checkpoint(tmp_path, step)


def test_manifest_corruption_is_detected_at_every_byte(tmp_path):
    saved = save(tmp_path, 3, trained(1))
    file = saved.folder / "manifest.json"
    content = file.read_bytes()
    changed = 0
    for place in random.Random(0).sample(range(len(content)), 100):
        flip(file, place)
        try:
            is_same = json.loads(file.read_bytes()) == json.loads(content)
        except ValueError:
            is_same = False
        changed += not is_same
        assert (find_damage(saved.folder) is None) == is_same
        file.write_bytes(content)
    assert changed > 50
    assert find_damage(saved.folder) is None


def test_missing_and_renamed_checkpoints(tmp_path):
    assert find_checkpoint(tmp_path) is None
    saved = save(tmp_path, 3, trained(1))
    with pytest.raises(TrainingError, match="no checkpoint of step 4; it has 3"):
        find_checkpoint(tmp_path, step=4)
    shutil.copytree(saved.folder, folder_of(tmp_path, 8))
    assert find_damage(folder_of(tmp_path, 8)) == "manifest.json belongs to step 3"
    shutil.rmtree(folder_of(tmp_path, 8))
    (saved.folder / "model.safetensors").unlink()
    message = r"model.safetensors is missing; no checkpoint of the run is intact"
    with pytest.raises(TrainingError, match=message):
        find_checkpoint(tmp_path, warn=print)


@pytest.fixture(scope="module")
def deaths(tmp_path_factory) -> dict[str, str]:
    """The cases of deaths.py, in one process where forking and dying disturb nobody."""
    folder = tmp_path_factory.mktemp("deaths")
    streams = (folder / "out", folder / "err")
    process = ScriptProcess("tests/training/deaths.py", [str(folder)], folder, *streams)
    assert process.wait(400) == 0, streams[1].read_text()
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", ["writes_that_fail", "killed_at_every_write"])
def test_interrupted_writes_leave_complete_checkpoints(deaths, case):
    assert deaths[case] == ""


def test_leftovers_of_interrupted_writes_are_removed(tmp_path):
    good = save(tmp_path, 3, trained(1))
    draft = good.folder.with_name(".writing-step-00000004")
    draft.mkdir()
    assert find_checkpoint(tmp_path).hash == good.hash
    assert draft.exists()  # reading changes nothing: a training under way may be writing it
    clean_leftovers(tmp_path)
    assert find_checkpoint(tmp_path).hash == good.hash
    assert not draft.exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, 2e29])
def test_unusable_numbers_are_rejected(tmp_path, value):
    """... in weights; moments must be finite only."""
    state = trained(1)
    moments = state.optimizer.saved_tensors()["exp_avg_sq/mix.bias"]
    moments[0] = 1e30
    save(tmp_path, 3, state)
    moments[0] = math.inf
    with pytest.raises(TrainingError, match=r"exp_avg_sq/mix.bias is not finite"):
        save(tmp_path, 4, state)
    moments[0] = 0.0
    with torch.no_grad():
        state.model.mix.bias[2] = value
    with pytest.raises(
        TrainingError, match=r"step 5 is not saved, because mix.bias .*; step 3 is intact"
    ):
        save(tmp_path, 5, state)
    assert steps_of(tmp_path) == [3]


def test_concurrent_replacement_is_retried(tmp_path, monkeypatch):
    state = trained(1)
    real = module.sha256_of
    save(tmp_path, 3, state)
    left = [4, 5, 6]

    def replacing(content):
        is_state = isinstance(content, Path) and content.name == "state.json"
        if left and is_state and "step-" in content.parent.name:
            step = left.pop(0)
            save(tmp_path, step, state)
            module.remove_checkpoint(folder_of(tmp_path, step - 1))
        return real(content)

    monkeypatch.setattr(module, "sha256_of", replacing)
    assert find_checkpoint(tmp_path).step == 6


# Which are kept


@pytest.mark.parametrize(
    ("settings", "saved", "kept"),
    [
        ({"keep": 2}, [10, 20, 30, 25], [20, 25]),  # resumed from 20: 30 was damaged
        ({"keep": 1, "keep_interval": 20}, [10, 20, 30, 40, 50], [20, 40, 50]),
        (None, [10, 20, 30, 25], [10, 20, 25]),
    ],
)
def test_kept_checkpoints(tmp_path, settings, saved, kept):
    policy = settings and CheckpointSettings(interval=10, **settings)
    for step in saved:
        save_weights(tmp_path, step, Net())
        prune(tmp_path, step, policy)
    assert steps_of(tmp_path) == kept
