"""Tasks in text: every item is solved by an independent solver that reads only its text."""

import re
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest

from data import ByteTokenizer, DataError
from data.preparation.tokenizer_training import train_sentencepiece
from data.tasks import Haystacks, TaskItems, TextTaskSettings, is_for
from data.tasks.retrieval import NeedleTask, PasskeyTask, RecallTask, VariablesTask
from data.tokenizers.tokenizer_settings import SentencePieceSettings

TEXT = (
    "It rained on the hill, and the road ran on.\nNobody came by; the lamp was out 7 times.\n" * 40
)


# Statements of a task: a name and its value.
STATEMENTS = {
    "passkey": r"\nKey (\w+) (\d+)\.\n",
    "needle": r"\n(\w+) hid it in the (\w+)\.\n",
    "variables": r"\n(\w\d) = (\w+)\n",
    "recall": r"(?:^|\n)(\w\w) (\d+)(?=\n)",
}


def solve(name: str, prompt: str) -> tuple[str, set[str]]:
    """The answer, and all values."""
    end = "\n" if name in ("variables", "recall") else ".\n"
    values = {}
    for key, value in re.findall(STATEMENTS[name], prompt):
        values[key] = values.get(value, value)  # a link must come after what it points to
    question = prompt.rpartition("\n")[2].removesuffix(" =").split()
    asked = question[0] if name == "needle" else question[-1]
    return f" {values[asked]}{end}", {f" {value}{end}" for value in values.values()}


TASKS = [
    PasskeyTask(keys=4, digits=4),
    NeedleTask(),
    VariablesTask(hops=0),
    VariablesTask(chains=3, hops=2, queries=6),
    RecallTask(),
    RecallTask(queries=6, digits=3),
]


@pytest.fixture(scope="module")
def subwords():
    facts = "Key heron 48213.\nowl hid it in the attic.\nab 42\n" * 30
    return train_sentencepiece(SentencePieceSettings(vocab_size=320), [TEXT, facts])


@pytest.fixture(params=["bytes", "subwords"])
def tokenizer(request, subwords):
    return ByteTokenizer() if request.param == "bytes" else subwords


def make(task, tokenizer, purpose="evaluation", seed=0):
    """A function that makes items in TEXT."""
    items = TaskItems(task, tokenizer, purpose, seed)
    haystack = np.array(tokenizer.encode(TEXT))
    return lambda index, length, depth=0.5: items.item(index, length, depth, haystack)


def test_every_task_is_tested():
    assert {type(task) for task in TASKS} == set(get_args(get_args(TextTaskSettings)[0]))


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_reference_solver_agrees(task, tokenizer):
    item_of = make(task, tokenizer, seed=3)
    answers = set()
    for index in range(12):
        for length in (150, 400):
            item = item_of(index, length, index / 11)
            prompt = tokenizer.decode(item.prompt)
            answer = tokenizer.decode(item.answer)
            right, rivals = solve(task.name, prompt)
            others = [tokenizer.decode(other) for other in item.others]
            assert answer == right
            assert others
            assert len(set(others)) == len(others)
            assert set(others) <= rivals - {right}
            assert {len(other) for other in item.others} == {len(item.answer)}
            size = len(item.prompt) + len(item.answer)
            assert length - 20 < size <= length if task.name == "recall" else size == length
            # Parts encoded one by one are encoded as the whole, which training sees.
            assert tokenizer.encode(prompt + answer) == item.prompt + item.answer
            answers.add(answer)
    assert len(answers) > 5


