"""Consistency of the run settings, and which settings identify a run."""

import pytest

from errors import ConfigError
from run_directory.run_settings import RunSettings
from settings.load import apply_overrides, dropped_settings, dump, identity, load_settings


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.tokens=8191"], "less than one step: training.batch_size × train_length = 8192"),
        (
            ["training.lr_schedule.warmup=1.5"],
            "neither a share (below 1) nor a whole number of steps",
        ),
        (["training.lr_schedule.warmup=500"], "take 205% of the run's 244 steps"),
        (["training.lr_schedule={name: wsd, warmup: 0.9}"], "take 110%"),
        (["training.lr_schedule={name: wsd, warmup: 44, decay: 201}"], "take 100%"),
        (["training.lr_schedule={name: wsd, decay: 2.5}"], "neither a share"),
        (
            ["training.optimizer={name: muon, adamw: {groups: {matrices: {lr: 1}}}}"],
            "Muon updates matrices",
        ),
        (["training.optimizer={name: muon, momentum: 1}"], "less than 1"),
        (["training.validation.targets=257"], "targets = 257 exceeds train_length = 256"),
        (["training.validation.multiples=[2, 2]"], "different whole numbers"),
        (["training.validation.multiples=[]"], "at least 1 item"),
        (["training.optimizer.betas=[0.9, 1]"], "less than 1"),
        (["training.micro_batch_size=33"], "micro_batch_size 33 is larger than batch_size 32"),
        (["training.lr_schedule.name=cosin"], "did you mean cosine?"),
        (
            ["training.optimizer.name=muon", "training.optimizer.positions_lr=1e-3"],
            "not to muon; with muon it is training.optimizer.adamw.positions_lr",
        ),
        (
            ["training.ema=0.99"],
            "of settings (decay, start) or null; write training.ema.decay=0.99",
        ),
        (["training.ema=5"], "write training.ema.start=5"),
        (["training.checkpoint=100"], "write training.checkpoint.interval=100"),
        (["training.checkpoint=1k"], "write training.checkpoint.interval=1k"),
        (["training.checkpoint="], "write training.checkpoint.interval=null"),
        (["training.on_spike=skip"], "write training.on_spike.sigmas=VALUE"),
        (["training.on_spike={sigma: 0.1}"], "did you mean training.on_spike.sigmas?"),
        (["training.on_spike={cut: 3}"], "settings of training.on_spike are sigmas, window, limit"),
        (["training.wandb=online"], "write training.wandb.mode=online"),
        (["parent=runs/x"], "write parent.run=runs/x"),
        (["model=3"], "model = 3: must be a group of settings; write model.dim=VALUE"),
        (["training.stages=[32]"], "training.stages.0 = 32: must be a group of settings (length,"),
        (["training.stages=[32]"], "; write {length: 32}"),
        (
            ["training.stages=[{share: 0.5}]"],
            "training.stages.0 are length, batch_size, duration, overrides",
        ),
        (["training.optimizer=3"], "write training.optimizer.name=NAME; known: adamw, muon"),
        (
            ["training.optimizer=adam"],
            "did you mean training.optimizer.name=adamw? known: adamw, muon",
        ),
        (["training.theta=5"], "did you mean model.position.theta?"),
        (
            ["training.optimizer.learning_rate=1"],
            "training.optimizer.learning_rate is not a setting",
        ),
        (["training.grad_clip=0"], "greater than 0"),
        (["training.checkpoint.interval=0"], "at least 1"),
        (["training.samples.interval=0"], "at least 1"),
        (["seed=-1"], "at least 0"),
        (["model.dim=100"], "dim 100 is not divisible by heads 8"),
    ],
)
def test_invalid_settings(overrides, expected):
    with pytest.raises(ConfigError) as error:
        load_settings(RunSettings, overrides)
    assert expected in str(error.value)


def test_settings_dropped_by_later_choice_are_reported(tmp_path):
    file = tmp_path / "a.yaml"
    more = tmp_path / "more.yaml"
    file.write_text(
        "training:\n  optimizer:\n    lr: 0.001\n    betas: [0.9, 0.99]\n    eps: 1.0e-8\n"
    )
    more.write_text("training: {optimizer: {name: muon, momentum: 0.9}}")

    def message(*overrides: str) -> list[str]:
        return dropped_settings(load_settings(RunSettings, list(overrides)), list(overrides))

    lost = [
        f"{file}:3: training.optimizer.lr = 0.001 is dropped, because muon was chosen after it: "
        "training.optimizer.lr is 0.002; set it after that choice",
        f"{file}:4: training.optimizer.betas = [0.9, 0.99] is dropped, because muon was chosen after it: "
        "training.optimizer.adamw.betas is [0.9, 0.95]; set it after that choice",
    ]
    assert (
        message(str(file), str(more)) == message(str(file), "training.optimizer.name=muon") == lost
    )
    assert (
        message(str(file), "training.optimizer.name=muon", "training.optimizer.lr=0.004")
        == lost[1:]
    )
    assert (
        message(str(file), "training.optimizer={name: muon, lr: 4e-3, adamw: {betas: [0.8, 0.9]}}")
        == []
    )
    assert (
        message(str(file), "training.optimizer.lr=0.004") == message(str(file)) == message() == []
    )
    assert message(str(file), "model.position.name=alibi") == []


def test_steps_follow_from_token_budget():
    overrides = ["train_length=30", "training.batch_size=7", "training.tokens=2099"]
    s = load_settings(RunSettings, [*overrides, "training.validation.targets=8"])
    assert (s.tokens_after(1), s.steps, s.trained_tokens) == (210, 9, 1890)


def test_identity_depends_on_settings_that_affect_weights():
    s = RunSettings()
    shaping = [
        "training.tokens=3M",
        "training.lr_schedule.warmup=0.1",
        "training.batch_size=16",
        "training.precision=float64",
        "model.position.theta=5e5",
        "data.packing=intra_document",
        "seed=1",
    ]
    free = [
        "training.log_interval=1",
        "training.checkpoint.interval=3",
        "training.wandb.mode=offline",
        "training.samples.prompts=[x]",
        "training.micro_batch_size=4",
    ]
    for word in shaping:
        assert identity(apply_overrides(s, [word])) != identity(s), word
    for word in free:
        changed = apply_overrides(s, [word])
        assert changed != s and identity(changed) == identity(s), word


def test_dump_reloads_equal(tmp_path):
    file = tmp_path / "settings.yaml"
    overrides = ["training.lr_schedule.name=wsd", "model.position.scaling.name=yarn"]
    overrides += ["training.samples.prompts=['on', ' a']"]
    s = load_settings(RunSettings, overrides)
    file.write_text(dump(s))
    assert load_settings(RunSettings, [str(file)]) == s
