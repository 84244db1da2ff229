"""Stages: sizes, position overrides and learning rates at each step, and repositioned models."""

from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

from errors import ConfigError, TrainingError
from model import ModelError, TokenPositions, Transformer
from run_directory.parent_run import check_fork
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import TrainingSchedule, last_trained, stage_of, stages_of
from run_directory.training_settings import SpikeSettings
from settings.load import load_settings
from tests.data.stores import make_store, sampler
from tests.model.zoo import build, ids
from tests.training.conftest import REFUSED
from training.feasibility import check_model
from training.micro_batches import StepBatch, step_batches
from training.optimizer import Optimizer
from training.step_guard import StepGuard
from training.train_state import TrainState

# 20 steps of 2 × 24 tokens.
SMALL = [
    "train_length=24",
    "training.batch_size=2",
    "training.tokens=960",
    "training.validation.targets=8",
]
DROP = "model.position.scaling={name: drop}"


def staged(stages: str, *overrides: str) -> RunSettings:
    return load_settings(RunSettings, [*SMALL, f"training.stages=[{stages}]", *overrides])


def test_stages_by_fraction_and_step_inherit_previous():
    s = staged(
        "{duration: 0.5}, {overrides: [model.position.theta=5], duration: 6}, "
        f'{{overrides: ["{DROP}"]}}'
    )
    stages = stages_of(s)
    positions = [stage.model.position for stage in stages]
    assert [stage.start for stage in stages] == [0, 10, 16]
    assert [(p.theta, p.scaling.name) for p in positions] == [
        (1e4, "none"),
        (5, "none"),
        (5, "drop"),
    ]
    schedule = TrainingSchedule(s)
    assert [schedule.stage(step).start for step in (9, 10, 15, 16)] == [0, 10, 10, 16]
    # Weights after 10 updates have seen updates 0 to 9 alone.
    starts = [stage_of(stages, step).start for step in (0, 10, 11, 16, 17)]
    assert starts == [0, 0, 10, 10, 16]
    last, message = last_trained(s, 20)
    assert last.model == stages[2].model
    assert last.training == s.training
    assert f"after step 10: model.position.theta=5; after step 16: {DROP}" in message
    assert last_trained(s, 10) == (s, "")


def test_length_curriculum():
    """960 tokens: 240 in windows of 6, 12 steps of 36 tokens, the rest at full length."""
    s = staged(
        "{length: 6, duration: 0.25}, {length: 12, duration: 4, batch_size: 3, "
        f'overrides: [model.position.theta=5]}}, {{duration: 8, overrides: ["{DROP}"]}}, '
        "{length: 24, warmup: 2}",
    )
    assert s.plan == ((6, 8, 5), (12, 3, 12), (24, 2, 6))
    assert s.steps == 23
    assert s.tokens_after(6) == 5 * 48 + 36
    assert s.trained_tokens == 240 + 432 + 288 == 960
    stages = stages_of(s)
    assert [(x.start, x.length, x.batch_size, x.overrides, x.warmup) for x in stages] == [
        (0, 6, 8, (), 0),
        (5, 12, 3, ("model.position.theta=5",), 0),
        (9, 12, 3, (DROP,), 0),
        (17, 24, 2, (), 2),
    ]
    assert [x.is_resized for x in stages] == [False, True, False, True]
    last = stages[-1].model.position
    assert (last.theta, last.scaling.name) == (5, "drop")
    one_each = s.training.model_copy(update={"micro_batch_size": 1})
    micro = stages_of(s.model_copy(update={"training": one_each}))
    assert [stage.micro_batch_size for stage in micro] == [4, 2, 2, 1]
    assert [stage.micro_batch_size for stage in stages] == [8, 3, 3, 2]
    assert micro == stages  # a fork may change it


@pytest.mark.parametrize(
    ("stages", "message"),
    REFUSED["sizes"],
)
def test_invalid_sizes_are_rejected(stages, message):
    with pytest.raises((ConfigError, TrainingError), match=message):
        stages_of(staged(stages))


@pytest.mark.parametrize(
    ("override", "message"),
    REFUSED["positions"],
)
def test_invalid_position_changes_are_rejected(override, message):
    with pytest.raises((ConfigError, TrainingError, ModelError), match=message):
        check_model(staged(f'{{duration: 5}}, {{overrides: ["{override}"]}}'))


def test_learning_rates_per_stage():
    linear = ["training.optimizer={name: adamw, lr: 1, positions_lr: 0.1}"]
    linear += ["training.lr_schedule={name: linear, warmup: 0}"]
    s = staged(f'{{duration: 10}}, {{overrides: ["{DROP}"], warmup: 4}}', *linear)
    rates = [TrainingSchedule(s).learning_rates(step) for step in range(15)]
    shares = [1 - step / 20 for step in range(10)]
    shares += [0.25 * 0.5, 0.5 * 0.45, 0.75 * 0.4, 0.35, 0.3]
    assert [rate["lr"] for rate in rates] == pytest.approx(shares, rel=1e-12)
    positions = [rate["positions_lr"] for rate in rates]
    assert positions == pytest.approx([share / 10 for share in shares], rel=1e-12)


def test_a_warm_up_may_be_as_long_as_its_stage():
    assert stages_of(staged("{duration: 10}, {duration: 10, warmup: 10}"))[1].warmup == 10


