"""Tasks on symbols: every item is solved by an independent checker, and batches train its answers
only."""

import random
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from pydantic import TypeAdapter

from data import DataError, DataSettings
from data.generated import generated
from data.sampling.exposure import ExposureLedger
from data.sampling.item_batches import ItemSampler, SymbolItems
from data.sampling.positions import (
    IGNORED,
    CapePositions,
    OffsetPositions,
    PlainPositions,
    SubsetPositions,
)
from data.sampling.segments import Segment
from data.tasks import SymbolTaskSettings
from data.tokenizers import SymbolTokenizer, load_tokenizer
from tests.data.symbol_checkers import check
from tests.data.test_exposure import as_counters, by_loops

TASKS = [
    {"name": "copy", "symbols": 40},
    {"name": "copy", "symbols": 2, "distinct": False},
    {"name": "reverse", "symbols": 40},
    {"name": "sort", "symbols": 40},
    {"name": "selective_copy", "copied": 3},
    {"name": "majority"},
    {"name": "majority", "symbols": 26, "even": True},
    {"name": "majority", "interleaved": 3},
    {"name": "counting"},
    {"name": "modular_addition"},
    {"name": "modular_addition", "modulus": 7, "scratchpad": True},
    {"name": "parity"},
    {"name": "parity", "scratchpad": True},
    {"name": "addition"},
    {"name": "addition", "order": "reversed"},
    {"name": "addition", "order": "reversed_answer", "scratchpad": True},
    {"name": "addition", "order": "reversed", "scratchpad": True},
    {"name": "addition", "hints": 40},
    {"name": "addition", "hints": 40, "order": "reversed"},
    {"name": "flip_flop"},
    {"name": "flip_flop", "ignore": 0.1},
    {"name": "associative_recall", "keys": 40},
    {"name": "indirect_indexing"},
    {"name": "indirect_indexing", "shift": 2, "queries": 3},
    {"name": "dyck"},
    {"name": "dyck", "kinds": 3, "depth": 2},
]
POSITIONED = [
    {"name": "copy", "symbols": 40, "positions": "coupled"},
    {"name": "reverse", "symbols": 40, "positions": "coupled"},
    {"name": "parity", "scratchpad": True, "positions": "coupled"},
    {"name": "addition", "positions": "coupled"},
    {"name": "addition", "positions": "coupled", "order": "reversed"},
    {"name": "addition", "positions": "coupled", "order": "reversed_answer"},
    {"name": "addition", "positions": "abacus", "order": "reversed"},
]
ADAPTER = TypeAdapter(SymbolTaskSettings)


def make(task: dict, lengths=(3, 20), purpose="training", seed=0, **more) -> SymbolItems:
    settings = ADAPTER.validate_python(task)
    return SymbolItems(settings, lengths, purpose=purpose, seed=seed, bos=True, **more)


def data_of(task: dict, lengths=(3, 9), source=None, length=None, **more) -> DataSettings:
    own = {"name": "symbols", "task": task, "lengths": lengths} | (source or {})
    return DataSettings.model_validate({"source": own, "tokenizer": {"name": "symbols"}} | more)


def batches_of(settings: DataSettings) -> ItemSampler:
    plan = [Segment(settings.source.inputs(settings.bos), 6, 3)]
    items = generated(settings).training_items(4)
    return ItemSampler(items, plan, seed=4, positions=settings.positions)


def test_every_task_is_checked():
    named = {ADAPTER.validate_python(task).__class__ for task in TASKS}
    assert named == set(get_args(get_args(SymbolTaskSettings)[0]))


@pytest.mark.parametrize("task", TASKS + POSITIONED, ids=str)
def test_checker_solves_items(task):
    items = make(task)
    alphabet = {*items.task.alphabet, "<end>"}
    assert len(set(items.task.alphabet)) == len(items.task.alphabet)
    lengths = items.length(np.arange(60))
    assert lengths.min() >= 3
    assert lengths.max() <= 20
    assert len(set(lengths)) > 10
    answers = set()
    for i, length in enumerate(lengths.tolist()):
        item = items.item(i)
        check(items.task, item)
        assert len(item.symbols) == len(item.is_answer) == items.task.size(length)
        assert set(item.symbols) <= alphabet
        answers.add(tuple(s for s, a in zip(item.symbols, item.is_answer, strict=True) if a))
    assert len(answers) > 1


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_items_depend_on_purpose_seed_and_index(task):
    """In particular, no test item is a training item."""
    seen = Counter()
    for purpose in ("training", "validation", "evaluation"):
        for seed in (0, 1):
            first, again = (make(task, (14, 20), purpose, seed) for _ in range(2))
            own = {tuple(first.item(i).symbols) for i in range(10)}
            assert own == {tuple(again.item(i).symbols) for i in range(10)}
            seen.update(own)
    assert len(seen) >= 55
    assert max(seen.values()) <= 2


