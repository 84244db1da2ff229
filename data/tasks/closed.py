"""Tasks without context text: recall, copying, counting, sums. Length scales the problem itself."""

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from data.tasks.items import Task, TaskItem, TaskRequest
from errors import DataError

LEAST_DIGITS = 3  # minimum digits of a summand


class RecallTask(Task):
    """Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): as many key-value pairs as fit,
    then a key, whose value is the answer. `ab 42` and more pairs, one per line; `ab` → ` 42`"""

    hides: ClassVar[bool] = True

    name: Literal["recall"] = "recall"
    letters: int = Field(
        2, ge=1, le=4, description="letters per key; the keys of an item are distinct"
    )
    digits: int = Field(2, ge=1, le=9, description="digits per value")
    choices: int = Field(
        4, ge=2, le=64, description="number of values compared; chance is 1/choices"
    )
    queries: int = Field(
        1, ge=1, description="maximum number of queried keys per training item; evaluation asks one"
    )

    def make(self, request: TaskRequest) -> TaskItem:
        values = request.numbers("values", self.digits, self.choices)
        most = 26**self.letters
        keys = request.distinct("keys", min(most, request.length), most).tolist()
        names = [
            "".join(chr(97 + n // 26**place % 26) for place in range(self.letters)) for n in keys
        ]
        # The first pairs have distinct values, the answer choices. They are in the item at every length.
        picks = [*range(self.choices), *request.draw("picks", len(names), len(values)).tolist()]
        pairs = [
            request.encode(name) + request.encode(f"{values[i]}\n")
            for name, i in zip(names, picks, strict=False)
        ]
        asked = [0, *request.earlier_questions(self.queries, self.choices)]
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
        order = (1 + request.distinct("order", count - 1, count - 1)).tolist()
        place = round(request.depth * (count - 1))
        order.insert(place, 0)
        start = sum(len(pairs[i]) for i in order[:place])
        name = request.encode(names[0])
        prompt = [token for i in [*order, *asked[1:]] for token in pairs[i]] + name
        answer, *others = [request.encode(f"{value}\n") for value in values[: self.choices]]
        return TaskItem(
            prompt, answer, others, place / (count - 1), len(prompt) - start - len(name)
        )


class CopyTask(Task):
    """Copy a string of as many symbols as fit. Wrong answers: two adjacent symbols swapped.
    `copy 4821:` → ` 4821`"""

    name: Literal["copy"] = "copy"
    alphabet: str = Field(
        "0123456789", min_length=2, description="symbols; each digit is one token"
    )
    separator: str = Field("", description="text between symbols")
    choices: int = Field(
        4, ge=2, le=64, description="number of answers compared; chance is 1/choices"
    )

    def rewritten(self, symbols: list[str]) -> list[str]:
        return symbols

    def make(self, request: TaskRequest) -> TaskItem:
        drawn = request.draw("symbols", request.length, len(self.alphabet)).tolist()
        symbols = [self.alphabet[i] for i in drawn]

        def question(some: list[str]) -> list[int]:
            return request.encode_once(f"{self.name} {self.separator.join(some)}:")

        def answer(some: list[str]) -> list[int]:
            return request.encode_once(f" {self.separator.join(self.rewritten(some))}\n")

        least = 3 if request.is_scored else 1
        count = _largest(
            request, least, lambda n: len(question(symbols[:n])) + len(answer(symbols[:n]))
        )
        symbols = symbols[:count]
        correct = answer(symbols)
        others = []
        for i in request.distinct(f"exchanged {count}", count - 1, count - 1).tolist():
            other = answer([*symbols[:i], symbols[i + 1], symbols[i], *symbols[i + 2 :]])
            if len(other) == len(correct) and other != correct and other not in others:
                others.append(other)
            if len(others) == self.choices - 1:
                break
        if request.is_scored and len(others) < self.choices - 1:
            raise DataError(
                f"a string of {count} symbols has only {len(others)} swaps of neighbors to compare with, but "
                f"choices={self.choices} requires more; decrease choices or increase the length"
            )
        return TaskItem(question(symbols), correct, others)


class ReverseTask(CopyTask):
    """Reverse a string of as many symbols as fit. Wrong answers: two adjacent symbols swapped.
    `reverse 4821:` → ` 1284`"""

    name: Literal["reverse"] = "reverse"  # pyright: ignore[reportIncompatibleVariableOverride]

    def rewritten(self, symbols: list[str]) -> list[str]:
        return symbols[::-1]


class ParityTask(Task):
    """The number of ones among as many binary digits as fit, modulo `modulus`. Wrong answers: all other
    remainders. `ones 10110:` → ` 1`"""

    name: Literal["parity"] = "parity"
    modulus: int = Field(2, ge=2, le=10, description="modulus, 2 for parity; chance is 1/modulus")

    def make(self, request: TaskRequest) -> TaskItem:
        digits = "".join(map(str, request.draw("bits", request.length, 2).tolist()))
        answers = [request.encode(f" {value}\n") for value in range(self.modulus)]

        def question(count: int) -> list[int]:
            return request.encode_once(f"ones {digits[:count]}:")

        count = _largest(request, 1, lambda n: len(question(n)) + len(answers[0]))
        answer = answers.pop(digits[:count].count("1") % self.modulus)
        return TaskItem(question(count), answer, answers)


class AdditionTask(Task):
    """The sum of two numbers of as many digits as fit, with at least one carry. Wrong answers: sums with one
    carry omitted or added. `0993+4821=` → `05814`, padded with zeros so that the length of an answer gives no
    information about it"""

    name: Literal["addition"] = "addition"
    backwards: bool = Field(
        False, description="write all three numbers from the last digit to the first"
    )
    choices: int = Field(
        4, ge=2, le=16, description="number of answers compared; chance is 1/choices"
    )

    def make(self, request: TaskRequest) -> TaskItem:
        # Digits are drawn from last to first, so that a longer item adds leading digits.
        a, b = (request.draw(what, request.length, 10).tolist() for what in ("a", "b"))
        if all(x + y < 10 for x, y in zip(a[:LEAST_DIGITS], b, strict=False)):
            a[0], b[0] = 9 - a[0], 9 - b[0]
            b[0] += a[0] + b[0] == 9 and b[0] < 9
            a[0] += a[0] + b[0] == 9

        def written(digits: list[int]) -> str:
            return "".join(map(str, digits if self.backwards else digits[::-1]))

        def result(count: int, wrong: int | None = None) -> list[int]:
            """Digits of the sum. If `wrong` is given, the carry into that column is inverted."""
            carry = 0
            out = []
            for column in range(count):
                total = a[column] + b[column] + (carry ^ (column == wrong))
                out.append(total % 10)
                carry = total // 10
            return request.encode_once(f"{written([*out, carry ^ (wrong == count)])}\n")

        def question(count: int) -> list[int]:
            return request.encode_once(f"{written(a[:count])}+{written(b[:count])}=")

        count = _largest(request, LEAST_DIGITS, lambda n: len(question(n)) + len(result(n)))
        answer = result(count)
        columns = (1 + request.distinct(f"columns of {count}", count, count)).tolist()
        others = [
            other for other in (result(count, k) for k in columns) if len(other) == len(answer)
        ]
        if request.is_scored and len(others) < self.choices - 1:
            raise DataError(
                f"sums of {count} digits have only {len(others)} carries to invert, but "
                f"choices={self.choices} requires more; decrease choices or increase the length"
            )
        return TaskItem(question(count), answer, others[: self.choices - 1])


def _largest(request: TaskRequest, least: int, tokens: Callable[[int], int]) -> int:
    """The largest count for which tokens(count), an increasing function, is at most the requested length.
    Raises DataError if it is below `least`.
    """
    low = 0
    high = request.length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens(middle) <= request.length else (low, middle - 1)
    if low < least:
        raise request.too_short(tokens(least))
    return low
