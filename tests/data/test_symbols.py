"""Tasks on symbols: every item is solved by an independent checker, and batches train its answers
only."""

import random
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from pydantic import TypeAdapter

from data import DataError, DataSettings, GeneratedData
from data.data_settings import SymbolSource
from data.sampling.packing import IGNORED
from data.sampling.window_order import StepRange
from data.task_data import ItemSampler, SymbolItems, generated
from data.tasks import SymbolTaskSettings
from data.tasks.symbols import Problem
from data.tokenizers import SymbolTokenizer, load_tokenizer
from tests.data.stores import check_ranks
from tests.data.symbol_checkers import check
from tests.files import table

TABLE = table("data/symbol_tasks.yaml")
TASKS: dict[str, dict] = {name: {"name": name} | keys for name, keys in TABLE["tasks"].items()}
POSITIONED: dict[str, dict] = {name: case["task"] for name, case in TABLE["positioned"].items()}
EVERY = TASKS | POSITIONED
ADAPTER = TypeAdapter(SymbolTaskSettings)


def make(task: dict, lengths=(3, 20), purpose="training", seed=0) -> SymbolItems:
    return GeneratedData(SymbolSource(task=task, lengths=lengths), bos=True).items(purpose, seed)


def read(items: SymbolItems, index: int) -> Problem:
    """An item as symbols."""
    (item,) = items.drawn(np.array([index]))
    names = ["<end>", "<begin>", *items.task.alphabet]
    return Problem([names[i] for i in item.tokens], item.is_answer)


def data_of(task: dict, lengths=(3, 9), source=None, length=None, **more) -> DataSettings:
    own = {"name": "symbols", "task": task, "lengths": lengths} | (source or {})
    return DataSettings.model_validate({"source": own, "tokenizer": {"name": "symbols"}} | more)


def batches_of(settings: DataSettings) -> ItemSampler:
    plan = [StepRange(settings.source.inputs(settings.bos), 6, 3)]
    return ItemSampler(
        generated(settings).items("training", 4),
        plan,
        answers_only=settings.source.loss == "answers",
        seed=4,
        positions=settings.positions,
    )


def test_every_task_is_checked():
    named = {ADAPTER.validate_python(task).__class__ for task in TASKS.values()}
    assert named == set(get_args(get_args(SymbolTaskSettings)[0]))


@pytest.mark.parametrize("case", EVERY)
def test_checker_solves_items(case):
    items = make(EVERY[case])
    alphabet = {*items.task.alphabet, "<end>"}
    assert len(set(items.task.alphabet)) == len(items.task.alphabet)
    lengths = items.lengths(np.arange(60))
    assert min(lengths) >= 3
    assert max(lengths) <= 20
    assert len(set(lengths)) > 10
    answers = set()
    for i, length in enumerate(lengths):
        item = read(items, i)
        check(items.task, item)
        assert len(item.symbols) == len(item.is_answer) == items.task.size(length)
        assert set(item.symbols) <= alphabet
        answers.add(tuple(s for s, a in zip(item.symbols, item.is_answer, strict=True) if a))
    assert len(answers) > 1


@pytest.mark.parametrize("case", TASKS)
def test_items_depend_on_purpose_seed_and_index(case):
    """In particular, no test item is a training item."""
    seen = Counter()
    for purpose in ("training", "validation", "evaluation"):
        for seed in (0, 1):
            first, again = (make(TASKS[case], (14, 20), purpose, seed) for _ in range(2))
            own = {tuple(item.tokens) for item in first.drawn(np.arange(10))}
            assert own == {tuple(item.tokens) for item in again.drawn(np.arange(10))}
            seen.update(own)
    assert len(seen) >= 55
    assert max(seen.values()) <= 2


def test_draws_have_the_stated_probabilities():
    flips = make({"name": "flip_flop", "ignore": 0.6}, (500, 500))
    counts = Counter(s for i in range(20) for s in read(flips, i).symbols[::2])
    shares = {s: n / 10_000 for s, n in counts.items()}
    assert shares == pytest.approx({"i": 0.6, "w": 0.2, "r": 0.2}, abs=0.02)
    ones = [read(make({"name": "majority"}, (9, 9)), i).symbols[:9].count("1") for i in range(600)]
    assert all(abs(ones.count(n) - 60) < 30 for n in range(10))  # every count equally likely


def test_programs_have_the_probabilities_of_the_authors_generator():
    rng = random.Random(1)
    expected = Counter()
    while sum(expected.values()) < 12_000:
        values = {}
        program = []
        for _ in range(60):
            while True:  # a statement that is impossible is drawn again
                kind = rng.choices(["=0", "pass", "++"], [1, 50, 7])[0]
                name = rng.choice("abc" if kind == "=0" else list(values) or [""])
                if kind != "++" or (name and values[name] < 10):
                    break
            if kind == "=0":
                values[name] = 0
            elif kind == "++":
                values[name] += 1
            program.append(kind)
        expected.update(program if values else [])  # nothing could be printed
    items = make({"name": "counting"}, (60, 60))
    programs = [read(items, i).symbols[:60] for i in range(200)]
    found = Counter(s if s == "pass" else s[1:] for program in programs for s in program)
    for kind in expected:
        assert found[kind] / 12_000 == pytest.approx(expected[kind] / 12_000, abs=0.012)


