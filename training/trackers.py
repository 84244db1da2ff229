"""Copies metrics.jsonl to experiment trackers; their failures never stop a run."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from errors import TrainingError
from run_directory.console import Console
from run_directory.run_settings import RunSettings
from run_directory.training_settings import TrainingSettings

FINISH = 20.0  # seconds to finish uploads
INSTALL = "pip install -c constraints.txt tensorboard"

# step, attempt, values by name, such as `train/loss`
Send = Callable[[int, int, dict[str, Any]], object]
Close = Callable[[], object]


def _open_wandb(settings: RunSettings, folder: Path, step: int) -> tuple[Send, Close]:
    """Weights & Biases. The step is sent as a separate metric: a resumed run repeats steps, which
    wandb's own counter rejects."""
    w = settings.training.wandb
    # Imported only if used: the import takes half a second and writes files to the home folder.
    run = importlib.import_module("wandb").init(
        project=w.project,
        entity=w.entity,
        mode=w.mode,
        dir=str(folder),
        id=folder.name,
        name=folder.name,
        resume="allow" if w.mode == "online" else None,
        config=settings.model_dump(mode="json"),
        # Without a timeout, the end of a run would wait as long as the network is down, even after
        # a signal. Unsent data stay in the run directory, for `wandb sync`.
        settings={"finish_timeout": FINISH, "finish_timeout_raises": True},
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def send(step: int, attempt: int, values: dict[str, Any]) -> None:
        run.log(values | {"step": step, "attempt": attempt})

    return send, run.finish


def _open_tensorboard(settings: RunSettings, folder: Path, step: int) -> tuple[Send, Close]:
    """TensorBoard event files in the run directory, numbers only. Purges earlier values after
    `step`."""
    module = importlib.import_module("torch.utils.tensorboard")
    writer = module.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=step + 1)

    def send(step: int, attempt: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                writer.add_scalar(name, value, step)

    return send, writer.close


_OPEN = {"wandb": _open_wandb, "tensorboard": _open_tensorboard}


class Trackers:
    """The trackers in the settings of a run, resumed after `step`. The first failure of one is
    reported and disables it.

    open: how to send and close each, by its name.
    """

    def __init__(self, settings: RunSettings, folder: Path, step: int, console: Console):
        t = settings.training
        used = {"wandb": t.wandb.mode != "disabled", "tensorboard": t.tensorboard}
        self._console = console
        self.open: dict[str, tuple[Send, Close]] = {}
        for name, open_ in _OPEN.items():
            if used[name]:
                with self._disabled_by_errors(name):
                    self.open[name] = open_(settings, folder, step)

    def write(self, line: dict) -> None:
        """Send one line of metrics; names are prefixed with its kind, nested names joined with
        slashes."""
        values = {k: v for k, v in line.items() if k not in ("kind", "step", "attempt")}
        for name, (send, _) in list(self.open.items()):
            with self._disabled_by_errors(name):
                send(line["step"], line["attempt"], flat(values, line["kind"]))

    def close(self) -> None:
        for name, (_, close) in list(self.open.items()):
            with self._disabled_by_errors(name):
                close()

    @contextmanager
    def _disabled_by_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of a tracker: training continues
            self.open.pop(name, None)
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._console.warn(f"{name} is disabled; training continues: {first}")


def flat(values: dict, prefix: str) -> dict[str, Any]:
    """Flatten nested values; nested names are joined with slashes."""
    flattened = {}
    for key, value in values.items():
        name = f"{prefix}/{key}"
        flattened |= flat(value, name) if isinstance(value, dict) else {name: value}
    return flattened


def check_trackers(t: TrainingSettings) -> None:
    """Raise for a tracker whose package is not installed, before any data are read."""
    if t.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise TrainingError(
            f"training.tensorboard=true requires tensorboard: {INSTALL}; or set it to false"
        )