def test_draws_have_the_stated_probabilities():
    flips = make({"name": "flip_flop", "ignore": 0.6}, (500, 500))
    counts = Counter(s for i in range(20) for s in flips.item(i).symbols[::2])
    shares = {s: n / 10_000 for s, n in counts.items()}
    assert shares == pytest.approx({"i": 0.6, "w": 0.2, "r": 0.2}, abs=0.02)
    ones = [make({"name": "majority"}, (9, 9)).item(i).symbols[:9].count("1") for i in range(600)]
    assert all(abs(ones.count(n) - 60) < 30 for n in range(10))  # every count equally likely
    even = make({"name": "majority", "even": True}, (9, 9))
    ones = [even.item(i).symbols[:9].count("1") for i in range(600)]
    assert ones.count(4) + ones.count(5) > 240  # 126 of 256 for each half
    depths = [len(make({"name": "dyck"}, (12, 12)).item(i).symbols) for i in range(9)]
    assert set(depths) == {26}


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
    programs = [items.item(i).symbols[:60] for i in range(200)]
    found = Counter(s if s == "pass" else s[1:] for program in programs for s in program)
    for kind in expected:
        assert found[kind] / 12_000 == pytest.approx(expected[kind] / 12_000, abs=0.012)


@pytest.mark.parametrize(
    ("task", "prompt", "positions"),
    [
        (POSITIONED[0], "7 8 9 =", "2 3 4 1 2 3 4 5"),
        (POSITIONED[1], "7 8 9 =", "1 2 3 4 3 2 1 1"),
        (POSITIONED[2], "1 0 1 =", "2 3 4 1 2 3 4 5"),
        (POSITIONED[3], "1 2 + 3 4 =", "3 2 1 3 2 5 4 3 2 1"),
        (POSITIONED[4], "2 1 + 4 3 =", "2 3 1 2 3 1 2 3 4 5"),
        (POSITIONED[5], "1 2 + 3 4 =", "3 2 1 3 2 1 2 3 4 5"),
        (POSITIONED[6], "2 1 + 4 3 =", "1 2 0 1 2 0 1 2 3 4"),
    ],
    ids=str,
)
def test_given_positions_couple_symbols(task, prompt, positions):
    """Written by hand after the papers: symbols of equal significance, or at the same place, have
    one position, and positions change by 1 within a number."""
    places = [int(place) for place in positions.split()]
    symbols = prompt.split()
    found = ADAPTER.validate_python(task).positions_of(symbols, len(places) - len(symbols))
    assert found == places


@pytest.mark.parametrize("task", POSITIONED, ids=str)
def test_training_items_begin_at_random_positions_up_to_the_largest(task):
    settings = data_of({**task, "max_position": 30}, (2, 9))
    data = generated(settings)
    starts = Counter()
    for i in range(300):
        for purpose in ("training", "evaluation"):
            items = data.items(purpose, 0)
            row = items.rows(np.array([i]), items.width)
            n = int(row.count[0])
            given = np.array([0, *items.item(i).positions])[:n]
            shift = row.position[0, :n] - given
            assert set(shift[given == 0]) <= {0}
            assert len(set(shift[given > 0])) == 1
            if purpose == "training":
                starts[int(shift.max())] += 1
                assert row.position.max() <= 30
            else:
                assert shift.max() == 0
    assert len(starts) > 15
    assert settings.position_end(1) == 31
    # generation continues a prompt at the positions of the item
    item = items.item(3)
    ids = [1, *data.tokenizer.encode(" ".join(item.prompt))]
    more = len(item.symbols) - len(item.prompt)
    assert data.positions(ids, more) == [0, *item.positions]
    with pytest.raises(DataError, match="whole problem"):
        data.positions(ids[:-1], more)


