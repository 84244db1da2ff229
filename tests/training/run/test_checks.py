"""Invalid runs are rejected, and forecasts printed, before any compute."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from errors import TrainingError, UserError
from run_directory.run import check_writable
from run_directory.run_settings import RunSettings
from run_directory.training_settings import ValidationSettings
from settings.load import load_settings
from training import hardware, precision
from training.checks import check_model, validation_steps
from training.hardware import peak_flops

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
LEARNED = ["model.position.name=learned", "train_length=64"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.position.max_length=63"], "train_length 64 is longer than the 63 positions"),
        (
            ["model.position.max_length=127", "training.validation.multiples=[4,2]"],
            "begins at 2 × 64 .* 127",
        ),
    ],
)
def test_learned_table_shorter_than_lengths_is_rejected(overrides, message):
    with pytest.raises(TrainingError, match=message):
        check_model(load_settings(RunSettings, LEARNED + overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "checkpoint={interval: 100, keep_interval: 250}",
            r"keep_interval = 250: .* interval \(100\)",
        ),
        (
            "checkpoint={interval: 100, keep_interval: 50}",
            "keep_interval = 50: make it a multiple",
        ),
        ("checkpoint={interval: null, keep_interval: 50}", "set interval too"),
        ("profile.start=244", "profile.start = 244 is outside .* set 0 to 243"),
        ("checkpoint={interval: 50, keep_interval: 250}", None),
        ("profile={start: 243, steps: 3}", None),
    ],
)
def test_steps_beyond_the_run_are_rejected(overrides, message):
    with pytest.raises(TrainingError, match=message) if message else nullcontext():
        check_model(load_settings(RunSettings, [f"training.{overrides}"]))


CARRIED = ["training.state=carry", "data.packing=intra_document", "model.mixer.name=recurrent"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("data.packing=concat", "data.packing"),
        ("data.positions.name=random_offset", "data.positions.name"),
        ("training.stages=[{duration: 9}, {length: 128}]", "training.stages"),
        ("training.parallel.context=2", "training.parallel.context"),
        ("model.mixer.name=attention", "model.position.window"),
        ("model.position.name=learned", "those of this scheme end"),
        ("seed=1", None),
    ],
)
def test_a_carried_state_requires_consecutive_windows(overrides, key):
    refused = pytest.raises(UserError, match=key)
    with refused if key else nullcontext():
        check_model(load_settings(RunSettings, [*CARRIED, overrides]))


def test_fork_profiles_its_own_steps_only():
    fork = ["parent={run: runs/x, fork: true, checkpoint: 100}"]
    for start, steps, is_late in ((97, 3, False), (98, 3, True), (100, 1, True)):
        overrides = [*fork, f"training.profile={{start: {start}, steps: {steps}}}"]
        with nullcontext() if is_late else pytest.raises(TrainingError, match="set 100 to 243"):
            check_model(load_settings(RunSettings, overrides))


@pytest.mark.parametrize(
    "overrides", [[], ["model.position.max_length=128", "training.validation.multiples=[2]"]]
)
def test_learned_table_covering_lengths_is_accepted(overrides):
    check_model(load_settings(RunSettings, LEARNED + overrides))


def test_machine_benchmark_keeps_rng_state():
    before = torch.get_rng_state()
    assert peak_flops(torch.device("cpu")) > 1e6
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    "file", sorted((CONFIGS / "position").glob("*.yaml")), ids=lambda file: file.stem
)
def test_every_suggested_scheme_fits_tiny_model(file):
    check_model(load_settings(RunSettings, [str(CONFIGS / "tiny.yaml"), str(file)]))


@pytest.mark.parametrize(
    ("interval", "steps", "expected"),
    [
        ("auto", 100, {20, 40, 60, 80, 100}),
        ("auto", 600, {120, 240, 250, 360, 480, 500, 600}),
        ("auto", 1250, {250, 500, 750, 1000, 1250}),
        ("auto", 3, {1, 2, 3}),
        (30, 100, {30, 60, 90, 100}),
        (None, 100, {100}),
    ],
)
def test_short_runs_are_validated_at_least_five_times(interval, steps, expected):
    assert validation_steps(ValidationSettings(interval=interval), steps) == expected


@pytest.mark.parametrize("kind", ["control character", "file", "long", "dangling", "loop"])
def test_run_directory_that_cannot_be_created_is_refused(tmp_path, kind):
    folder = tmp_path / "run"
    if kind == "control character":
        folder = tmp_path / "a\nb"
    elif kind == "file":
        folder.touch()
        folder = folder / "below"
    elif kind == "long":
        folder = tmp_path / "missing" / ("x" * 500)
    else:
        folder.symlink_to("nowhere" if kind == "dangling" else "run")
    with pytest.raises(TrainingError, match="--run-dir="):
        check_writable(folder)
    check_writable(tmp_path / "a" / "b")


class TestPrecision:
    """What training.precision=auto resolves to."""

    @pytest.fixture
    def resolve(self, monkeypatch, tmp_path):
        times = {torch.float32: 1.0}
        parallel = SimpleNamespace(
            main=True,
            device=torch.device("cpu"),
            device_type="cpu",
            gather=lambda value: [value],
        )

        def resolved(words=(), half=0.5, native=True, folder=None, parent=None) -> str:
            times[torch.bfloat16] = half
            monkeypatch.setattr(precision, "has_bfloat16", lambda device: native)
            monkeypatch.setattr(precision, "product_seconds", lambda *sizes: times[sizes[-1]])
            settings = load_settings(RunSettings, ["data.tokenizer.name=bytes", *words])
            return precision.resolve_precision(settings, parent, folder, parallel)

        return resolved

    def test_takes_the_faster_type_where_the_processor_has_it(self, resolve):
        assert resolve() == "bfloat16"
        assert resolve(half=1.2) == resolve(native=False) == "float32"
        assert resolve(["training.precision=float64"]) == "float64"

    def test_stays_with_the_run_and_its_forks(self, resolve, tmp_path):
        manifest = tmp_path / "manifest.json"
        manifest.write_text('{"precision": "bfloat16"}')
        assert resolve(half=2.0, folder=tmp_path) == "bfloat16"
        manifest.write_text("{}")  # an earlier version trained it in float32
        assert resolve(folder=tmp_path) == "float32"
        parent = SimpleNamespace(about={"precision": "float32", "vocab_size": 258})
        fork = ["parent={run: x, fork: true, checkpoint: 1}"]
        assert resolve(fork, parent=parent) == "float32"
        assert resolve(["parent={run: x}"], parent=parent) == "bfloat16"

    def test_peak_is_that_of_the_type_and_unknown_beside_other_work(self, monkeypatch):
        peaks = {torch.float32: (1e9, True), torch.bfloat16: (3e9, False)}
        monkeypatch.setattr(hardware, "measured_peak", lambda device, dtype: peaks[dtype])
        cpu = torch.device("cpu")
        assert [hardware.peak_flops(cpu, dtype) for dtype in peaks] == [1e9, 3e9]
        assert [hardware.reliable_peak(cpu, dtype) for dtype in peaks] == [1e9, None]


@pytest.mark.parametrize(
    "name",
    ["quickstart.yaml", *(f"studies/{study}_base.yaml" for study in ("mup", "novels", "schemes"))],
)
def test_published_configurations_do_not_depend_on_the_processor(name):
    assert load_settings(RunSettings, [str(CONFIGS / name)]).training.precision == "float32"
