"""Mixtures: exact shares, epochs per source, one tokenizer, no held-out text."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data import (
    BatchSampler,
    DataError,
    DataSettings,
    check_texts,
    open_prepared,
    prepare,
    prepared_folder,
)
from data.sampling.batches import TrainingText
from data.sampling.mixture import MixturePattern
from data.sampling.segments import Segment
from tests.data.test_batches import make_store
from tests.data.test_prepare import Listener, changed


@pytest.fixture(scope="module", autouse=True)
def _root(tmp_path_factory):
    make_store.root = tmp_path_factory.mktemp("stores")


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_mixture_proportions_are_exact_to_one_sample(parts):
    shares = [Fraction(part, sum(parts)) for part in parts]
    pattern = MixturePattern(shares)
    n = np.arange(3 * pattern.period + 1)
    turns = pattern.turns(n[:-1])
    for source, share in enumerate(shares):
        counted = np.concatenate([[0], np.cumsum(turns == source)])
        assert np.array_equal(pattern.before(source, n), counted)
        assert all(
            abs(count - share * i) < 1
            for i, count in zip(n.tolist(), counted.tolist(), strict=True)
        )


def test_interleaving_pattern():
    assert MixturePattern([Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)]).turns(
        np.arange(11)
    ).tolist() == [
        *(0, 0, 0, 1, 0, 0, 1, 0, 0, 2),
        0,
    ]
    with pytest.raises(DataError, match="period 10,001"):
        MixturePattern([Fraction(1, 10_001), Fraction(10_000, 10_001)])


LENGTHS = [[9, 8, 7, 6, 30, 5, 4, 3, 2], [5, 11, 3, 8], [40, 2, 13]]
SHARES = [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
PLAN = [Segment(4, 6, 4), Segment(9, 3, 5), Segment(4, 3, 9)]


@pytest.mark.parametrize("packing", ["concat", "intra_document"])
def test_sources_have_separate_epochs(packing):
    stores = [make_store(lengths) for lengths in LENGTHS]

    def fresh(seed: int = 3) -> BatchSampler:
        texts = [
            TrainingText(s, share, f"t{i}")
            for i, (s, share) in enumerate(zip(stores, SHARES, strict=True))
        ]
        return BatchSampler(texts, PLAN, packing=packing, seed=seed)

    whole = fresh()
    seen = {}
    count = np.zeros(3)
    hashes = []
    for step in range(18):
        batch = whole.batch(step)
        (windows,) = whole.windows(step, step + 1)
        hashes.append(batch.hash)
        rows = zip(
            batch.tokens.tolist(), windows.source.tolist(), windows.epoch.tolist(), strict=True
        )
        for tokens, source, epoch in rows:
            assert max(tokens) < 1000 * (len(LENGTHS[source]) + 1)
            seen.setdefault((source, epoch), []).extend(tokens)
            count[source] += len(tokens)
        assert batch.passes == pytest.approx(
            {f"t{i}": count[i] / (sum(lengths) - 1) for i, lengths in enumerate(LENGTHS)}, abs=1e-6
        )
        for world in (3,):  # ranks share the step and nothing else
            parts = [fresh().batch(step, rank, world) for rank in range(world)]
            assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
            assert {part.n_targets for part in parts} == {batch.n_targets}
    assert all(len(set(tokens)) == len(tokens) for tokens in seen.values())
    epochs = [max(epoch for source, epoch in seen if source == j) for j in range(3)]
    assert epochs[0] >= 2 and epochs[1] > epochs[0]  # texts end apart
    for step in (17, 4, 8, 9, 0):  # asked alone, as after a resume
        assert fresh().batch(step).hash == hashes[step]
    assert fresh(4).batch(5).hash != hashes[5]
    with pytest.raises(DataError, match="fewer than the 28 of one window"):
        BatchSampler(
            [TrainingText(stores[0]), TrainingText(stores[1])],
            [Segment(27, 1)],
            packing=packing,
            seed=0,
        )


@pytest.fixture
def mixed(settings, corpus, tmp_path) -> DataSettings:
    """`settings` with a second text, a fifth: three texts of its own, and copies of all of the corpus."""
    more = tmp_path / "more"
    for path in corpus.rglob("*.txt"):
        (more / path.parent.name).mkdir(parents=True, exist_ok=True)
        (more / path.parent.name / f"copy-{path.name}").write_bytes(path.read_bytes())
    for i in range(3):
        (more / f"own-{i}.txt").write_text(
            f"chapter {i}: " + " ".join(str(n * n) for n in range(200 + i))
        )
    return changed(
        settings, mixture=[{"share": 0.2, "source": {"name": "files", "path": str(more)}}]
    )


def test_additional_source_excludes_validation_text(mixed, settings):
    listener = Listener()
    first = prepare(settings, workers=1)
    both = prepare(mixed, listener, workers=1)
    (table,) = listener.tables  # the second text alone, without the first one's held-out text
    assert [row[1:] for row in table[:1]] == [[f"{both.others[0].train.n_documents}"]]
    assert (
        both.folder == first.folder == prepared_folder(mixed)
        and both.train.hash == first.train.hash
    )
    (other,) = both.others
    assert other.tokenizer.hash == first.tokenizer.hash
    names = set(other.train.names)
    assert {f"own-{i}.txt" for i in range(3)} <= names
    held = {Path(name).name for name in first.valid.names}
    assert len(held) == 7 and not any(
        f"copy-{name}" in {Path(n).name for n in names} for name in held
    )
    assert len(names) == 3 + 37 - 7
    # Its own held-out text is the first's, token for token.
    assert [other.valid.document(i).tolist() for i in range(7)] == [
        first.valid.document(i).tolist() for i in range(7)
    ]
    assert both.hash != first.hash == first.train.hash and both.longest == max(
        first.longest, int(other.train.lengths.max())
    )
    again = open_prepared(first.folder, [other.folder])
    assert again.hash == both.hash == prepare(mixed, workers=1).hash


def test_different_tokenizers_are_rejected(settings):
    first = prepare(settings, workers=1)
    bytewise = prepare(changed(settings, tokenizer={"name": "bytes"}), workers=1)
    mixed = changed(settings, mixture=[{"share": 0.25, "prepared": str(bytewise.folder)}])
    hashes = f"{bytewise.tokenizer.hash[:12]}, not {first.tokenizer.hash[:12]}"
    with pytest.raises(DataError, match=f"cannot be mixed with .*tokenizers differ .{hashes}"):
        prepare(mixed, workers=1)
    same = prepare(
        changed(settings, mixture=[{"share": 0.25, "prepared": str(first.folder)}]), workers=1
    )
    assert same.others[0].train.hash == first.train.hash


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ([{"share": 0.6, "prepared": "a"}, {"share": 0.4, "prepared": "b"}], "sum to 1"),
        ([{"share": 0.5}], "either source or prepared"),
        (
            [{"share": 0.5, "prepared": "a", "source": {"name": "stdlib"}}],
            "either source or prepared",
        ),
        ([{"share": 0.5, "prepared": "a", "max_bytes": 9}], "max_bytes requires source"),
        ([{"share": 0.12345, "prepared": "a"}], "share=0.12345"),
    ],
)
def test_invalid_mixtures_are_rejected(mixture, message):
    with pytest.raises(ValidationError, match=message):
        DataSettings.model_validate({"mixture": mixture})


NOWHERE = {"name": "files", "path": "no/such/folder"}


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ({"source": NOWHERE}, "data.source.path: "),
        ({"source": NOWHERE | {"path": ["docs", "no/such/folder"]}}, "data.source.path: no/such"),
        ({"valid_source": NOWHERE}, "data.valid_source.path: "),
        ({"mixture": [{"share": 0.2, "source": NOWHERE}]}, "data.mixture.0.source.path: "),
        (
            {"mixture": [{"share": 0.2, "prepared": "no/such"}]},
            "data.mixture.0.prepared: no/such has no prepared",
        ),
        (
            {"source": {"name": "prepared", "path": "no/such"}},
            "data.source.path: no/such has no prepared",
        ),
        (
            {"tokenizer": {"name": "sentencepiece", "model": "no.model"}},
            "no.model .* data.tokenizer.model",
        ),
        (
            {
                "source": {
                    "name": "hub",
                    "path": "json",
                    "data_files": ["no.jsonl", "https://x/y.jsonl"],
                }
            },
            "data.source.data_files: no.jsonl does",
        ),
        (
            {
                "source": {
                    "name": "task",
                    "share": 0.5,
                    "text": {"name": "filler"},
                    "task": {"name": "passkey", "haystack": NOWHERE},
                }
            },
            "data.source.task.haystack.path: ",
        ),
    ],
)
def test_missing_source_is_rejected_before_preparation(
    settings, tmp_path, monkeypatch, words, place
):
    asked = changed(settings, **words)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    check_texts(settings)
    with pytest.raises(DataError, match=place):
        check_texts(asked)
    with pytest.raises(DataError, match=place):
        prepare(asked, workers=1)
    assert not (tmp_path / "prepared").exists()


def test_errors_name_setting_of_the_source(settings, tmp_path):
    (tmp_path / "more.jsonl").write_text('{"body": "text"}\n')
    more = {"share": 0.2, "source": {"name": "files", "path": str(tmp_path / "more.jsonl")}}
    with pytest.raises(DataError, match=r"the right data\.mixture\.0\.source\.text_key"):
        prepare(changed(settings, mixture=[more]), workers=1)