@pytest.mark.parametrize("task", [*TASKS, PasskeyTask(keys=1, queries=6, choices=5)], ids=repr)
def test_scored_answer_occurs_only_at_the_reported_place(task, tokenizer):
    item_of = make(task, tokenizer)
    for index in range(30):
        item = item_of(index, 200, index / 29)
        prompt = item.prompt
        answer = item.answer
        places = [i for i in range(len(prompt)) if prompt[i : i + len(answer)] == answer]
        if task.name == "recall":  # other keys may have the same value
            question = tokenizer.encode(tokenizer.decode(prompt).rsplit("\n", 1)[1])
            places = [i for i in places if prompt[i - len(question) : i] == question]
        assert places == [len(prompt) - item.distance]
        if task.name == "passkey" and task.keys == 1:  # wrong answers that are in no fact
            text = tokenizer.decode(prompt)
            assert len(item.others) == 4
            assert not any(tokenizer.decode(other) in text for other in item.others)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_items_depend_on_seed_purpose_and_index(task, subwords):
    prompts = set()
    for purpose in ("training", "evaluation"):
        for seed in (0, 1):
            item_of = make(task, subwords, purpose, seed)
            prompts |= {tuple(item_of(i, 200).prompt) for i in range(8)}
            assert item_of(5, 200) == make(task, subwords, purpose, seed)(5, 200)
    assert len(prompts) == 32


def test_depth_orders_the_answer_and_longer_items_keep_the_question(subwords):
    item_of = make(VariablesTask(chains=3), subwords)
    items = [item_of(4, 900, depth) for depth in (0, 0.25, 0.5, 0.75, 1)]
    places = [1 - item.distance / len(item.prompt) for item in items]
    assert places == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.1)
    assert all(a.distance > b.distance for a, b in pairwise(items))
    short = item_of(1, 200, 1.0)
    long = item_of(1, 700, 1.0)
    assert (short.answer, short.others) == (long.answer, long.others)
    assert long.prompt[-15:] == short.prompt[-15:]  # the text nearest to the question


@pytest.mark.parametrize("task", [PasskeyTask(keys=2, queries=9), RecallTask(queries=3)], ids=repr)
def test_training_items_ask_several_times(task):
    item_of = make(task, ByteTokenizer(), "training")
    facts = r"Key \w+ \d+\." if task.name == "passkey" else r"\w\w \d\d\n"
    repeated = []
    for index in range(30):
        item = item_of(index, 160)
        statements = re.findall(facts, ByteTokenizer().decode(item.prompt))
        repeated.append(len(statements) - len(set(statements)))
        start = len(item.prompt) - item.distance
        assert item.prompt[start : start + len(item.answer)] == item.answer
    assert min(repeated) == 0
    assert max(repeated) == (7 if task.name == "passkey" else 2)


@pytest.mark.parametrize(
    ("task", "length", "message"),
    [
        (PasskeyTask(), 40, "40 tokens"),
        (RecallTask(letters=1), 500, "letters"),
        (RecallTask(letters=1, choices=40), 500, "letters"),
        (RecallTask(choices=12, queries=4), 10, "10 tokens"),
        (PasskeyTask(keys=12, digits=1), 900, "digits"),
    ],
)
def test_invalid_items_are_rejected(task, length, message):
    with pytest.raises(DataError, match=message):
        make(task, ByteTokenizer())(0, length)


def test_largest_variables_task():
    task = VariablesTask(chains=16, hops=15)
    assert make(task, ByteTokenizer())(0, 9000).answer
    with pytest.raises(ValueError, match="hops"):  # there are 260 names
        VariablesTask(chains=16, hops=16)


def test_haystacks_are_long_documents():
    documents = [("short", "x" * 50), ("long", "abc " * 100), ("longer", "de " * 900)]
    haystacks = Haystacks(documents, ByteTokenizer(), 300, 5, "here")
    assert haystacks.names == ["long", "longer"]
    texts = [haystacks.text(1, i) for i in range(20)]
    assert {len(text) for text in texts} == {300}
    assert len({text.tobytes() for text in texts}) == 3  # "de " has 3 phases
    with pytest.raises(DataError, match=r"3 documents of here .* 3,000 tokens.* 2,700"):
        Haystacks(documents, ByteTokenizer(), 3000, 5, "here")
    sides = [is_for(f"file {i}", "evaluation") for i in range(500)]
    assert sides == [not is_for(f"file {i}", "training") for i in range(500)]
    assert 70 < sum(sides) < 130
