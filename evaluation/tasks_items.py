"""The items of an evaluation: the same questions at every length, for every rule and every scheme."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from data import DataError, Tokenizer
from data.tasks.haystack import Haystacks
from data.tasks.items import Bench, Item
from data.tasks.make import NO_TEXT, make_item
from data.tasks.settings import Task
from evaluation.errors import EvaluationError
from evaluation.targets import content_hash
from evaluation.tasks_settings import TaskEvaluationSettings


@dataclass(frozen=True)
class Drawn:
    """All items of an evaluation. `items[L][i]` is item i with L inputs, a leading BOS (`bos`) among them.

    unit (n,): the haystack of each item, or the item itself where there is none; unit_kind says which.
    depth (n,): which of the `depths` it was asked to stand at, 0 where the task hides nothing.
    """

    task: Task
    lengths: list[int]
    items: dict[int, list[Item]]
    bos: int | None
    unit: np.ndarray
    unit_kind: str
    unit_names: list[str]
    depth: np.ndarray
    depths: list[float]

    @property
    def count(self) -> int:
        return len(self.unit)

    @property
    def candidates(self) -> int:
        return 1 + len(self.items[self.lengths[0]][0].others)

    @property
    def chance(self) -> float:
        """Share of right answers of a model that knows nothing."""
        return 1 / self.candidates

    def hash_at(self, length: int) -> str:
        """Of every token and candidate at one length: results with different hashes are not compared."""
        rows = [[item.prompt, item.answer, item.others] for item in self.items[length]]
        return content_hash([self.bos, length, rows])

    @property
    def hash(self) -> str:
        return content_hash([self.hash_at(length) for length in self.lengths])


def draw_items(
    settings: TaskEvaluationSettings,
    task: Task,
    tokenizer: Tokenizer,
    *,
    bos: bool,
    trained_length: int,
    documents: Callable[[], Iterable[tuple[str, str]]] | None,
    origin: str = "",
) -> Drawn:
    """Make every item of the evaluation.

    `documents()` gives (name, text) of the haystacks, for a task that reads some, and `origin` says where
    they come from. Item i stands in haystack i mod H at depth (i + i div H) mod D, at every length, so that
    D rounds put every depth in every haystack. Raises EvaluationError where a length holds no item, or no
    document is long enough.
    """
    lengths, first = settings.grid(trained_length), int(bos)
    bench = Bench(task, tokenizer, "evaluation", settings.seed)
    index = np.arange(settings.items)
    unit, names, kind = index, [f"item {i}" for i in index], "item"
    depths = list(np.linspace(0, 1, settings.depths)) if settings.depths > 1 else [0.5]
    depth = index % len(depths) if task.hides else np.zeros(len(index), dtype=np.int64)
    try:
        texts = [NO_TEXT] * len(index)
        if task.reads and documents is not None:
            most = min(settings.haystacks, settings.items)
            found = Haystacks(documents(), tokenizer, lengths[-1] + 1, most, origin)
            unit, names, kind = index % len(found), found.names, "haystack"
            depth = (index + index // len(found)) % len(depths)
            cut = [found.text(i, "evaluation", settings.seed, i) for i in range(len(found))]
            texts = [cut[i] for i in unit]
        items = {
            length: [make_item(bench, int(i), length + 1 - first, depths[depth[i]], texts[i]) for i in index]
            for length in lengths
        }
    except DataError as error:
        raise EvaluationError(str(error)) from error
    return Drawn(task, lengths, items, tokenizer.bos_id if bos else None, unit, kind, names, depth, depths)
