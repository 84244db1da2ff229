"""Generates items from task settings."""

from collections.abc import Callable

import numpy as np

from data.tasks import closed, hidden
from data.tasks.items import TaskContext, TaskItem, TaskRequest

FORMS: dict[str, Callable[[TaskRequest], TaskItem]] = {
    "passkey": hidden.passkey,
    "needle": hidden.needle,
    "variables": hidden.variables,
    "recall": closed.recall,
    "copy": closed.copy,
    "reverse": closed.reverse,
    "parity": closed.parity,
    "addition": closed.addition,
}
NO_TEXT = np.zeros(0, dtype=np.int64)


def make_item(
    bench: TaskContext, index: int, length: int, depth: float = 0.0, haystack: np.ndarray = NO_TEXT
) -> TaskItem:
    """Generate item `index` of a task with at most `length` tokens (exactly `length` if it has a haystack).

    The same index at another length is the same question in a longer or shorter context. For tasks without a
    haystack, where the length is the difficulty, the longer item extends the shorter one.

    Args:
        bench: task, tokenizer, purpose and seed.
        index: index of the item.
        length: tokens of prompt and answer together, without BOS.
        depth: position of the answer, 0 (far from the question) to 1 (just before it).
        haystack: at least `length` tokens of text, for tasks that use a haystack.

    Raises:
        DataError: no item fits the length, or the tokenizer cannot encode comparable wrong answers.
    """
    return FORMS[bench.task.name](TaskRequest(bench, index, length, depth, haystack))  # type: ignore[attr-defined]
