"""Tasks without context text: associative recall, copying, counting, sums. Length scales the
problem itself.
"""

from typing import cast

import numpy as np

from data.errors import DataError
from data.tasks.items import TaskItem, TaskRequest
from data.tasks.settings import AdditionTask, CopyTask, ParityTask, RecallTask

LEAST_DIGITS = 3  # minimum digits of a summand


def recall(ask: TaskRequest) -> TaskItem:
    """`ab 42` and many more pairs, one per line; `ab` → ` 42`"""
    task = cast(RecallTask, ask.bench.task)
    values, most = ask.numbers("values", task.digits, task.choices), 26**task.letters
    names = [_letters(n, task.letters) for n in ask.different("keys", min(most, ask.length), most).tolist()]
    # The first pairs have distinct values, the answer choices. They are in the item at every length.
    picks = [*range(task.choices), *ask.draw("picks", len(names), len(values)).tolist()]
    pairs = [ask.encode(name) + ask.encode(f"{values[i]}\n") for name, i in zip(names, picks, strict=False)]
    before = int(ask.draw("asked", 1, task.queries)[0])
    asked = [0, *ask.draw("earlier", before, task.choices).tolist()]
    room = ask.length - sum(len(pairs[i]) for i in asked)
    sizes = np.cumsum([len(pair) for pair in pairs])
    count = int(np.searchsorted(sizes, room, side="right"))
    if count < task.choices:
        raise ask.too_short(ask.length - room + int(sizes[task.choices - 1]))
    if count == most:
        raise DataError(
            f"an item of {ask.length} tokens has room for more than the {most:,} keys of {task.letters} "
            "letters: raise letters"
        )
    order = (1 + ask.different("order", count - 1, count - 1)).tolist()
    place = round(ask.depth * (count - 1))
    order.insert(place, 0)
    start = sum(len(pairs[i]) for i in order[:place])
    name = ask.encode(names[0])
    prompt = [token for i in [*order, *asked[1:]] for token in pairs[i]] + name
    answer, *others = [ask.encode(f"{value}\n") for value in values[: task.choices]]
    return TaskItem(prompt, answer, others, place / (count - 1), len(prompt) - start - len(name))


def _letters(number: int, letters: int) -> str:
    return "".join(chr(97 + number // 26**place % 26) for place in range(letters))


def copy(ask: TaskRequest) -> TaskItem:
    """`copy 4821:` → ` 4821`"""
    return _string(ask, "copy", lambda symbols: symbols)


def reverse(ask: TaskRequest) -> TaskItem:
    """`reverse 4821:` → ` 1284`"""
    return _string(ask, "reverse", lambda symbols: symbols[::-1])


def _string(ask: TaskRequest, word: str, change) -> TaskItem:
    task = cast(CopyTask, ask.bench.task)
    drawn = ask.draw("symbols", ask.length, len(task.alphabet)).tolist()
    symbols = [task.alphabet[i] for i in drawn]

    def spelled(some: list[str]) -> tuple[list[int], list[int]]:
        right = f" {task.separator.join(change(some))}\n"
        return ask.encode_once(f"{word} {task.separator.join(some)}:"), ask.encode_once(right)

    def tokens(count: int) -> int:
        return sum(map(len, spelled(symbols[:count])))

    count = _most(tokens, ask.length)
    if count < 3:
        raise ask.too_short(tokens(3))
    prompt, answer = spelled(symbols[:count])
    return TaskItem(prompt, answer, _exchanged(ask, symbols[:count], answer, spelled))


def _exchanged(ask: TaskRequest, symbols: list[str], answer: list[int], spelled) -> list[list[int]]:
    """Answers with two adjacent symbols swapped, each at a different position."""
    wanted = cast(CopyTask, ask.bench.task).choices - 1
    found: list[list[int]] = []
    for i in ask.different(f"exchanged {len(symbols)}", len(symbols) - 1, len(symbols) - 1).tolist():
        other = spelled([*symbols[:i], symbols[i + 1], symbols[i], *symbols[i + 2 :]])[1]
        if len(other) == len(answer) and other != answer and other not in found:
            found.append(other)
        if len(found) == wanted:
            return found
    raise DataError(
        f"a string of {len(symbols)} symbols has only {len(found)} exchanges of neighbours to compare with, "
        f"{wanted} are wanted: lower choices, or raise the length"
    )


def parity(ask: TaskRequest) -> TaskItem:
    """`ones 10110:` → ` 1`, the number of ones modulo 2"""
    task = cast(ParityTask, ask.bench.task)
    bits = "".join(map(str, ask.draw("bits", ask.length, 2).tolist()))
    rest = [ask.encode(f" {value}\n") for value in range(task.modulus)]

    def tokens(count: int) -> int:
        return len(ask.encode_once(f"ones {bits[:count]}:")) + len(rest[0])

    count = _most(tokens, ask.length)
    if count < 1:
        raise ask.too_short(tokens(1))
    answer = rest.pop(bits[:count].count("1") % task.modulus)
    return TaskItem(ask.encode_once(f"ones {bits[:count]}:"), answer, rest)


def addition(ask: TaskRequest) -> TaskItem:
    """`0993+4821=` → `05814`, zero-padded so that the length of an answer gives no information about it"""
    task = cast(AdditionTask, ask.bench.task)
    # Digits are drawn from last to first, so that a longer item adds leading digits.
    a, b = (ask.draw(what, ask.length, 10).tolist() for what in ("a", "b"))
    if all(x + y < 10 for x, y in zip(a[:LEAST_DIGITS], b, strict=False)):
        a[0], b[0] = 9 - a[0], 9 - b[0]
        b[0] += a[0] + b[0] == 9 and b[0] < 9
        a[0] += a[0] + b[0] == 9

    def spelled(digits: list[int]) -> str:
        return "".join(map(str, digits if task.backwards else digits[::-1]))

    def result(count: int, wrong: int | None = None) -> list[int]:
        """Digits of the sum. If `wrong` is given, the carry into that column is inverted."""
        carry, out = 0, []
        for column in range(count):
            total = a[column] + b[column] + (carry ^ (column == wrong))
            out.append(total % 10)
            carry = total // 10
        return ask.encode_once(f"{spelled([*out, carry ^ (wrong == count)])}\n")

    def question(count: int) -> list[int]:
        return ask.encode_once(f"{spelled(a[:count])}+{spelled(b[:count])}=")

    def tokens(count: int) -> int:
        return len(question(count)) + len(result(count))

    count = _most(tokens, ask.length)
    if count < LEAST_DIGITS:
        raise ask.too_short(tokens(LEAST_DIGITS))
    answer = result(count)
    columns = (1 + ask.different(f"columns of {count}", count, count)).tolist()
    others = [other for other in (result(count, k) for k in columns) if len(other) == len(answer)]
    if len(others) < task.choices - 1:
        raise DataError(
            f"sums of {count} digits have {len(others)} carries to forget, {task.choices - 1} are wanted: "
            "lower choices, or raise the length"
        )
    return TaskItem(question(count), answer, others[: task.choices - 1])


def _most(tokens, length: int) -> int:
    """The largest count for which tokens(count), an increasing function, is at most `length`; 0 if there is
    none.
    """
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens(middle) <= length else (low, middle - 1)
    return low
