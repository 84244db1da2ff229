"""Settings of an evaluation by tasks."""

from typing import Literal

from data.data_settings import Lengths, bounds_of
from data.tasks import TaskSettings
from errors import EvaluationError
from evaluation.evaluation_settings import MeasurementSettings
from settings.fields import setting


class TaskEvaluationSettings(MeasurementSettings):
    """Items of one task at several lengths: accuracy by likelihood, and exact match."""

    protocol: Literal["tasks"] = setting("tasks", "items with one right answer each")
    task: TaskSettings | None = setting(None, "the task; null: the one the run was trained on")
    lengths: list[Lengths] | None = setting(
        None,
        "input tokens; the trained length L0 is always added; default: L0 x 1, 2, 4. "
        "Tasks on symbols: length of the problems, or [minimum, maximum]; default: those of "
        "training up to N, N+1 to 2N, 2N+1 to 3N",
    )
    items: int = setting(
        200, "items per length; in text, the same questions in longer contexts", ge=1
    )
    positions: Literal["fixed", "redrawn"] | None = setting(
        None,
        "tasks on symbols: draw positions as data.positions of the run does, once for "
        "all items (fixed) or for each item (redrawn); null: 0, 1, 2, ..., or those of the task",
    )
    depths: int = setting(5, "depths of the hidden fact, evenly from 0 (far) to 1 (near)", ge=1)
    haystacks: int = setting(40, "maximum number of haystack texts, used evenly", ge=1)
    haystack_store: str | None = setting(
        None,
        "folder of a prepared corpus whose held-out text is the haystack; null: the "
        "run's own if it was trained on text, else task.haystack",
    )
    unreachable: Literal["refuse", "dash"] = setting(
        "refuse", "a length that no method supports is an error, or a dash in the table"
    )
    batch: int | None = setting(None, "items per batch; default: as the memory allows", ge=1)

    def grid(self, trained_length: int) -> list[int]:
        """The lengths of a task in text in ascending order, including the trained length."""
        lengths = self.lengths or [trained_length * n for n in (1, 2, 4)]
        whole = {length for length in lengths if isinstance(length, int)}
        if len(whole) < len(set(lengths)):
            raise EvaluationError("lengths: a task in text has numbers, not [minimum, maximum]")
        return sorted({*whole, trained_length})

    def ranges(self, trained: tuple[int, int]) -> list[tuple[int, int]]:
        """Minimum and maximum length of the problems of a task on symbols, in ascending order."""
        most = trained[1]
        default = [trained, (most + 1, 2 * most), (2 * most + 1, 3 * most)]
        ranges = [bounds_of(lengths) for lengths in self.lengths or default]
        if len({longest for _, longest in ranges}) < len(ranges):
            raise EvaluationError("lengths: two ranges have the same maximum; change one of them")
        return sorted(ranges, key=lambda bounds: bounds[1])