def test_a_stage_begins_with_its_first_update():
    s = staged(f'{{duration: 10}}, {{overrides: ["{DROP}"], warmup: 3}}')
    schedule = TrainingSchedule(s)
    model = Transformer(s.model, 7, 24)
    optimizer = Optimizer(model, s.training.optimizer)
    guard = StepGuard(s.training.on_nonfinite, SpikeSettings(window=2), "cpu")
    state = TrainState(model, optimizer, guard, None, model)
    for state.step in range(12):
        stage = schedule.stage(state.step)
        state.begin_step(StepBatch(stage, [], 48, schedule.learning_rates(state.step)))
        assert optimizer.groups[0]["lr"] == schedule.learning_rates(state.step)["lr"]
        guard(torch.tensor(1.0), torch.tensor(1.0))
        is_second = state.step >= 10
        assert model.settings.position.scaling.name == ("drop" if is_second else "none")
        assert guard.state()["applied"] == state.step + 1 - 10 * is_second


@pytest.mark.parametrize(
    ("override", "continues"),
    [
        ("remap={name: rerope, distance: 3}", False),  # keys in two forms instead of one
        ("theta=50", False),
        ("window=7", True),
        ("temperature={name: log_n}", True),
    ],
)
def test_a_stage_with_other_keys_starts_without_a_state(override, continues):
    stages = f'{{duration: 1}}, {{overrides: ["model.position.{override}"]}}'
    s = staged(stages, "model.position.window=9")
    schedule = TrainingSchedule(s)
    model = Transformer(s.model, 37, 24).initialize(0)
    guard = StepGuard(s.training.on_nonfinite, None, "cpu")
    optimizer = Optimizer(model, s.training.optimizer)
    state = TrainState(model, optimizer, guard, None, model, carried={})
    positions = TokenPositions.plain(48)
    for state.step in range(2):
        rates = schedule.learning_rates(state.step)
        state.begin_step(StepBatch(schedule.stage(state.step), [], 48, rates))
        assert bool(state.carried) == (state.step == 1 and continues)
        passed = state.carried_state(slice(None))
        start = 24 * state.step
        model(ids(2, 24), positions.part(start, start + 24), cache=passed)
        state.carry(torch.tensor(False))


@pytest.mark.parametrize("start", [0, 5, 8])
def test_batches_of_each_stage_from_any_step(start):
    """5 steps of 8 × 6 tokens, 4 of 3 × 12 and 11 of 2 × 24, in micro-batches of 24 tokens; rows are
    declared at the length of their stage."""
    stages = "{length: 6, duration: 5}, {length: 12, duration: 4, batch_size: 3}, {length: 24}"
    s = staged(stages, "training.tokens=912", "training.micro_batch_size=1")
    alone = SimpleNamespace(shard=None, device=torch.device("cpu"), data_rank=0, data_world=1)
    source = sampler(make_store([90, 70]), *s.plan)
    batches = step_batches(source, alone, TrainingSchedule(s), start)
    found = []
    for batch in batches:
        parts = [(*part.tokens.shape, *part.positions.lengths) for part in batch.parts]
        found.append((batch.stage.start, parts))
    first = (0, [(4, 6, 6)] * 2)
    second = (5, [(2, 12, 12), (1, 12, 12)])
    third = (9, [(1, 24, 24)] * 2)
    assert found == ([first] * 5 + [second] * 4 + [third] * 11)[start:]


def test_fork_keeps_stages_that_determine_data_order():
    old = staged("{length: 12, duration: 10}, {length: 24, duration: 10}")

    def fork(step: int, stages: str, tokens: int = 960) -> None:
        check_fork(step, old, staged(stages, f"training.tokens={tokens}"))

    # where the second begins
    fork(10, "{length: 12, duration: 10}, {length: 8, duration: 8}, {length: 24}")
    fork(12, "{length: 12, duration: 10}, {length: 24}", 1200)  # the last stage goes on for longer
    for step, stages in (
        (9, "{length: 12, duration: 11}, {length: 24}"),
        (12, "{length: 12, duration: 10}, {length: 24, duration: 5}, {length: 12}"),
        (12, "{length: 12, duration: 9}, {length: 24}"),
    ):
        with pytest.raises(TrainingError, match=f"training.stages before step {step} "):
            fork(step, stages)


def repositioned(net: Transformer, **changes):
    """Settings of a model with another position."""
    position = net.settings.position
    position = type(position).model_validate(position.model_dump() | changes)
    return net.settings.model_copy(update={"position": position})


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("rope", {"scaling": {"name": "drop"}, "window": 4}),
        ("rope-sinks", {"theta": 70.0, "window": 3}),
        ("none-ssmax", {"window": 6}),
        ("learned", {"window": 6}),
    ],
)
def test_position_change_equals_model_built_with_it(case, changes):
    net = build(case)
    asked = repositioned(net, **changes)
    tokens = ids(2, 11)
    places = TokenPositions.plain(11)
    weights = dict(net.named_parameters())
    before = net(tokens, places)
    net.reposition(asked)
    assert net.settings == asked
    assert all(weight is weights[name] for name, weight in net.named_parameters())
    fresh = Transformer(asked, net.vocab_size, net.train_length).to(net.embed.weight.dtype).eval()
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(net(tokens, places), fresh(tokens, places))
    assert not torch.allclose(net(tokens, places), before)
