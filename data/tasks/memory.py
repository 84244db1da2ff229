"""Tasks that look symbols up in the context: flip-flop, recall, indirect indexing, brackets."""

from typing import ClassVar, Literal

from pydantic import PositiveInt, model_validator

from data.random_draws import fractions
from data.tasks.symbols import EQUALS, Problem, SymbolTask, answered
from settings.fields import setting


class FlipFlopTask(SymbolTask):
    """Read the bit that was written last (arXiv:2306.00946): `w 1 i 0 r` → `1`, with every read
    scored. Lengths count instructions, each with a bit. The first writes, the last reads."""

    choices: ClassVar[int] = 2
    shortest = 2

    name: Literal["flip_flop"] = "flip_flop"
    ignore: float = setting(
        0.8,
        "probability that an instruction is to be ignored; the others read or write "
        "with equal probability. Sparse: 0.98, dense: 0.1",
        ge=0,
        lt=1,
    )

    @property
    def alphabet(self):
        return ["w", "r", "i", "0", "1"]

    def problem(self, draws, length):
        uniform = fractions(draws.bits("instructions", length)).tolist()
        written = draws.below("bits", length, 2)
        symbols = []
        is_answer = []
        stored = ""
        for i, (number, bit) in enumerate(zip(uniform, written, strict=True)):
            instruction = "i"
            if number >= self.ignore:
                instruction = "w" if number < (1 + self.ignore) / 2 else "r"
            if i == 0:
                instruction = "w"
            elif i == length - 1:
                instruction = "r"
            if instruction == "w":
                stored = str(bit)
            is_read = instruction == "r"
            symbols += [instruction, stored if is_read else str(bit)]
            is_answer += [False, is_read]
        return Problem(symbols, is_answer)


class AssociativeRecallTask(SymbolTask):
    """Multi-query associative recall (arXiv:2312.04927): `k3 v0 k7 v2 ? k7` → `v2`, then further
    keys, each followed by its value. Lengths count the pairs; keys of an item are distinct."""

    name: Literal["associative_recall"] = "associative_recall"
    keys: PositiveInt = setting(64, "number of keys, k0, k1, ...")
    values: int = setting(64, "number of values, v0, v1, ...", ge=2)
    queries: PositiveInt = setting(4, "queried keys per item; all keys if the item has fewer")

    @property
    def alphabet(self):
        keys = [f"k{i}" for i in range(self.keys)]
        return [*keys, *(f"v{i}" for i in range(self.values)), "?"]

    @property
    def choices(self):
        return self.values

    @property
    def longest(self):
        return self.keys

    def problem(self, draws, length):
        keys = draws.distinct("keys", length, self.keys)
        values = draws.below("values", length, self.values)
        asked = draws.distinct("asked", min(self.queries, length), length)
        symbols = []
        for key, value in zip(keys, values, strict=True):
            symbols += [f"k{key}", f"v{value}"]
        symbols.append("?")
        is_answer = [False] * len(symbols)
        for i in asked:
            symbols += [f"k{keys[i]}", f"v{values[i]}"]
            is_answer += [False, True]
        return Problem(symbols, is_answer)


class IndirectIndexingTask(SymbolTask):
    """The symbol at a distance from a given symbol (arXiv:2509.10534): `4 9 1 7 ? 9 +2 =` → `7`,
    then further questions. Lengths count the symbols of the string, which are distinct."""

    shortest = 2

    name: Literal["indirect_indexing"] = "indirect_indexing"
    symbols: int = setting(52, "number of symbols, 0, 1, 2, ...", ge=2)
    shift: PositiveInt = setting(10, "largest distance, to the left (-) or right (+)")
    queries: PositiveInt = setting(1, "questions per item")

    @property
    def alphabet(self):
        shifts = [f"{sign}{k}" for k in range(1, self.shift + 1) for sign in "+-"]
        return [*map(str, range(self.symbols)), *shifts, "?", EQUALS]

    @property
    def choices(self):
        return self.symbols

    @property
    def longest(self):
        return self.symbols

    def problem(self, draws, length):
        string = [str(i) for i in draws.distinct("symbols", length, self.symbols)]
        symbols = list(string)
        is_answer = [False] * length
        sources = draws.below("sources", self.queries, length)
        targets = draws.below("targets", self.queries, 1 << 32)
        for here, random in zip(sources, targets, strict=True):
            first = max(0, here - self.shift)
            stop = min(length, here + self.shift + 1)
            others = [*range(first, here), *range(here + 1, stop)]
            there = others[random % len(others)]
            symbols += ["?", string[here], f"{there - here:+d}", EQUALS, string[there]]
            is_answer += [False] * 4 + [True]
        return Problem(symbols, is_answer)


class DyckTask(SymbolTask):
    """Close all open brackets (Dyck language, arXiv:2105.11115): `(0 (1 )1 (1 =` → `)1 )0`. Lengths
    count pairs of brackets, including those of the answer."""

    name: Literal["dyck"] = "dyck"
    kinds: int = setting(2, "kinds of brackets", ge=1, le=20)
    depth: PositiveInt = setting(8, "largest number of open brackets")

    @model_validator(mode="after")
    def _some_choice(self):
        if self.kinds == self.depth == 1:
            raise ValueError("kinds=1 and depth=1 leave a single answer; increase one of them")
        return self

    @property
    def alphabet(self):
        return [f"{side}{kind}" for kind in range(self.kinds) for side in "()"] + [EQUALS]

    @property
    def choices(self):
        return self.kinds

    def problem(self, draws, length):
        kinds = draws.below("kinds", length, self.kinds)
        opens = draws.below("opens", 2 * length, 2)
        string: list[str] = []
        stack: list[int] = []
        for kind in kinds:
            while stack and (len(stack) == self.depth or not opens[len(string)]):
                string.append(f"){stack.pop()}")
            string.append(f"({kind}")
            stack.append(kind)
        return answered([*string, EQUALS], [f"){kind}" for kind in reversed(stack)])
