"""Associative recall in text."""

from typing import Literal

import numpy as np

from data.tasks.items import Task, TaskItem
from errors import DataError
from settings.fields import setting


class RecallTask(Task):
    """Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): as many key-value pairs
    as fit, then a key, whose value is the answer. `ab 42` and more pairs, one per line; `ab` → `
    42`"""

    name: Literal["recall"] = "recall"
    letters: int = setting(2, "letters per key; the keys of an item are distinct", ge=1, le=4)
    digits: int = setting(2, "digits per value", ge=1, le=9)
    choices: int = setting(4, "number of values compared; chance is 1/choices", ge=2, le=64)

    def make(self, request):
        most = 26**self.letters
        numbers = request.draws.distinct("keys", min(most, request.length), most).tolist()
        keys = [self._spelled(number) for number in numbers]
        values = request.numbers(self.digits, self.choices)
        # The first pairs have distinct values, the choices. They are in the item at every length.
        drawn = request.draws.below("picks", len(keys), len(values)).tolist()
        pairs = []
        for key, i in zip(keys, [*range(self.choices), *drawn], strict=False):
            pairs.append(request.encode(key) + request.encode(f"{values[i]}\n"))
        asked = [0, *request.earlier_questions(self.choices)]
        room = request.length - sum(len(pairs[i]) for i in asked)
        sizes = np.cumsum([len(pair) for pair in pairs])
        count = int(np.searchsorted(sizes, room, side="right"))
        if count < self.choices:
            raise request.too_short(request.length - room + int(sizes[self.choices - 1]))
        if count == most:
            raise DataError(
                f"an item of {request.length} tokens requires more than the {most:,} keys of "
                f"{self.letters} letters; increase letters"
            )
        order = (1 + request.draws.distinct("order", count - 1, count - 1)).tolist()
        place = round(request.depth * (count - 1))
        order.insert(place, 0)  # the pair whose value is the answer
        start = sum(len(pairs[i]) for i in order[:place])
        question = request.encode(keys[0])
        prompt = []
        for i in [*order, *asked[1:]]:
            prompt += pairs[i]
        prompt += question
        answer, *others = [request.encode(f"{value}\n") for value in values[: self.choices]]
        return TaskItem(
            prompt=prompt,
            answer=answer,
            others=others,
            depth=place / (count - 1),
            distance=len(prompt) - start - len(question),
        )

    def _spelled(self, number: int) -> str:
        """A number as letters, the last digit to base 26 first."""
        digits = [number // 26**place % 26 for place in range(self.letters)]
        return "".join(chr(ord("a") + digit) for digit in digits)
