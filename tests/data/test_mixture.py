"""Mixtures: exact shares, epochs per source, one tokenizer, no held-out text."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data import DataError, DataSettings, check_texts, is_prepared, open_prepared
from data.preparation.preparation import prepare
from data.sampling.batches import TrainingText
from data.sampling.window_order import MixturePattern
from tests.data.conftest import changed
from tests.data.stores import check_ranks, make_store, sampler
from tests.files import table


@hypothesis_settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_mixture_proportions_are_exact_to_one_sample(parts):
    shares = [Fraction(part, sum(parts)) for part in parts]
    pattern = MixturePattern(shares)
    n = np.arange(3 * pattern.period + 1)
    turns = pattern.turns(n[:-1])
    for source, share in enumerate(shares):
        counted = np.concatenate([[0], np.cumsum(turns == source)])
        assert np.array_equal(pattern.before(source, n), counted)
        assert all(abs(counted[i] - share * i) < 1 for i in n.tolist())


LENGTHS = [[9, 8, 7, 6, 30, 5, 4, 3, 2], [5, 11, 3, 8], [40, 2, 13]]
SHARES = [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
PLAN = [(4, 6, 4), (9, 3, 5), (4, 3, 9)]


@pytest.mark.parametrize("packing", ["concat", "intra_document"])
def test_sources_have_separate_epochs(packing):
    texts = [TrainingText(make_store(LENGTHS[i]), SHARES[i], str(i)) for i in range(3)]

    def fresh(seed: int = 3):
        return sampler(texts, *PLAN, packing=packing, seed=seed)

    whole = fresh()
    seen: dict[tuple, list] = {}
    count = Counter()  # tokens of each text
    hashes = []
    for step in range(18):
        batch = whole.batch(step)
        hashes.append(batch.hash)
        for tokens, (stream, *_) in zip(batch.tokens.tolist(), whole.windows(step), strict=True):
            source = stream.source
            assert max(tokens) < 1000 * (len(LENGTHS[source]) + 1)
            seen.setdefault((source, stream.epoch), []).extend(tokens)
            count[source] += len(tokens)
        passes = {str(i): count[i] / (sum(lengths) - 1) for i, lengths in enumerate(LENGTHS)}
        assert whole.passes(step + 1) == pytest.approx(passes, abs=1e-6)
        check_ranks(lambda *ranks, step=step: fresh().batch(step, *ranks), batch, worlds=[3])
    assert all(len(set(tokens)) == len(tokens) for tokens in seen.values())
    epochs = [max(epoch for source, epoch in seen if source == j) for j in range(3)]
    assert epochs[0] >= 2
    assert epochs[1] > epochs[0]  # texts end apart
    for step in (17, 4, 8, 9, 0):  # in another order, as after a resume
        assert fresh().batch(step).hash == hashes[step]
    assert fresh(4).batch(5).hash != hashes[5]


def test_additional_source_excludes_validation_text(settings, corpus, tmp_path):
    """The second text has three documents of its own, and copies of all of the first."""
    more = tmp_path / "more"
    more.mkdir()
    for path in corpus.rglob("*.txt"):
        (more / f"copy-{path.name}").write_bytes(path.read_bytes())
    for i in range(3):
        numbers = " ".join(str(n * n) for n in range(200 + i))
        (more / f"own-{i}.txt").write_text(f"chapter {i}: {numbers}")
    source = {"name": "files", "path": str(more)}
    mixed = changed(settings, mixture=[{"share": 0.2, "source": source}])
    first = prepare(settings, workers=1)
    missing = changed(settings, mixture=[{"share": 0.2, "source": source | {"path": "no/such"}}])
    with pytest.raises(DataError, match=r"data\.mixture\.0\.source\.path"):
        is_prepared(missing)
    both = prepare(mixed, workers=1)
    (other,) = both.others
    assert both.folder == first.folder
    assert both.train.hash == first.hash != both.hash
    held_out = {f"copy-{Path(name).name}" for name in first.valid.names}
    names = set(other.train.names)
    assert len(held_out) == 7
    assert not held_out & names
    assert len(names) == 3 + 37 - 7
    for i in range(7):  # its own held-out text is the first's, token for token
        assert np.array_equal(other.valid.document(i), first.valid.document(i))
    again = open_prepared(first.folder, [other.folder])
    assert again.hash == both.hash == prepare(mixed, workers=1).hash
    for text in (corpus, more):  # the folders are found on another machine
        text.rename(text.with_suffix(".away"))
    root = Path(settings.root).rename(tmp_path / "moved")
    assert prepare(changed(mixed, root=str(root)), workers=1).hash == both.hash


TABLE = table("data/refused_sources.yaml")


@pytest.mark.parametrize(("mixture", "setting"), TABLE["mixtures"])
def test_invalid_mixtures_are_rejected(mixture, setting):
    with pytest.raises(ValueError, match=setting):
        DataSettings.model_validate({"mixture": mixture})


@pytest.mark.parametrize(("words", "setting"), TABLE["missing"])
def test_missing_source_is_rejected_before_preparation(
    settings, tmp_path, monkeypatch, words, setting
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    check_texts(settings)
    for use in (check_texts, prepare):
        with pytest.raises(DataError, match=setting):
            use(changed(settings, **words))
    assert not (tmp_path / "prepared").exists()