@pytest.mark.parametrize("case", POSITIONED)
def test_given_positions_couple_symbols(case):
    positions = TABLE["positioned"][case]["positions"]
    symbols = TABLE["positioned"][case]["prompt"].split()
    task = ADAPTER.validate_python(POSITIONED[case])
    assert task.positions_of(symbols, len(positions) - len(symbols)) == positions


@pytest.mark.parametrize("case", POSITIONED)
def test_training_items_begin_at_random_positions_up_to_the_largest(case):
    settings = data_of(POSITIONED[case] | {"max_position": 30}, (2, 9))
    data = generated(settings)
    starts: dict[str, set[int]] = {"training": set(), "evaluation": set()}
    for i in range(300):
        for purpose in starts:
            items = data.items(purpose, 0)
            row = items.rows(np.array([i]), data.longest)
            n = int(row.count[0])
            given = np.array([0, *items.task.item_positions(*items.lengths(np.array([i])))])[:n]
            start = int((row.position[0, :n] - given).max())
            assert np.array_equal(row.position[0, :n], given + start * (given > 0))
            assert row.position.max() <= 30
            starts[purpose].add(start)
    assert len(starts["training"]) > 15
    assert starts["evaluation"] == {0}
    assert settings.position_end(1) == 31
    # generation continues a prompt at the positions of the item
    (item,) = items.drawn(np.array([3]))
    ids = [1, *item.prompt]
    assert data.positions(ids, len(item.answer)) == [0, *item.positions]
    with pytest.raises(DataError, match="whole problem"):
        data.positions(ids[:-1], 1)


@pytest.mark.parametrize("loss", ["answers", "all"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("case", ["copy", "flip_flop", "addition, coupled"])
def test_batches_train_answers_and_never_padding(case, bos, loss):
    settings = data_of(EVERY[case], bos=bos, source={"loss": loss})
    items = generated(settings).items("training", 4)
    names = ["<end>", "<begin>", *settings.source.task.alphabet]
    seen = set()
    for step in range(3):
        batch = batches_of(settings).batch(step)
        for row in range(6):
            item = read(items, 6 * step + row)
            symbols = ["<begin>"] * bos + item.symbols
            seen.add(tuple(symbols))
            n = len(symbols) - 1
            padding = batch.tokens.shape[1] - n
            assert [names[i] for i in batch.tokens[row, :n]] == symbols[:-1]
            scored = ([False] * bos + item.is_answer)[1:]
            wanted = [
                names.index(symbol) if loss == "all" or is_scored else IGNORED
                for symbol, is_scored in zip(symbols[1:], scored, strict=True)
            ]
            assert batch.targets[row].tolist() == wanted + [IGNORED] * padding
            assert batch.positions.document[row].tolist() == [0] * n + [-1] * padding
        assert batch.n_targets == (batch.targets != IGNORED).sum()
        assert batch.positions.layout == "plain"
        check_ranks(
            lambda *ranks, step=step: batches_of(settings).batch(step, *ranks), batch, worlds=[3]
        )
    assert len(seen) >= 17  # hardly a repetition


def test_tokenizer_round_trip(tmp_path):
    task = ADAPTER.validate_python({"name": "indirect_indexing", "symbols": 12})
    tokenizer = SymbolTokenizer(task.alphabet)
    text = "3 1 0 ? 1 +2 ="
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1, *tokenizer.encode("7"), 0]) == "7"
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.hash == tokenizer.hash != SymbolTokenizer(task.alphabet[::-1]).hash
    assert loaded.encode(text) == tokenizer.encode(text)
    for wrong in ("3 99", "<end>"):
        with pytest.raises(DataError, match="symbol"):
            tokenizer.encode(wrong)


def test_hash_covers_settings_and_items(monkeypatch):
    copy = TASKS["copy"]
    base = data_of(copy)
    others = [
        data_of(TASKS["reverse"]),
        data_of(copy, (3, 8)),
        data_of(copy, source={"loss": "all"}),
        data_of(copy, bos=False),
    ]
    hashes = [generated(settings).hash for settings in (base, *others)]
    assert len({*hashes, generated(base).valid_hash}) == 6
    assert generated(data_of(copy)).hash == hashes[0]
    monkeypatch.setattr("data.tasks.strings.EQUALS", "0")
    assert generated(base).hash != hashes[0]


@pytest.mark.parametrize(("task", "change", "match"), TABLE["refused"], ids=str)
def test_settings_that_do_not_fit_are_rejected(task, change, match):
    with pytest.raises(ValueError, match=match):
        settings = data_of(task, **change)
        settings.check(change.get("length") or settings.source.inputs(True))
        settings.position_end(20)