@pytest.mark.parametrize("loss", ["answers", "all"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("task", [TASKS[0], TASKS[19], POSITIONED[5]], ids=str)
def test_batches_train_answers_and_never_padding(task, bos, loss):
    settings = data_of(task, bos=bos, source={"loss": loss})
    batches = batches_of(settings)
    begin = ["<begin>"] * bos
    names = ["<end>", "<begin>", *settings.source.task.alphabet]
    seen = set()
    for step in range(3):
        batch = batches.batch(step)
        expected = 0
        for row in range(6):
            items = SymbolItems(settings.source.task, (3, 9), purpose="training", seed=4, bos=bos)
            item = items.item(6 * step + row)
            symbols = [*begin, *item.symbols]
            seen.add(tuple(symbols))
            n = len(symbols) - 1
            assert [names[i] for i in batch.tokens[row, :n]] == symbols[:-1]
            trained = {
                t: names[i] for t, i in enumerate(batch.targets[row].tolist()) if i != IGNORED
            }
            scored = [False] * bos + item.is_answer
            wanted = {t: symbols[t + 1] for t in range(n) if loss == "all" or scored[t + 1]}
            assert trained == wanted
            assert batch.document[row].tolist() == [0] * n + [-1] * (len(batch.tokens[0]) - n)
            expected += len(wanted)
        assert batch.n_targets == expected
        assert batch.layout == "plain"
        assert batch.order.tolist() == [list(range(batch.tokens.shape[1]))]
        parts = [batches_of(settings).batch(step, rank, 3) for rank in range(3)]
        for name in ("tokens", "targets"):
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert (joined == getattr(batch, name).numpy()).all()
        assert {part.n_targets for part in parts} == {expected}
        assert [part.hash for part in parts] == [batch.hash, "", ""]
    assert len(seen) >= 17  # hardly a repetition


@pytest.mark.parametrize(
    ("task", "positions"),
    [
        (TASKS[0], PlainPositions()),
        (TASKS[0], OffsetPositions(max_offset=9)),
        (TASKS[0], SubsetPositions(max_length=64, per="batch")),
        (TASKS[0], CapePositions()),
        (POSITIONED[0] | {"max_position": 30}, PlainPositions()),
        (POSITIONED[6] | {"max_position": 30}, PlainPositions()),
    ],
    ids=str,
)
def test_exposure_counts_items_without_padding(task, positions):
    batches = batches_of(data_of(task, positions=positions.model_dump()))
    assert as_counters(ExposureLedger(batches, 3).upto(3)) == by_loops(batches, range(3))


def test_tokenizer_round_trip(tmp_path):
    task = ADAPTER.validate_python({"name": "indirect_indexing", "symbols": 12})
    tokenizer = SymbolTokenizer(task.alphabet)
    text = "3 1 0 ? 1 +2 ="
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1, *tokenizer.encode("7"), 0]) == "7"
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.hash == tokenizer.hash
    assert loaded.encode(text) == tokenizer.encode(text)
    other = SymbolTokenizer(task.alphabet[::-1])
    assert other.hash != tokenizer.hash
    for wrong in ("3 99", "<end>"):
        with pytest.raises(DataError, match="symbol"):
            tokenizer.encode(wrong)


def test_hash_covers_settings_and_items(monkeypatch):
    base = data_of(TASKS[0])
    others = [
        data_of(TASKS[2]),
        data_of(TASKS[0], (3, 8)),
        data_of(TASKS[0], source={"loss": "all"}),
        data_of(TASKS[0], bos=False),
    ]
    hashes = [generated(settings).hash for settings in (base, *others)]
    assert len({*hashes, generated(base).valid_hash}) == 6
    assert generated(data_of(TASKS[0])).hash == hashes[0]
    monkeypatch.setattr("data.tasks.strings.EQUALS", "0")
    assert generated(base).hash != hashes[0]


STDLIB = {"name": "stdlib"}
COPY = {"name": "copy"}
COUPLED = COPY | {"positions": "coupled"}
POSE = {"name": "pose", "target": 16}


@pytest.mark.parametrize(
    ("task", "change", "match"),
    [
        (COPY, {"tokenizer": {"name": "bytes"}}, "tokenizer.name=symbols"),
        (COPY, {"valid_source": STDLIB}, "valid_source"),
        (COPY, {"mixture": [{"share": 0.1, "source": STDLIB}]}, "mixture"),
        (COPY, {"source": {"lengths": [9, 3]}}, "ascending"),
        (COPY | {"symbols": 8}, {}, "at most 8"),
        ({"name": "selective_copy", "copied": 5}, {}, "from length 5"),
        ({"name": "addition", "hints": 9}, {}, "at most 8"),
        (COPY, {"length": 21}, "set train_length to 20"),
        (COPY, {"positions": POSE}, "target = 16"),
        (COUPLED | {"max_position": 5}, {}, "max_position=5"),
        (COUPLED, {"positions": POSE}, "data.positions.name=pose"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_rejected(task, change, match):
    with pytest.raises(ValueError, match=match):
        settings = data_of(task, **change)
        settings.check(change.get("length") or settings.source.inputs(True))
        settings.position_end(20)
