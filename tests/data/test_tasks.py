"""Tasks: every item is solved by an independent solver that reads only its text."""

import re
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest

from data import ByteTokenizer, DataError
from data.preparation.tokenizer_training import train_sentencepiece
from data.tasks import Haystacks, TaskContext, TaskSettings, is_for
from data.tasks.closed import AdditionTask, CopyTask, ParityTask, RecallTask, ReverseTask
from data.tasks.retrieval import NeedleTask, PasskeyTask, VariablesTask
from data.tokenizers.tokenizer_settings import SentencePieceSettings

TEXT = (
    "It rained on the hill, and the road ran on.\nNobody came by; the lamp was out 7 times.\n" * 40
)


def solved_pairs(prompt: str, pattern: str) -> dict[str, str]:
    """The last word of each statement, by its name."""
    return dict(re.findall(pattern, prompt))


def solve_passkey(prompt):
    facts = solved_pairs(prompt, r"\nKey (\w+) (\d+)\.\n")
    return f" {facts[prompt.rsplit(' ', 1)[1]]}.\n", [f" {value}.\n" for value in facts.values()]


def solve_needle(prompt):
    facts = solved_pairs(prompt, r"\n(\w+) hid it in the (\w+)\.\n")
    asked = prompt.rsplit("\n", 1)[1].split()[0]
    return f" {facts[asked]}.\n", [f" {value}.\n" for value in facts.values()]


def solve_variables(prompt):
    values = {}
    for name, right in re.findall(r"\n(\w\d) = (\w+)\n", prompt):
        values[name] = values.get(right, right)  # a link must come after what it points to
    asked = prompt.rsplit("\n", 1)[1].removesuffix(" =")
    return f" {values[asked]}\n", [f" {value}\n" for value in values.values()]


def solve_recall(prompt):
    lines = prompt.split("\n")
    pairs = dict(line.split() for line in lines[:-1])
    return f" {pairs[lines[-1]]}\n", [f" {value}\n" for value in pairs.values()]


def solve_copy(prompt):
    right = prompt.removeprefix("copy ").removesuffix(":")
    return f" {right}\n", [exchanged(right, i) for i in range(len(right) - 1)]


def solve_reverse(prompt):
    right = prompt.removeprefix("reverse ").removesuffix(":")[::-1]
    return f" {right}\n", [exchanged(right, i) for i in range(len(right) - 1)]


def exchanged(right, i):
    return f" {right[:i]}{right[i + 1]}{right[i]}{right[i + 2 :]}\n"


def solve_parity(prompt):
    ones = sum(map(int, prompt.removeprefix("ones ").removesuffix(":")))
    return f" {ones % 2}\n", [" 0\n", " 1\n"]


def solve_addition(prompt):
    a, b = prompt.removesuffix("=").split("+")
    total = int(a) + int(b)
    spelled = [total] + [total + sign * 10**k for k in range(1, len(a) + 1) for sign in (-1, 1)]
    return f"{total:0{len(a) + 1}}\n", [f"{wrong:0{len(a) + 1}}\n" for wrong in spelled]


CASES = {
    "passkey": (PasskeyTask(keys=4, digits=4), solve_passkey),
    "needle": (NeedleTask(keys=3), solve_needle),
    "variables": (VariablesTask(chains=3, hops=2), solve_variables),
    "recall": (RecallTask(), solve_recall),
    "copy": (CopyTask(), solve_copy),
    "reverse": (ReverseTask(), solve_reverse),
    "parity": (ParityTask(), solve_parity),
    "addition": (AdditionTask(), solve_addition),
}


@pytest.fixture(scope="module")
def subwords():
    lines = [
        TEXT,
        "Key heron 48213.\n" * 30,
        "owl hid it in the attic.\n" * 30,
        "copy 12:\nab 42\n" * 30,
    ]
    return train_sentencepiece(SentencePieceSettings(vocab_size=320), iter(lines)).tokenizer


