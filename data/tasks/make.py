"""From a task's settings to its items."""

from collections.abc import Callable

import numpy as np

from data.tasks import closed, hidden
from data.tasks.items import Ask, Bench, Item

FORMS: dict[str, Callable[[Ask], Item]] = {
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
    bench: Bench, index: int, length: int, depth: float = 0.0, haystack: np.ndarray = NO_TEXT
) -> Item:
    """Item `index` of a task with at most `length` tokens (exactly as many, where text is around it).

    The same index at another length is the same question in a longer or shorter context; for tasks without
    text, in which the length is the difficulty, the longer item goes on where the shorter one ends.

    Args:
        bench: task, tokenizer, purpose and seed.
        index: which item.
        length: tokens of prompt and answer together, BOS not counted.
        depth: where the answer is hidden, 0 (far away) to 1 (just before the question).
        haystack: at least `length` tokens of text, for tasks that read some.

    Raises:
        DataError: the length holds no such item; the tokenizer spells no fair distractors.
    """
    return FORMS[bench.task.name](Ask(bench, index, length, depth, haystack))  # type: ignore[attr-defined]
