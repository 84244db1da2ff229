"""Solvers of the tasks on symbols, which read only the symbols of a problem and share no code or
algorithm with the generators."""

import re

from data.tasks.symbols import Problem


def split(item: Problem) -> tuple[list[str], list[str]]:
    """Problem without its `=`, and answer without `<end>`."""
    cut = item.is_answer.index(True)
    answer = item.symbols[cut:]
    assert item.symbols[cut - 1] == "="
    assert answer[-1] == "<end>"
    return item.symbols[: cut - 1], answer[:-1]


def copied(task, problem):
    return [problem[-1 - i if task.name == "reverse" else i] for i in range(len(problem))]


def sorted_numbers(task, problem):
    left = list(problem)
    found = []
    while left:
        found.append(min(left, key=int))
        left.remove(found[-1])
    return found


def not_blank(task, problem):
    return "".join(f" {symbol}" for symbol in problem).replace(" .", "").split()


def most_frequent(task, problem):
    answer = []
    for first in range(task.interleaved):
        own = problem[first :: task.interleaved]
        most = max(own, key=own.count)
        assert all(own.count(other) < own.count(most) for other in set(own) - {most})
        answer.append(most)
    return answer


def partial_sums(task, problem):
    sums = [str(sum(map(int, problem[: i + 1])) % task.modulus) for i in range(len(problem))]
    return sums if task.scratchpad else sums[-1:]


def sum_of(task, problem):
    text = " ".join(problem)
    numbers = [re.sub(r"i\d+ ", "", number).split() for number in text.split(" + ")]
    size = len(numbers[0])
    is_reversed = task.order == "reversed"
    x, y = (int("".join(digits[::-1] if is_reversed else digits)) for digits in numbers)
    answer = list(str(x + y).zfill(size + 1))
    if task.hints:
        hints = re.findall(r"i\d+", text)
        first = min(int(hint[1:]) for hint in hints)
        own = [f"i{first + k}" for k in range(size)]  # of the last digit, and so on
        assert hints == 2 * (own if is_reversed else own[::-1])
        answer = [f"i{first + size - n} {digit}" for n, digit in enumerate(answer)]
    written = " ".join(answer if task.order == "plain" else answer[::-1]).split()
    if not task.scratchpad:
        return written
    columns = []
    for place in (10**k for k in range(size)):
        carry = (x % place + y % place) // place
        columns += [carry, x // place % 10, y // place % 10, (x + y) // place % 10]
    return [*map(str, columns), ":", *written]


def closed(task, problem):
    text = " ".join(problem) + " "
    while (shorter := re.sub(r"\((\d+) \)\1 ", "", text)) != text:
        text = shorter
    assert ")" not in text
    assert 0 < text.count("(") <= task.depth
    return text.replace("(", ")").split()[::-1]


CHECKERS = {
    "copy": copied,
    "reverse": copied,
    "sort": sorted_numbers,
    "selective_copy": not_blank,
    "majority": most_frequent,
    "modular_addition": partial_sums,
    "parity": partial_sums,
    "addition": sum_of,
    "dyck": closed,
}


def check_counting(task, item):
    *program, statement, name, value, end = item.symbols
    assert statement == "print"
    assert end == "<end>"
    assert item.is_answer[-2:] == [True, True]
    assert sum(item.is_answer) == 2
    text = " ".join(program)
    assert f"{name}=0" in text
    assert int(value) == text.rpartition(f"{name}=0")[2].count(f"{name}++") <= 10
    for i, line in enumerate(program):
        if line.endswith("++"):
            assert f"{line[0]}=0" in program[:i]


def check_flip_flop(task, item):
    pairs = [item.symbols[i : i + 2] for i in range(0, len(item.symbols), 2)]
    assert pairs[0][0] == "w"
    assert pairs[-1][0] == "r"
    for i, (instruction, bit) in enumerate(pairs):
        assert item.is_answer[2 * i : 2 * i + 2] == [False, instruction == "r"]
        if instruction == "r":
            before = "".join(a + b for a, b in pairs[:i])
            assert bit == before[before.rindex("w") + 1]


def check_recall(task, item):
    mark = item.symbols.index("?")
    keys = item.symbols[0:mark:2]
    values = item.symbols[1:mark:2]
    table = dict(zip(keys, values, strict=True))
    assert 2 * len(table) == mark
    asked = item.symbols[mark + 1 :: 2]
    assert len(set(asked)) == len(asked) == min(task.queries, len(table))
    assert item.symbols[mark + 2 :: 2] == [table[key] for key in asked]
    assert item.is_answer == [False] * (mark + 1) + [False, True] * len(asked)


def check_indexing(task, item):
    text = " ".join(item.symbols)
    string, *questions = text.split(" ? ")
    string = string.split()
    assert len(set(string)) == len(string)
    assert len(questions) == task.queries
    for question in questions:
        source, shift, mark, target = question.split()
        assert mark == "="
        assert string.index(target) - string.index(source) == int(shift) != 0
    scored = [False] * 4 + [True]
    assert item.is_answer == [False] * len(string) + scored * task.queries


WHOLE = {
    "counting": check_counting,
    "flip_flop": check_flip_flop,
    "associative_recall": check_recall,
    "indirect_indexing": check_indexing,
}


def check(task, item: Problem) -> None:
    """Assert that an item's answers are right, and that exactly they are marked."""
    if task.name in WHOLE:
        WHOLE[task.name](task, item)
        return
    problem, answer = split(item)
    assert answer == CHECKERS[task.name](task, problem)
    if getattr(task, "distinct", False):
        assert len(set(problem)) == len(problem)
    assert item.is_answer == [False] * (len(problem) + 1) + [True] * (len(answer) + 1)