def spelled_by(tokenizer):
    return np.array(tokenizer.encode(TEXT))


def test_every_task_has_a_test_case():
    assert {type(task) for task, _ in CASES.values()} == set(get_args(get_args(TaskSettings)[0]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["bytes", "subwords"])
def test_reference_solver_agrees(name, kind, subwords):
    task, solve = CASES[name]
    tokenizer = ByteTokenizer() if kind == "bytes" else subwords
    bench = TaskContext(task, tokenizer, "evaluation", 3)
    haystack = spelled_by(tokenizer)
    seen = set()
    for index in range(12):
        for length in (150, 400):
            item = bench.item(index, length, index / 11, haystack)
            prompt = tokenizer.decode(item.prompt)
            answer = tokenizer.decode(item.answer)
            right, rivals = solve(prompt)
            assert answer == right
            others = [tokenizer.decode(other) for other in item.others]
            assert others and right not in others and len(set(others)) == len(others)
            assert set(others) <= set(rivals)  # what is wrong stands in the same context
            assert {len(other) for other in item.others} == {len(item.answer)}
            size = len(item.prompt) + len(item.answer)
            assert size == length if task.reads else length - 20 < size <= length
            # Pieces spelled one by one are what the whole would be spelled as: what training sees.
            assert tokenizer.encode(prompt + answer) == item.prompt + item.answer
            seen.add(answer)
    assert len(seen) > (1 if name == "parity" else 5)


@pytest.mark.parametrize("name", CASES)
def test_items_depend_on_seed_purpose_and_index(name, subwords):
    task, _ = CASES[name]
    haystack = spelled_by(subwords)

    def items(purpose, seed):
        bench = TaskContext(task, subwords, purpose, seed)
        return [bench.item(i, 200, 0.5, haystack) for i in (5, 2, 5)]

    first, other, again = items("evaluation", 0)
    assert first == again and first.prompt != other.prompt
    assert [one.prompt for one in items("training", 0)] != [
        one.prompt for one in items("evaluation", 0)
    ]
    prompts = {
        tuple(TaskContext(task, subwords, purpose, seed).item(i, 200, 0.5, haystack).prompt)
        for purpose in ("training", "evaluation")
        for seed in (0, 1)
        for i in range(8)
    }
    assert len(prompts) == 32


@pytest.mark.parametrize("name", ["passkey", "needle", "variables"])
def test_depth_and_distance_locate_the_answer(name, subwords):
    task, solve = CASES[name]
    bench = TaskContext(task, subwords, "evaluation", 0)
    haystack = spelled_by(subwords)
    for depth in (0.0, 0.3, 1.0):
        item = bench.item(4, 900, depth, haystack)
        assert abs(item.depth - depth) < 0.05
        start = len(item.prompt) - item.distance
        value = subwords.decode(item.prompt[start : start + len(item.answer)])
        assert value == solve(subwords.decode(item.prompt))[0]


SETTINGS = [
    *(PasskeyTask(keys=keys, queries=queries) for keys in (1, 3) for queries in (1, 6)),
    NeedleTask(queries=6),
    *(VariablesTask(hops=hops, queries=queries) for hops in (0, 2) for queries in (1, 6)),
    RecallTask(),
    RecallTask(queries=6, digits=3),
    CopyTask(),
    CopyTask(separator=" "),
    ReverseTask(),
    ParityTask(modulus=3),
    AdditionTask(),
    AdditionTask(backwards=True),
]


@pytest.mark.parametrize("task", SETTINGS, ids=repr)
@pytest.mark.parametrize("kind", ["bytes", "subwords"])
def test_scored_answer_occurs_only_at_the_reported_place(task, kind, subwords):
    tokenizer = ByteTokenizer() if kind == "bytes" else subwords
    bench = TaskContext(task, tokenizer, "evaluation", 0)
    for index in range(40):
        item = bench.item(index, 200, index / 39, spelled_by(tokenizer))
        prompt = item.prompt
        answer = item.answer
        places = [i for i in range(len(prompt)) if prompt[i : i + len(answer)] == answer]
        if task.name == "recall":  # other keys may have the same value
            question = tokenizer.encode(tokenizer.decode(prompt).rsplit("\n", 1)[1])
            places = [i for i in places if prompt[i - len(question) : i] == question]
        assert places == ([len(prompt) - item.distance] if task.hides else [])


def test_training_items_need_no_wrong_answers():
    tokenizer = ByteTokenizer()
    for task, length in ((CopyTask(), 14), (ReverseTask(), 14), (AdditionTask(choices=16), 14)):
        with pytest.raises(DataError):
            TaskContext(task, tokenizer, "evaluation", 0).item(0, length)
        bench = TaskContext(task, tokenizer, "training", 0)
        item = bench.item(0, length)
        assert len(item.prompt) + len(item.answer) <= length
    task = PasskeyTask(keys=1, digits=1, choices=20)
    item = TaskContext(task, tokenizer, "training", 0).item(0, 100, 0.5, spelled_by(tokenizer))
    assert len(item.others) == 9


def test_recall_distance():
    bench = TaskContext(RecallTask(queries=3), ByteTokenizer(), "training", 0)
    for depth in (0.0, 0.5, 1.0):
        item = bench.item(1, 300, depth)
        start = len(item.prompt) - item.distance
        assert item.prompt[start : start + len(item.answer)] == item.answer
    assert item.depth == 1.0


def test_longer_items_keep_the_question():
    tokenizer = ByteTokenizer()
    haystack = spelled_by(tokenizer)
    for name in ("passkey", "needle", "variables"):
        bench = TaskContext(CASES[name][0], tokenizer, "evaluation", 0)
        short, long = (bench.item(1, length, 1.0, haystack) for length in (200, 700))
        assert short.answer == long.answer and short.others == long.others
        # What is nearest the question is the same text.
        assert long.prompt[-30:] == short.prompt[-30:]
    for name, pattern in (
        ("copy", r"copy (\d+)"),
        ("parity", r"ones (\d+)"),
        ("recall", r"^(\w\w \d+)"),
    ):
        bench = TaskContext(CASES[name][0], tokenizer, "evaluation", 0)
        short, long = (
            re.search(pattern, tokenizer.decode(bench.item(1, length).prompt))[1]
            for length in (80, 300)
        )
        assert name == "recall" or (long.startswith(short) and len(long) > len(short))


def test_addition_distractors_differ_by_a_carry():
    tokenizer = ByteTokenizer()
    bench = TaskContext(AdditionTask(choices=3), tokenizer, "evaluation", 0)
    for index in range(60):
        item = bench.item(index, 16)
        a, b = tokenizer.decode(item.prompt).removesuffix("=").split("+")
        assert any(int(x) + int(y) > 9 for x, y in zip(a, b, strict=True))
        for other in item.others:
            off = abs(int(tokenizer.decode(other)) - int(a) - int(b))
            assert re.fullmatch("10+", str(off))
    backwards = TaskContext(AdditionTask(backwards=True), tokenizer, "evaluation", 0).item(0, 40)
    a, b = (
        int(one[::-1]) for one in tokenizer.decode(backwards.prompt).removesuffix("=").split("+")
    )
    assert int(tokenizer.decode(backwards.answer).strip()[::-1]) == a + b


def test_parity_and_depths_are_balanced():
    tokenizer = ByteTokenizer()
    bench = TaskContext(ParityTask(), tokenizer, "evaluation", 0)
    ones = [tokenizer.decode(bench.item(i, 60).answer) for i in range(200)]
    assert 70 < ones.count(" 1\n") < 130


def test_in_context_examples_are_correct_and_fit():
    tokenizer = ByteTokenizer()
    haystack = spelled_by(tokenizer)
    bench = TaskContext(PasskeyTask(keys=2, queries=9), tokenizer, "training", 0)
    counts = set()
    for index in range(30):
        item = bench.item(index, 160, 0.5, haystack)
        found = re.findall(r"\nKey (\w+) (\d+)\.\n", tokenizer.decode(item.prompt))
        assert len(set(found)) == 2 and len(item.prompt) + len(item.answer) == 160
        counts.add(len(found))
    assert min(counts) == 2 and 6 <= max(counts) <= 9  # nine and a tenth have no room


def test_invalid_items_are_rejected():
    tokenizer = ByteTokenizer()
    with pytest.raises(
        DataError, match=r"40 tokens is too short for the task passkey.* at least \d+"
    ):
        TaskContext(PasskeyTask(), tokenizer, "evaluation", 0).item(
            0, 40, 0.5, spelled_by(tokenizer)
        )
    for task in (CopyTask(), ReverseTask(), ParityTask(), AdditionTask(), RecallTask()):
        with pytest.raises(DataError, match="too short"):
            TaskContext(task, tokenizer, "evaluation", 0).item(0, 5)
    with pytest.raises(DataError, match="26 keys of 1 letters"):
        TaskContext(RecallTask(letters=1), tokenizer, "evaluation", 0).item(0, 500)
    with pytest.raises(DataError, match="only 10 of 10 answers"):
        task = PasskeyTask(keys=12, digits=1)
        TaskContext(task, tokenizer, "evaluation", 0).item(0, 900, 0.5, spelled_by(tokenizer))
    with pytest.raises(DataError, match="swaps of neighbors"):
        TaskContext(CopyTask(alphabet="aa", choices=2), tokenizer, "evaluation", 0).item(0, 30)


def test_haystacks_are_long_documents():
    documents = [("short", "x" * 50), ("long", "abc " * 100), ("longer", "de " * 900)]
    found = Haystacks(documents, ByteTokenizer(), 300, 5, "here")
    assert found.names == ["long", "longer"]
    places = {found.text(1, i).tobytes() for i in range(20)}
    # "de " has 3 phases
    assert len(places) == 3 and all(len(found.text(1, i)) == 300 for i in range(20))
    with pytest.raises(
        DataError, match=r"none of the 3 documents of here .* 3,000 tokens.* has 2,700"
    ):
        Haystacks(documents, ByteTokenizer(), 3000, 5, "here")
    sides = [is_for(f"file {i}", "evaluation") for i in range(500)]
    assert 70 < sum(sides) < 130
    assert all(is_for(f"file {i}", "training") != side for i, side in enumerate(sides))


def test_key_occurs_once_and_distractors_do_not_occur():
    tokenizer = ByteTokenizer()
    bench = TaskContext(PasskeyTask(keys=1, choices=5), tokenizer, "evaluation", 0)
    for index in range(20):
        item = bench.item(index, 300, index / 19, spelled_by(tokenizer))
        prompt = tokenizer.decode(item.prompt)
        answer = tokenizer.decode(item.answer)
        assert re.findall(r"\nKey (\w+) (\d+)\.\n", prompt) == [
            (prompt.split()[-1], answer.strip(" .\n"))
        ]
        others = [tokenizer.decode(other) for other in item.others]
        assert len(set(others)) == 4 and answer not in others
        assert not any(other.strip(" .\n") in prompt for other in others)
        assert {len(other) for other in item.others} == {len(item.answer)}


def test_depths_are_spread_in_order():
    tokenizer = ByteTokenizer()
    bench = TaskContext(PasskeyTask(keys=2), tokenizer, "evaluation", 0)
    haystack = spelled_by(tokenizer)
    distances = [bench.item(0, 600, d, haystack).distance for d in (0, 0.25, 0.5, 0.75, 1)]
    assert all(a > b for a, b in pairwise(distances))
