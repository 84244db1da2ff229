"""Checkpoints: exact, atomic under kill and full disk, verified by hash with fallback."""

import errno
import json
import math
import os
import random

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from data.files import sha256_of
from errors import TrainingError
from run_directory import checkpoints as module
from run_directory.checkpoints import clean_leftovers, damage, find_checkpoint, folder_of, steps_of
from run_directory.optimizer_settings import AdamWSettings, MuonSettings
from run_directory.weights import load_weights, save_weights
from tests.processes import ScriptProcess
from tests.training.checkpoint.deaths import RecordingConsole, trained, update
from tests.training.net import Net
from tests.training.states import restore, save_checkpoint
from training.train_state import weights_of


def bits(tensor):
    return (
        tensor.detach().contiguous().view(torch.uint8)
        if tensor.ndim
        else tensor.detach()[None].view(torch.uint8)
    )


def assert_same(a, b):
    """Two (net, optimizer) pairs hold the same bits."""
    for one, other in zip(a[0].parameters(), b[0].parameters(), strict=True):
        assert torch.equal(bits(one), bits(other))
    one = a[1].state_dict()
    other = b[1].state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys() != set()
    for i, entries in one["state"].items():
        assert entries.keys() == other["state"][i].keys()
        for key, value in entries.items():
            assert torch.equal(bits(value), bits(other["state"][i][key])), (i, key)


