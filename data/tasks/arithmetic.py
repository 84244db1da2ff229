"""Arithmetic on symbols: sums of digits modulo a number, parity, sums of decimal numbers."""

from itertools import accumulate
from typing import ClassVar, Literal

from pydantic import model_validator

from data.tasks.symbols import EQUALS, CoupledTask, answered
from settings.fields import setting

DIGITS = [*map(str, range(10))]


class ModularAdditionTask(CoupledTask):
    """The sum of several numbers modulo `modulus`: `3 4 4 =` → `1` modulo 10. Lengths count the
    numbers. With a scratchpad, the answer is the sum after each number: `3 7 1`."""

    name: Literal["modular_addition"] = "modular_addition"
    modulus: int = setting(10, "modulus", ge=2)
    scratchpad: bool = setting(False, "answer with all partial sums")

    @model_validator(mode="after")
    def _positions_need_scratchpad(self):
        if self.has_positions and not self.scratchpad:
            raise ValueError("positions=coupled requires scratchpad=true")
        return self

    @property
    def choices(self):
        return self.modulus

    def problem(self, draws, length):
        numbers = draws.below("numbers", length, self.modulus)
        sums = [str(total % self.modulus) for total in accumulate(numbers)]
        prompt = [*map(str, numbers), EQUALS]
        return answered(prompt, sums if self.scratchpad else sums[-1:])

    def positions_of(self, prompt, more):
        """As in arXiv:2405.20671: number i and partial sum i have position i + 2, `=` has 1."""
        n = prompt.index(EQUALS)
        return [*range(2, n + 2), 1, *range(2, len(prompt) + more - n + 1)]


class ParityTask(ModularAdditionTask):
    """Whether the number of ones is odd: `1 0 1 1 =` → `1`. Lengths count binary digits. With a
    scratchpad, the answer is the parity after each digit: `1 1 0 1`."""

    name: Literal["parity"] = "parity"  # pyright: ignore[reportIncompatibleVariableOverride]
    modulus: Literal[2] = 2  # pyright: ignore[reportIncompatibleVariableOverride]


class AdditionTask(CoupledTask):
    """The sum of two numbers with the same number of digits: `0 9 + 4 8 =` → `0 5 7`. The answer
    always has one more digit, so its length gives no information about it. Lengths count the digits
    of one number. A scratchpad lists the carry, the two digits and the digit of the sum for each
    column, from the last: `0 9 8 7 1 0 4 5`, then `:` and the sum."""

    choices: ClassVar[int] = 10

    name: Literal["addition"] = "addition"
    positions: Literal["plain", "coupled", "abacus"] = setting(
        "plain",
        "plain: 0, 1, 2, ..., or as data.positions draws them; coupled: the same "
        "position for digits of equal significance (arXiv:2405.20671); abacus: place of a digit in "
        "its number, 0 for other symbols (arXiv:2405.17399)",
    )
    order: Literal["plain", "reversed", "reversed_answer"] = setting(
        "plain",
        "reversed: all numbers are written from the last digit to the first; reversed_answer: only "
        "the sum is",
    )
    scratchpad: bool = setting(False, "write the columns before the sum")
    hints: int = setting(
        0,
        "number of index symbols. One precedes each digit, the same before digits of equal "
        "significance (arXiv:2310.16028); an item uses consecutive index symbols; 0: none",
        ge=0,
    )

    @model_validator(mode="after")
    def _consistent(self):
        chosen = [self.has_positions, self.scratchpad, self.hints > 0]
        if sum(chosen) > 1:
            raise ValueError("set only one of positions, scratchpad and hints")
        return self

    @property
    def alphabet(self):
        return [*DIGITS, "+", EQUALS, ":", *(f"i{k}" for k in range(self.hints))]

    @property
    def longest(self):
        return self.hints - 1 if self.hints else None

    def problem(self, draws, length):
        a = draws.below("a", length, 10)  # the last digit first
        b = draws.below("b", length, 10)
        carry = 0
        total = []
        columns = []
        for x, y in zip(a, b, strict=True):
            columns += [str(carry), str(x), str(y)]
            carry, digit = divmod(x + y + carry, 10)
            columns.append(str(digit))
            total.append(digit)
        total.append(carry)
        hints = []
        if self.hints:
            first = draws.one("hints", self.hints - length)
            hints = [f"i{k}" for k in range(first, first + length + 1)]
        is_reversed = self.order == "reversed"
        first_number = _written(a, hints, is_reversed)
        second_number = _written(b, hints, is_reversed)
        prompt = [*first_number, "+", *second_number, EQUALS]
        answer = _written(total, hints, self.order != "plain")
        if self.scratchpad:
            answer = [*columns, ":", *answer]
        return answered(prompt, answer)

    def positions_of(self, prompt, more):
        """Coupled: a digit of significance k = 0, 1, ... has position k + 2, `+` and `=` have 1;
        `=` before an answer that begins with its first digit has the position after that
        digit's."""
        first = prompt.index("+")
        second = prompt.index(EQUALS) - first - 1
        rest = len(prompt) + more - first - second - 2
        if self.positions == "abacus":
            return [*range(1, first + 1), 0, *range(1, second + 1), 0, *range(1, rest + 1)]
        a = list(range(2, first + 2))
        b = list(range(2, second + 2))
        if self.order != "reversed":
            a.reverse()
            b.reverse()
        last = max(first, second) + 2  # position of the first digit of the sum
        equals = 1
        answer = list(range(2, rest + 2))
        if self.order == "plain":
            equals = last + 1
            answer = [max(1, last - i) for i in range(rest)]
        return [*a, 1, *b, equals, *answer]


def _written(digits: list[int], hints: list[str], last_first: bool) -> list[str]:
    """A number, given with its last digit first, with the hint of each digit before it."""
    symbols = [*map(str, digits)]
    if hints:
        pairs = zip(hints, symbols, strict=False)  # a number may have fewer digits than hints
        symbols = [f"{hint} {symbol}" for hint, symbol in pairs]
    return " ".join(symbols if last_first else symbols[::-1]).split()
