"""Tasks on strings of symbols: copying, sorting, counting."""

from collections import Counter
from typing import ClassVar, Literal

import numpy as np
from pydantic import PositiveInt, model_validator

from data.random_draws import NamedDraws, fractions
from data.tasks.symbols import EQUALS, CoupledTask, SymbolTask, answered
from settings.fields import setting

# task counting: weights of the statements, and the largest value of a variable
SET = 1
INCREMENT = 7
PASS = 50
MOST = 10


class CopyTask(CoupledTask):
    """Copy, reverse or sort a string: `2 0 1 =` → `2 0 1`, `1 0 2` or `0 1 2`. With `distinct:
    false` and few symbols, copying is the repeated copy of arXiv:2410.02140."""

    name: Literal["copy", "reverse", "sort"] = "copy"
    symbols: int = setting(150, "number of symbols, 0, 1, 2, ...", ge=2)
    distinct: bool = setting(True, "no symbol occurs twice in a string")

    @model_validator(mode="after")
    def _sorted_in_plain_positions(self):
        if self.name == "sort" and self.has_positions:
            raise ValueError("the task sort has no coupled positions; set positions=plain")
        return self

    @property
    def choices(self):
        return self.symbols

    @property
    def longest(self):
        return self.symbols if self.distinct else None

    def problem(self, draws, length):
        draw = draws.distinct if self.distinct else draws.below
        drawn = draw("symbols", length, self.symbols)
        answer = drawn
        if self.name == "reverse":
            answer = drawn[::-1]
        elif self.name == "sort":
            answer = sorted(drawn)
        return answered([*map(str, drawn), EQUALS], [*map(str, answer)])

    def positions_of(self, prompt, more):
        n = prompt.index(EQUALS)
        answer = len(prompt) + more - n - 1
        if self.name == "reverse":
            return [*range(1, n + 2), *(max(1, n - i) for i in range(answer))]
        return [*range(2, n + 2), 1, *range(2, answer + 2)]


class SelectiveCopyTask(SymbolTask):
    """Copy the symbols that are not blank (arXiv:2312.00752): `. 3 . 1 =` → `3 1`. Lengths count
    blanks and symbols."""

    name: Literal["selective_copy"] = "selective_copy"
    symbols: int = setting(16, "number of symbols, 0, 1, 2, ...", ge=2)
    copied: PositiveInt = setting(16, "symbols to copy in each item")

    @property
    def alphabet(self):
        return [*map(str, range(self.symbols)), ".", EQUALS]

    @property
    def choices(self):
        return self.symbols

    @property
    def shortest(self):
        return self.copied

    def problem(self, draws, length):
        answer = [str(i) for i in draws.below("symbols", self.copied, self.symbols)]
        string = ["."] * length
        places = sorted(draws.distinct("places", self.copied, length))
        for place, symbol in zip(places, answer, strict=True):
            string[place] = symbol
        return answered([*string, EQUALS], answer)


class MajorityTask(SymbolTask):
    """The most frequent symbol of a string, without ties: `1 0 1 =` → `1`. Several interleaved
    strings have one answer each."""

    name: Literal["majority"] = "majority"
    symbols: int = setting(2, "number of symbols, 0, 1, 2, ...", ge=2)
    even: bool = setting(
        False,
        "true: all symbols are equally likely; false: every item has its own "
        "probabilities, so that all counts of the symbols are equally likely",
    )
    interleaved: int = setting(1, "number of strings; symbols alternate among them", ge=1)

    @property
    def choices(self):
        return self.symbols

    @property
    def shortest(self):
        return self.interleaved

    def problem(self, draws, length):
        string = [""] * length
        answer = []
        for first in range(self.interleaved):
            places = range(first, length, self.interleaved)
            chosen = self._without_tie(draws, first, len(places))
            for place, symbol in zip(places, chosen, strict=True):
                string[place] = symbol
            answer.append(Counter(chosen).most_common(1)[0][0])
        return answered([*string, EQUALS], answer)

    def _without_tie(self, draws: NamedDraws, which: int, length: int) -> list[str]:
        """A string with a unique most frequent symbol."""
        attempt = 0
        while True:
            random = NamedDraws(*draws.key, which).bits(attempt, self.symbols + length)
            uniform = fractions(random)
            weights = np.ones(self.symbols)
            if not self.even:  # uniform over all distributions
                weights = -np.log1p(-uniform[: self.symbols])
            bounds = np.cumsum(weights) / weights.sum()
            chosen = np.searchsorted(bounds, uniform[self.symbols :], side="right")
            chosen = np.minimum(chosen, self.symbols - 1)  # the last bound may be rounded
            counts = np.sort(np.bincount(chosen, minlength=self.symbols))
            if counts[-1] > counts[-2]:
                return [str(i) for i in chosen.tolist()]
            attempt += 1


class CountingTask(SymbolTask):
    """The value of a variable after a program (arXiv:2405.18719): `a=0 pass a++ pass print a` →
    `1`. Each statement is one symbol, and lengths count statements. As in the authors' generator,
    statements are drawn with weights 1 : 7 : 50, only variables that were set are incremented, up
    to 10, and the last statement prints one of them."""

    choices: ClassVar[int] = MOST + 1

    name: Literal["counting"] = "counting"
    variables: int = setting(3, "number of variables", ge=1, le=26)

    @property
    def names(self) -> list[str]:
        return [chr(ord("a") + i) for i in range(self.variables)]

    @property
    def alphabet(self):
        statements = [name + end for name in self.names for end in ("=0", "++")]
        return [*map(str, range(MOST + 1)), *self.names, *statements, "pass", "print"]

    def problem(self, draws, length):
        attempt = 0
        values: dict[str, int] = {}
        while not values:
            program, values = self._run(draws, attempt, length)
            attempt += 1
        name = list(values)[draws.one("asked", len(values))]
        return answered([*program, "print", name], [str(values[name])])

    def _run(
        self,
        draws: NamedDraws,
        attempt: int,
        length: int,
    ) -> tuple[list[str], dict[str, int]]:
        """A program, and the variables that it sets."""
        kinds = draws.below(f"kinds {attempt}", length, SET + PASS + INCREMENT)
        others = draws.below(f"others {attempt}", length, SET + PASS)
        which = draws.below(f"variables {attempt}", length, 1 << 32)
        values: dict[str, int] = {}
        program = []
        for kind, other, random in zip(kinds, others, which, strict=True):
            grown = list(values)[random % len(values)] if values else None
            if kind >= SET + PASS and grown is not None and values[grown] < MOST:
                values[grown] += 1
                program.append(f"{grown}++")
            elif (other if kind >= SET + PASS else kind) < SET:
                name = self.names[random % self.variables]
                values[name] = 0
                program.append(f"{name}=0")
            else:
                program.append("pass")
        return program, values