@pytest.mark.parametrize(
    "optimizer", [AdamWSettings(), MuonSettings()], ids=lambda settings: settings.name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_resume_is_bit_exact(tmp_path, dtype, optimizer):
    straight = trained(3, dtype=dtype, settings=optimizer)
    saved = save_checkpoint(tmp_path, 3, *straight, {"tokens": 45, "attempt": 1})
    expected = [update(*straight) for _ in range(4)]
    resumed = trained(
        1, seed=99, dtype=dtype, settings=optimizer
    )  # other weights, moments, step and generator
    found = find_checkpoint(tmp_path)
    assert (found.step, found.hash, found.folder) == (3, saved.hash, saved.folder)
    assert restore(*resumed, found) == {"tokens": 45, "attempt": 1}
    assert [update(*resumed) for _ in range(4)] == expected
    assert_same(straight, resumed)


def test_names_have_no_wrappers_and_tied_weights_are_stored_once(tmp_path):
    net, optimizer = trained(1)
    plain = weights_of(net)
    assert list(plain) == [
        "embed.weight",
        "position.weight",
        "mix.weight",
        "mix.bias",
        "norm.weight",
    ]
    wrapped = nn.Module()
    wrapped.module = torch.compile(net)
    assert list(weights_of(wrapped)) == list(plain)
    saved = save_checkpoint(tmp_path, 1, wrapped, optimizer)
    assert set(load_file(saved.folder / "model.safetensors")) == set(plain)
    moments = load_file(saved.folder / "optimizer.safetensors")
    assert "exp_avg/mix.weight" in moments and "exp_avg_sq/embed.weight" in moments
    fresh = trained(0, seed=8)
    restore(*fresh, saved)
    assert_same((net, optimizer), fresh)
    assert fresh[0].head.weight is fresh[0].embed.weight


def test_weight_mismatch_names_parameters(tmp_path):
    saved = save_weights(tmp_path, 0, Net(tie_embeddings=False))
    for other, word in ((Net(dim=8), "shape"), (Net(tie_embeddings=True), "head.weight")):
        if word == "shape":
            with pytest.raises(
                TrainingError, match=r"embed.weight has shape \(11, 6\), the model's \(11, 8\)"
            ):
                load_weights(other, saved)
    lean = Net(tie_embeddings=False)
    del lean.mix
    with pytest.raises(TrainingError, match=r"mix.weight is unknown to the model"):
        load_weights(lean, saved)
    richer = Net(tie_embeddings=False)
    richer.extra = nn.Linear(2, 3)
    before = richer.mix.weight.clone()
    with pytest.raises(TrainingError, match=r"extra.weight is missing"):
        load_weights(richer, saved)
    assert torch.equal(richer.mix.weight, before)  # refused before anything was copied


def test_resume_rejects_weights_only(tmp_path):
    saved = save_weights(tmp_path, 0, Net(), state={"source": "import"})
    assert saved.step == 0 and saved.state == {"source": "import"}
    with pytest.raises(TrainingError, match="only weights"):
        restore(*trained(0), saved)


def test_resume_rejects_other_parameter_groups(tmp_path):
    net, optimizer = trained(1)
    saved = save_checkpoint(tmp_path, 1, net, optimizer)
    with pytest.raises(TrainingError, match="groups"):
        restore(net, torch.optim.AdamW(net.parameters()), saved)


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "empty"])
def test_corruption_is_detected_and_previous_checkpoint_used(tmp_path, name, harm):
    pair = trained(1)
    save_checkpoint(tmp_path, 3, *pair, {"n": 3})
    save_checkpoint(tmp_path, 5, *pair, {"n": 5})
    file = folder_of(tmp_path, 5) / name
    size = file.stat().st_size
    if harm == "flip":
        flip(file, size // 2)
    elif harm == "truncate":
        os.truncate(file, size - 9)
    elif harm == "empty":
        os.truncate(file, 0)
    else:
        file.unlink()
    console = RecordingConsole()
    found = find_checkpoint(tmp_path, console)
    assert found.step == 3 and found.state == {"n": 3}
    assert (
        len(console.lines) == 1 and "step-00000005" in console.lines[0] and name in console.lines[0]
    )
    assert console.lines[0].endswith("going back to step 3")
    with pytest.raises(TrainingError, match=name):
        find_checkpoint(tmp_path, console, step=5)


def test_manifest_corruption_is_detected_at_every_byte(tmp_path):
    saved = save_checkpoint(tmp_path, 3, *trained(1))
    file = saved.folder / "manifest.json"
    content = file.read_bytes()
    meaning = json.loads(content)
    seen = 0
    for place in random.Random(0).sample(range(len(content)), 100):
        flip(file, place)
        try:
            same = json.loads(file.read_bytes()) == meaning
        except ValueError:
            same = False
        seen += not same
        assert (damage(saved.folder) is None) == same
        file.write_bytes(content)
    assert seen > 50 and damage(saved.folder) is None


def test_renamed_checkpoint_is_rejected(tmp_path):
    saved = save_checkpoint(tmp_path, 3, *trained(1))
    os.rename(saved.folder, folder_of(tmp_path, 8))
    assert damage(folder_of(tmp_path, 8)) == "manifest.json is that of step 3"


def test_no_valid_checkpoint_and_no_checkpoint(tmp_path):
    assert find_checkpoint(tmp_path) is None
    saved = save_checkpoint(tmp_path, 3, *trained(1))
    (saved.folder / "model.safetensors").unlink()
    with pytest.raises(
        TrainingError, match=r"no good checkpoint is left.*model.safetensors is missing"
    ):
        find_checkpoint(tmp_path, RecordingConsole())
    with pytest.raises(TrainingError, match="no checkpoint of step 4; it has 3"):
        find_checkpoint(tmp_path, step=4)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("as_safetensors", [True, False])
def test_full_disk_keeps_previous_checkpoint(tmp_path, monkeypatch, call, as_safetensors):
    pair = trained(1)
    good = save_checkpoint(tmp_path, 3, *pair)
    calls = []
    real = module.save_file

    def full(tensors, file, *rest):
        calls.append(file)
        if len(calls) == call:
            file.write_bytes(b"half")
            if as_safetensors:
                raise SafetensorError("I/O error: No space left on device (os error 28)")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        real(tensors, file, *rest)

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(TrainingError, match=r"disk full .* while saving step 5; step 3 is intact"):
        save_checkpoint(tmp_path, 5, *pair)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert find_checkpoint(tmp_path).hash == good.hash


@pytest.fixture(scope="module")
def deaths(tmp_path_factory) -> dict[str, str]:
    """The cases of deaths.py, in one process where forking and dying disturb nobody."""
    folder = tmp_path_factory.mktemp("deaths")
    words = [
        "tests/training/checkpoint/deaths.py",
        [str(folder)],
        folder,
        folder / "out",
        folder / "err",
    ]
    assert ScriptProcess(*words).wait(400) == 0, (folder / "err").read_text()
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", ["writes_that_fail", "killed_at_every_write"])
def test_interrupted_writes_leave_complete_checkpoints(deaths, case):
    assert deaths[case] == ""


def test_kill_during_replacement_restores_old_checkpoint(tmp_path):
    pair = trained(1)
    good = save_checkpoint(tmp_path, 3, *pair)
    os.rename(good.folder, good.folder.with_name(f".replaced-{good.folder.name}"))
    assert find_checkpoint(tmp_path) is None
    clean_leftovers(tmp_path)
    assert find_checkpoint(tmp_path).hash == good.hash


def test_reading_modifies_nothing(tmp_path):
    save_checkpoint(tmp_path, 3, *trained(1))
    other = tmp_path / "checkpoints" / ".writing-step-00000004-1"
    other.mkdir()
    find_checkpoint(tmp_path)
    assert other.exists()  # perhaps a training under way is writing it


@pytest.mark.parametrize("value", [math.nan, math.inf, 2e29])
def test_non_finite_weights_are_rejected(tmp_path, monkeypatch, value):
    pair = trained(1)
    good = save_checkpoint(tmp_path, 3, *pair)
    with torch.no_grad():
        pair[0].mix.bias[2] = value
    with pytest.raises(TrainingError, match=r"step 5 is not saved, mix.bias .*; step 3 is intact"):
        save_checkpoint(tmp_path, 5, *pair)
    assert steps_of(tmp_path) == [3]
    monkeypatch.setattr(module, "flaw", lambda tensor, kind: None)  # saved by an earlier version
    save_checkpoint(tmp_path, 5, *pair)
    console = RecordingConsole()
    assert find_checkpoint(tmp_path, console).hash == good.hash
    assert "step-00000005: model.safetensors: mix.bias" in console.lines[0]
    with pytest.raises(TrainingError, match=r"mix\.bias"):
        find_checkpoint(tmp_path, step=5, only=("model.safetensors",))


def test_optimizer_moments_must_be_finite(tmp_path):
    net, optimizer = trained(1)
    moments = optimizer.state[net.mix.bias]["exp_avg_sq"]
    moments[0] = 1e30
    save_checkpoint(tmp_path, 1, net, optimizer)
    moments[0] = math.inf
    with pytest.raises(TrainingError, match=r"exp_avg_sq/mix.bias is not finite"):
        save_checkpoint(tmp_path, 2, net, optimizer)


def reseal(folder):
    """A manifest that is true of the files as they are now."""
    names = [file for file in folder.iterdir() if file.name != "manifest.json"]
    files = {file.name: {"sha256": sha256_of(file), "bytes": file.stat().st_size} for file in names}
    module._seal(folder, int(folder.name[5:]), files)


def relabel(file, change):
    """Rewrite the header of a safetensors file and leave its numbers."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(change(json.loads(content[8 : 8 + size]))).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


RELABELED = {
    "shape": lambda header: header | {"mix.bias": header["mix.bias"] | {"shape": [7]}},
    "offsets": lambda header: (
        header | {"mix.bias": header["mix.bias"] | {"data_offsets": [0, 1 << 40]}}
    ),
    "type": lambda header: header | {"mix.bias": header["mix.bias"] | {"dtype": "F3"}},
    "whole numbers": lambda header: header | {"mix.bias": header["mix.bias"] | {"dtype": "I32"}},
    "no object": lambda header: [1],
    "places": lambda header: header | {"__metadata__": {"DCP_SHARDING_INFO": '{"mix.bias": 3}'}},
    "places of another": lambda header: (
        header | {"__metadata__": {"DCP_SHARDING_INFO": '{"mix.bias": {"saved_offsets": [0, 0]}}'}}
    ),
}


@pytest.mark.parametrize("change", RELABELED)
def test_invalid_headers_are_rejected(tmp_path, change):
    folder = save_checkpoint(tmp_path, 3, *trained(1)).folder
    relabel(folder / "model.safetensors", RELABELED[change])
    reseal(folder)
    with pytest.raises(TrainingError, match=r"mix.bias|model.safetensors: not readable"):
        load_weights(Net(), find_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda about: about.pop("state"), "state is missing"),
        (lambda about: about.update(step="3"), "step is of the wrong type"),
        (lambda about: about.update(optimizer=[]), "optimizer is of the wrong type"),
        (lambda about: about["optimizer"].pop("groups"), "groups is missing"),
        (lambda about: about["optimizer"]["groups"][0].pop("options"), "options is missing"),
        (lambda about: about["optimizer"]["groups"].append(3), "not a JSON object"),
        (lambda about: about["optimizer"]["numbers"].update(x=3), "not a JSON object"),
    ],
)
def test_missing_state_keys_are_named(tmp_path, harm, named):
    folder = save_checkpoint(tmp_path, 3, *trained(1)).folder
    about = json.loads((folder / "state.json").read_text())
    harm(about)
    (folder / "state.json").write_text(json.dumps(about))
    reseal(folder)
    with pytest.raises(TrainingError, match=f"state.json: {named}"):
        restore(*trained(0), find_checkpoint(tmp_path))


def test_concurrent_replacement_is_retried(tmp_path, monkeypatch):
    pair = trained(1)
    real = module.sha256_of
    save_checkpoint(tmp_path, 3, *pair)
    left = [4, 5, 6]

    def replacing(file):
        if left and file.name == "state.json" and "step-" in file.parent.name:
            step = left.pop(0)
            save_checkpoint(tmp_path, step, *pair)
            module.remove_checkpoint(folder_of(tmp_path, step - 1))
        return real(file)

    monkeypatch.setattr(module, "sha256_of", replacing)
    console = RecordingConsole()
    assert find_checkpoint(tmp_path, console).step == 6
    assert console.lines == []
