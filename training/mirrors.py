"""Mirrors of metrics.jsonl in other people's tools: copies that may fail at any time and never stop a run."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from training.console import Console
from training.errors import TrainingError
from training.settings import RunSettings, TrainingSettings
from training.telling_settings import WandbSettings

FINISH = 20.0  # seconds
INSTALL = "pip install -c constraints.txt tensorboard"


class Tracker(Protocol):
    """A tool that keeps numbers by step. Whatever it raises is caught."""

    def send(self, step: int, attempt: int, values: dict[str, Any]) -> None:
        """Values of a step by name, as `train/loss`."""
        ...

    def close(self) -> None: ...


class Mirror:
    """Copies metrics to one tracker. Whatever fails there is said once and never touches the training."""

    def __init__(self, name: str, make: Callable[[], Tracker], console: Console):
        self.name, self._console = name, console
        self._tracker: Tracker | None = None
        self._try(lambda: setattr(self, "_tracker", make()))

    def write(self, line: dict) -> None:
        """Send one line of metrics; values are prefixed by its kind, nested ones joined with slashes."""
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
        except Exception as error:  # whatever a tracker raises, the run goes on
            self._tracker = None
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._console.warn(
                f"{self.name} stops here, training goes on (metrics.jsonl has everything): {first}"
            )


def flat(values: dict, prefix: str) -> dict[str, Any]:
    """Nested values by one name each, joined with slashes."""
    found = {}
    for key, value in values.items():
        name = f"{prefix}/{key}"
        found |= flat(value, name) if isinstance(value, dict) else {name: value}
    return found


class Wandb:
    """Weights & Biases. The step is sent as a metric of its own: a resumed run repeats steps, which wandb's
    own counter would refuse."""

    def __init__(self, settings: WandbSettings, folder: Path, config: dict):
        # Imported only for those who asked for it: half a second, and files in the home folder.
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
            # Without a network the end of a run would wait for as long as that is away, and whoever sent a
            # signal does not. What was not sent is kept in the run folder, for `wandb sync`.
            settings={"finish_timeout": FINISH, "finish_timeout_raises": True},
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, step: int, attempt: int, values: dict[str, Any]) -> None:
        self._run.log(values | {"step": step, "attempt": attempt})

    def close(self) -> None:
        self._run.finish()


class Tensorboard:
    """Event files in the run folder, numbers only. What earlier attempts wrote past `step` is purged."""

    def __init__(self, folder: Path, step: int):
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=step + 1)

    def send(self, step: int, attempt: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def make_mirrors(settings: RunSettings, folder: Path, step: int, console: Console) -> list[Mirror]:
    """The mirrors a run asks for, resumed after `step`."""
    t, found = settings.training, []
    if t.wandb.mode != "disabled":
        config = settings.model_dump(mode="json")
        found.append(Mirror("wandb", lambda: Wandb(t.wandb, folder, config), console))
    if t.tensorboard:
        found.append(Mirror("tensorboard", lambda: Tensorboard(folder, step), console))
    return found


def check_mirrors(t: TrainingSettings) -> None:
    """Refuse a mirror whose package is not installed, before any data are read."""
    if t.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise TrainingError(
            f"training.tensorboard=true needs the package tensorboard: {INSTALL}; or leave it off"
        )
