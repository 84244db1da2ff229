"""Copies metrics.jsonl to experiment trackers; their failures never stop a run."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from training.config.settings import RunSettings, TrainingSettings
from training.config.trainer_settings import WandbSettings
from training.errors import TrainingError
from training.logging.console import Console

FINISH = 20.0  # seconds to finish uploads
INSTALL = "pip install -c constraints.txt tensorboard"


class Tracker(Protocol):
    """An experiment tracker that records values by step. Its exceptions are caught."""

    def send(self, step: int, attempt: int, values: dict[str, Any]) -> None:
        """Record the values of a step by name, such as `train/loss`."""
        ...

    def close(self) -> None: ...


class TrackerThread:
    """Copies metrics to one tracker. A failure is reported once and does not affect training."""

    def __init__(self, name: str, make: Callable[[], Tracker], console: Console):
        self.name, self._console = name, console
        self._tracker: Tracker | None = None
        self._try(lambda: setattr(self, "_tracker", make()))

    def write(self, line: dict) -> None:
        """Send one line of metrics; names are prefixed with its kind, nested names joined with slashes."""
        if (tracker := self._tracker) is None or line["kind"] == "start":
            return
        told = {k: v for k, v in line.items() if k not in ("kind", "step", "attempt")}
        self._try(lambda: tracker.send(line["step"], line["attempt"], flat(told, line["kind"])))

    def close(self) -> None:
        if self._tracker is not None:
            self._try(self._tracker.close)
        self._tracker = None

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # any error of a tracker: training continues
            self._tracker = None
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._console.warn(
                f"{self.name} stops here, training goes on (metrics.jsonl has everything): {first}"
            )


def flat(values: dict, prefix: str) -> dict[str, Any]:
    """Flatten nested values; nested names are joined with slashes."""
    found = {}
    for key, value in values.items():
        name = f"{prefix}/{key}"
        found |= flat(value, name) if isinstance(value, dict) else {name: value}
    return found


class WandbTracker:
    """Weights & Biases. The step is sent as a separate metric: a resumed run repeats steps, which wandb's own
    counter rejects."""

    def __init__(self, settings: WandbSettings, folder: Path, config: dict):
        # Imported only if used: the import takes half a second and writes files to the home folder.
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            dir=str(folder),
            id=folder.name,
            name=folder.name,
            resume="allow" if settings.mode == "online" else None,
            config=config,
            # Without a timeout, the end of a run would wait as long as the network is down, even after a
            # signal. Unsent data stay in the run folder, for `wandb sync`.
            settings={"finish_timeout": FINISH, "finish_timeout_raises": True},
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, step: int, attempt: int, values: dict[str, Any]) -> None:
        self._run.log(values | {"step": step, "attempt": attempt})

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard event files in the run folder, numbers only. Purges earlier values after `step`."""

    def __init__(self, folder: Path, step: int):
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=step + 1)

    def send(self, step: int, attempt: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def make_trackers(settings: RunSettings, folder: Path, step: int, console: Console) -> list[TrackerThread]:
    """The trackers in the settings, resumed after `step`."""
    t, found = settings.training, []
    if t.wandb.mode != "disabled":
        config = settings.model_dump(mode="json")
        found.append(TrackerThread("wandb", lambda: WandbTracker(t.wandb, folder, config), console))
    if t.tensorboard:
        found.append(TrackerThread("tensorboard", lambda: TensorBoardTracker(folder, step), console))
    return found


def check_trackers(t: TrainingSettings) -> None:
    """Raise for a tracker whose package is not installed, before any data are read."""
    if t.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise TrainingError(
            f"training.tensorboard=true needs the package tensorboard: {INSTALL}; or leave it off"
        )
