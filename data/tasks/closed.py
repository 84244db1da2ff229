"""Tasks without context text: recall, copying, counting, sums. Length scales the problem itself."""

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from data.tasks.items import Task, TaskItem, TaskRequest
from errors import DataError

LEAST_DIGITS = 3  # minimum digits of a summand
LEAST_SYMBOLS = 3  # minimum symbols of a scored string


class RecallTask(Task):
    """Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): as many key-value pairs
    as fit, then a key, whose value is the answer. `ab 42` and more pairs, one per line; `ab` → `
    42`"""

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
        1,
        ge=1,
        description="maximum number of queried keys per training item; evaluation asks one",
    )

    def make(self, request: TaskRequest) -> TaskItem:
        most = 26**self.letters
        numbers = request.distinct("keys", min(most, request.length), most).tolist()
        keys = [self._spelled(number) for number in numbers]
        values = request.numbers("values", self.digits, self.choices)
        # The first pairs have distinct values, the choices. They are in the item at every length.
        drawn = request.draw("picks", len(keys), len(values)).tolist()
        pairs = []
        for key, i in zip(keys, [*range(self.choices), *drawn], strict=False):
            pairs.append(request.encode(key) + request.encode(f"{values[i]}\n"))
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

        def size(count: int) -> int:
            question = self._question(request, symbols[:count])
            return len(question) + len(self._answer(request, symbols[:count]))

        count = _largest(
            request,
            LEAST_SYMBOLS if request.is_scored else 1,
            size,
        )
        symbols = symbols[:count]
        answer = self._answer(request, symbols)
        others: list[list[int]] = []
        for i in request.distinct(f"exchanged {count}", count - 1, count - 1).tolist():
            swapped = [*symbols[:i], symbols[i + 1], symbols[i], *symbols[i + 2 :]]
            other = self._answer(request, swapped)
            if len(other) == len(answer) and other != answer and other not in others:
                others.append(other)
            if len(others) == self.choices - 1:
                break
        if request.is_scored and len(others) < self.choices - 1:
            raise DataError(
                f"a string of {count} symbols has only {len(others)} swaps of neighbors to "
                f"compare with, but choices={self.choices} requires more; decrease choices or "
                "increase the length"
            )
        return TaskItem(self._question(request, symbols), answer, others)

    def _question(self, request: TaskRequest, symbols: list[str]) -> list[int]:
        return request.encode_once(f"{self.name} {self.separator.join(symbols)}:")

    def _answer(self, request: TaskRequest, symbols: list[str]) -> list[int]:
        return request.encode_once(f" {self.separator.join(self.rewritten(symbols))}\n")


class ReverseTask(CopyTask):
    """Reverse a string of as many symbols as fit. Wrong answers: two adjacent symbols swapped.
    `reverse 4821:` → ` 1284`"""

    name: Literal["reverse"] = "reverse"  # pyright: ignore[reportIncompatibleVariableOverride]

    def rewritten(self, symbols: list[str]) -> list[str]:
        return symbols[::-1]


class ParityTask(Task):
    """The number of ones among as many binary digits as fit, modulo `modulus`. Wrong answers: all
    other remainders. `ones 10110:` → ` 1`"""

    name: Literal["parity"] = "parity"
    modulus: int = Field(
        2,
        ge=2,
        le=10,
        description="modulus, 2 for parity; chance is 1/modulus",
    )

    def make(self, request: TaskRequest) -> TaskItem:
        digits = "".join(map(str, request.draw("bits", request.length, 2).tolist()))
        answers = [request.encode(f" {value}\n") for value in range(self.modulus)]

        def question(count: int) -> list[int]:
            return request.encode_once(f"ones {digits[:count]}:")

        count = _largest(
            request,
            1,
            lambda n: len(question(n)) + len(answers[0]),
        )
        answer = answers.pop(digits[:count].count("1") % self.modulus)
        return TaskItem(question(count), answer, answers)


class AdditionTask(Task):
    """The sum of two numbers of as many digits as fit, with at least one carry. Wrong answers: sums
    with one carry omitted or added. `0993+4821=` → `05814`, padded with zeros so that the length of
    an answer gives no information about it"""

    name: Literal["addition"] = "addition"
    backwards: bool = Field(
        False, description="write all three numbers from the last digit to the first"
    )
    choices: int = Field(
        4, ge=2, le=16, description="number of answers compared; chance is 1/choices"
    )

    def make(self, request: TaskRequest) -> TaskItem:
        # Digits are drawn from last to first, so that a longer item adds leading digits.
        a = request.draw("a", request.length, 10).tolist()
        b = request.draw("b", request.length, 10).tolist()
        if all(x + y < 10 for x, y in zip(a[:LEAST_DIGITS], b, strict=False)):
            _force_carry(a, b)

        def question(count: int) -> list[int]:
            return request.encode_once(f"{self._written(a[:count])}+{self._written(b[:count])}=")

        def result(count: int, wrong: int | None = None) -> list[int]:
            digits = _sum_digits(a[:count], b[:count], wrong)
            return request.encode_once(f"{self._written(digits)}\n")

        count = _largest(
            request,
            LEAST_DIGITS,
            lambda n: len(question(n)) + len(result(n)),
        )
        answer = result(count)
        columns = 1 + request.distinct(f"columns of {count}", count, count)
        others = [result(count, column) for column in columns.tolist()]
        others = [other for other in others if len(other) == len(answer)]
        if request.is_scored and len(others) < self.choices - 1:
            raise DataError(
                f"sums of {count} digits have only {len(others)} carries to invert, but "
                f"choices={self.choices} requires more; decrease choices or increase the length"
            )
        return TaskItem(question(count), answer, others[: self.choices - 1])

    def _written(self, digits: list[int]) -> str:
        return "".join(map(str, digits if self.backwards else digits[::-1]))


def _force_carry(a: list[int], b: list[int]) -> None:
    """Change the last digits of two numbers, whose sum is below 10, so that it is at least 10."""
    a[0] = 9 - a[0]
    b[0] = 9 - b[0]
    if a[0] + b[0] == 9 and b[0] < 9:
        b[0] += 1
    if a[0] + b[0] == 9:
        a[0] += 1


def _sum_digits(a: list[int], b: list[int], wrong: int | None) -> list[int]:
    """Digits of the sum, last first. If `wrong` is given, the carry into that column is
    inverted."""
    carry = 0
    digits = []
    for column, (x, y) in enumerate(zip(a, b, strict=True)):
        if column == wrong:
            carry = 1 - carry
        carry, digit = divmod(x + y + carry, 10)
        digits.append(digit)
    if wrong == len(a):
        carry = 1 - carry
    return [*digits, carry]


def _largest(
    request: TaskRequest,
    least: int,
    tokens: Callable[[int], int],
) -> int:
    """The largest count for which tokens(count), an increasing function, is at most the requested
    length. Raises DataError if it is below `least`.
    """
    low = 0
    high = request.length
    while low < high:
        middle = (low + high + 1) // 2
        if tokens(middle) <= request.length:
            low = middle
        else:
            high = middle - 1
    if low < least:
        raise request.too_short(tokens(least))
    return low
