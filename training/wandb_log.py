"""A copy of metrics.jsonl for Weights & Biases."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from run_directory.console import Console
from run_directory.run_settings import RunSettings

FINISH = 20.0  # seconds to finish uploads


class WandbLog:
    """A copy of metrics.jsonl for Weights & Biases. Its failures never stop a run: the first one is
    reported, and ends the log.

    Attributes:
        run: the run of wandb; None: there is none.
    """

    def __init__(self, settings: RunSettings, folder: Path, console: Console):
        self._console = console
        self.run: Any = None
        w = settings.training.wandb
        with self._ended_by_errors():
            # Imported only if used: the import takes half a second and writes files to the home
            # folder.
            self.run = importlib.import_module("wandb").init(
                project=w.project,
                entity=w.entity,
                mode=w.mode,
                dir=str(folder),
                id=folder.name,
                name=folder.name,
                resume="allow" if w.mode == "online" else None,
                config=settings.model_dump(mode="json"),
                # Without a timeout, the end of a run would wait as long as the network is down,
                # even after a signal. Unsent data stay in the run directory, for `wandb sync`.
                settings={"finish_timeout": FINISH, "finish_timeout_raises": True},
            )
            # A metric of our own: a resumed run repeats steps, which wandb's counter rejects.
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")

    def write(self, line: dict) -> None:
        """Send one line of metrics; names are prefixed with its kind, nested names joined with
        slashes."""
        if self.run is None:
            return
        place = {key: line[key] for key in ("step", "attempt")}
        values = {key: value for key, value in line.items() if key not in ("kind", *place)}
        with self._ended_by_errors():
            self.run.log(flat(values, line["kind"]) | place)

    def close(self) -> None:
        if self.run is not None:
            with self._ended_by_errors():
                self.run.finish()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error of the tracker: training continues
            self.run = None
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._console.warn(f"wandb is disabled; training continues: {first}")


def flat(values: dict, prefix: str) -> dict[str, Any]:
    """Flatten nested values; nested names are joined with slashes."""
    flattened = {}
    for key, value in values.items():
        name = f"{prefix}/{key}"
        flattened |= flat(value, name) if isinstance(value, dict) else {name: value}
    return flattened
