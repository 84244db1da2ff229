"""Draw the items of an evaluation: the same questions at every length, method and scheme."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from data import DataError, Tokenizer
from data.files import canonical_hash
from data.tasks import NO_TEXT, Haystacks, HaystackTask, Task, TaskContext, TaskItem
from errors import EvaluationError
from evaluation.tasks.task_settings import TaskEvaluationSettings


@dataclass(frozen=True)
class DrawnItems:
    """All items of an evaluation. `items[L][i]` is item i with L inputs, a leading BOS (`bos`)
    among them. `vocab_size` is the number of ids of the tokenizer.

    unit (n,): the haystack of each item, or the item itself without haystacks, as `unit_kind`
    states. depth (n,): index of the item's depth in `depths`.
    """

    task: Task
    lengths: list[int]
    items: dict[int, list[TaskItem]]
    bos: int | None
    vocab_size: int
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
        """Accuracy of a uniform guess."""
        return 1 / self.candidates

    def hash_at(self, length: int) -> str:
        """Hash of every token and candidate at one length; only results with equal hashes are
        comparable."""
        rows = [[item.prompt, item.answer, item.others] for item in self.items[length]]
        return canonical_hash([self.bos, length, rows])

    @property
    def hash(self) -> str:
        return canonical_hash([self.hash_at(length) for length in self.lengths])


def draw_items(
    settings: TaskEvaluationSettings,
    task: Task,
    tokenizer: Tokenizer,
    *,
    bos: bool,
    trained_length: int,
    documents: Callable[[], Iterable[tuple[str, str]]] | None,
    origin: str = "",
) -> DrawnItems:
    """Make every item of the evaluation.

    `documents()` yields (name, text) of the haystacks, for tasks that use them; `origin` labels
    their source. Item i is placed in haystack i mod H at depth (i + i div H) mod D, at every
    length, so that D rounds cover every depth in every haystack. Raises EvaluationError if a length
    is too short for an item, or no document is long enough.
    """
    lengths = settings.grid(trained_length)
    context = TaskContext(task, tokenizer, "evaluation", settings.seed)
    index = np.arange(settings.items)
    depths = list(np.linspace(0, 1, settings.depths)) if settings.depths > 1 else [0.5]
    unit = index
    kind = "item"
    names = [f"item {i}" for i in index]
    depth = index % len(depths)
    texts = [NO_TEXT] * len(index)
    try:
        if documents is not None and isinstance(task, HaystackTask):
            most = min(settings.haystacks, settings.items)
            haystacks = Haystacks(documents(), tokenizer, lengths[-1] + 1, most, origin)
            count = len(haystacks)
            unit = index % count
            kind = "haystack"
            names = haystacks.names
            depth = (index + index // count) % len(depths)
            cut = [haystacks.text(i, "evaluation", settings.seed, i) for i in range(count)]
            texts = [cut[i] for i in unit]
        items = {
            length: [
                context.item(int(i), length + 1 - int(bos), depths[depth[i]], texts[i])
                for i in index
            ]
            for length in lengths
        }
    except DataError as error:
        raise EvaluationError(str(error)) from error
    return DrawnItems(
        task=context.task,
        lengths=lengths,
        items=items,
        bos=tokenizer.bos_id if bos else None,
        vocab_size=tokenizer.vocab_size,
        unit=unit,
        unit_kind=kind,
        unit_names=names,
        depth=depth,
        depths=depths,
    )
