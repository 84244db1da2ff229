"""Tasks that hide facts in text: pass keys, sentences, chains of variables."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from data.tasks.items import TaskItem, TaskRequest
from data.tasks.settings import NeedleTask, PasskeyTask, VariablesTask
from data.tasks.words import NAMES, PLACES


def passkey(ask: TaskRequest) -> TaskItem:
    """`Key heron 48213` and other facts in text; `Key heron` → ` 48213`"""
    task = cast(PasskeyTask, ask.bench.task)
    compared = task.keys if task.keys > 1 else task.choices
    values = ask.numbers("values", task.digits, compared)
    return _facts(ask, "\nKey {}", values[:compared], task.keys, task.queries)


def needle(ask: TaskRequest) -> TaskItem:
    """`heron hid it in the attic` and other facts in text; `heron hid it in the` → ` attic`"""
    task = cast(NeedleTask, ask.bench.task)
    places = [f" {PLACES[i]}" for i in ask.different("values", len(PLACES), len(PLACES)).tolist()]
    values = ask.same_count(places, task.keys)[: task.keys]
    return _facts(ask, "\n{} hid it in the", values, task.keys, task.queries)


def _facts(ask: TaskRequest, stem: str, values: list[str], count: int, queries: int) -> TaskItem:
    """Hide `count` facts, each a stem with a name and one of `values`, and query the first of them. Values of
    no fact serve as wrong answers that are not in the context.
    """
    stems = [stem.format(NAMES[i]) for i in ask.different("names", count, len(NAMES)).tolist()]
    depths = ask.draw("depths", count, 1001) / 1000
    depths[0] = ask.depth
    parts = [(stems[i], f"{values[i]}.\n") for i in range(count)]
    statements = [(float(depth), *part) for depth, part in zip(depths, parts, strict=True)]
    return _hidden(ask, statements, parts, queries, invented=[f"{value}.\n" for value in values[count:]])


def variables(ask: TaskRequest) -> TaskItem:
    """`x4 = 531`, later `q7 = x4`, and other chains in text; `q7 =` → ` 531`"""
    task = cast(VariablesTask, ask.bench.task)
    links = task.hops + 1
    values = ask.numbers("values", task.digits, task.chains)
    numbers = ask.different("names", task.chains * links, 26 * 10).tolist()
    names = [f"{chr(97 + n // 10)}{n % 10}" for n in numbers]
    statements, questions = [], []
    for chain in range(task.chains):
        mine = names[chain * links : (chain + 1) * links]
        first = ask.depth if chain == 0 else float(ask.draw(f"depth {chain}", 1, 1001)[0]) / 1000
        later = np.sort(ask.draw(f"links {chain}", task.hops, 1001)) / 1000
        depths = [first, *(first + (1 - first) * later).tolist()]
        rights = [values[chain], *(f" {name}" for name in mine[:-1])]
        for depth, name, right in zip(depths, mine, rights, strict=True):
            statements.append((depth, f"\n{name} =", f"{right}\n"))
        questions.append((f"\n{mine[-1]} =", f"{values[chain]}\n"))
    return _hidden(ask, statements, questions, task.queries)


def _hidden(
    ask: TaskRequest,
    statements: Sequence[tuple[float, str, str]],
    questions: Sequence[tuple[str, str]],
    queries: int,
    invented: Sequence[str] = (),
) -> TaskItem:
    """Insert statements (depth, stem, value) into the haystack and append questions (stem, answer).

    The first question comes last and is scored. Its wrong answers are the answers of the other questions and
    `invented`. The first statement contains its answer.
    """
    last = ask.encode(questions[0][0])
    answer, *others = [ask.encode(right) for right in [*(right for _, right in questions), *invented]]
    tokens = [ask.encode(stem) + ask.encode(value) for _, stem, value in statements]
    room = ask.length - sum(map(len, tokens)) - len(last) - len(answer)
    if room < 0:
        raise ask.too_short(ask.length - room)
    earlier: list[int] = []
    asked = int(ask.draw("asked", 1, queries)[0])
    for i in ask.draw("earlier", asked, len(questions)).tolist():
        stem, right = questions[i]
        question = ask.encode(stem) + ask.encode(right)
        if len(question) > room:
            break
        earlier, room = earlier + question, room - len(question)
    tail = earlier + last
    text = ask.haystack[len(ask.haystack) - room :]
    # Insert between two tokens, the second of which begins with white space, or at an end.
    cuts = np.array([0, *(1 + np.flatnonzero(ask.bench.may_cut[text[1:]])).tolist(), room])
    at = [int(cuts[np.abs(cuts - depth * room).argmin()]) for depth, *_ in statements]
    prompt, starts, done = [], {}, 0
    for i in sorted(range(len(statements)), key=lambda i: (at[i], statements[i][0], i)):
        prompt += text[done : at[i]].tolist()
        starts[i], done = len(prompt), at[i]
        prompt += tokens[i]
    prompt += text[done:].tolist() + tail
    value_at = starts[0] + len(ask.encode(statements[0][1]))
    return TaskItem(prompt, answer, others, at[0] / room if room else ask.depth, len(prompt) - value_at)
