"""Near-duplicates: what counts as a copy and what does not."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data.hashing import mixed
from data.preparation.duplicates import (
    BLOCK,
    TOGETHER,
    DuplicateMatch,
    ShingleIndex,
    shingles,
    words,
)

RNG = random.Random(8)
VOCABULARY = ["".join(RNG.choices("abcdefgh", k=RNG.randrange(2, 9))) for _ in range(500)]


def shingles_of(text: str) -> np.ndarray:
    (found,) = shingles([text])
    return found


def match(index: ShingleIndex, text: str) -> DuplicateMatch:
    (found,) = index.matches([text])
    return found


def text_of(n: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(VOCABULARY) for _ in range(n))


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text("abcXYZ09é", min_size=1, max_size=7), min_size=1, max_size=9),
    st.text("., \n-_!", min_size=1),
)
def test_words_are_independent_of_separators(parts, gap):
    plain, _ = words(" ".join(parts))
    other, _ = words(gap + gap.join(parts).upper().replace("É", "é") + gap)
    assert len(plain) == len(parts) and plain.tolist() == other.tolist()
    assert [words(part)[0][0] for part in parts] == plain.tolist()
    assert len(set(plain.tolist())) == len({part.lower() for part in parts})


def test_chinese_characters_are_words():
    hashes, cjk = words("天下大势，分久必合")
    assert cjk and len(hashes) == 9  # the full-width comma is a character like the others
    assert (
        hashes[0] == words("abc 天")[0][1]
        and words("abc天d")[0].tolist() == words("abc 天 d")[0].tolist()
    )
    assert not words("mostly latin text 天")[1]


def test_one_shingle_in_eight_is_kept():
    n = len(shingles_of(text_of(40_000, 1)))
    assert abs(n - 40_000 / 8) < 5 * (40_000 / 8 * 7 / 8) ** 0.5


@pytest.fixture
def index() -> ShingleIndex:
    return ShingleIndex(
        [shingles_of(text) for text in (text_of(3000, 1), text_of(900, 2), "three short words")]
    )


def test_near_duplicates_are_found_despite_formatting(index):
    copy = text_of(3000, 1).upper().replace(" ", ",\n\t")
    assert match(index, copy)[:2] == (1.0, 1.0)
    assert match(index, "Three  short, words!").own == 1.0


def test_different_text_is_not_a_duplicate(index):
    found = match(index, text_of(3000, 3))
    assert found[:2] == (0.0, 0.0) and len(found.hits) == 0
    assert match(index, "other short words").own == 0.0


def test_contained_and_containing_duplicates(index):
    part = match(index, " ".join(text_of(3000, 1).split()[500:900]))
    assert part.own == 1.0 and 0.05 < part.theirs < 0.3
    inside = match(index, text_of(4000, 4) + " " + text_of(900, 2) + " " + text_of(4000, 5))
    assert inside.theirs > 0.95 and 0.03 < inside.own < 0.2
    third = match(index, text_of(2000, 6) + " " + text_of(900, 2))
    assert 0.15 < third.own < 0.45
    assert np.isin(third.hits, shingles_of(text_of(900, 2))).all()


def test_a_passage_shared_by_two_validation_texts_counts_for_both():
    shared = text_of(800, 7)
    index = ShingleIndex([shingles_of(shared + " " + text_of(4000, 8)), shingles_of(shared)])
    assert match(index, shared).theirs == 1.0


def test_no_duplicates_without_validation_text():
    assert match(ShingleIndex([]), text_of(100, 1))[:2] == (0.0, 0.0)


def documents():
    """Latin and Chinese texts of all lengths, some without words."""
    parts = st.sampled_from(["天下大势", "，", "abc ", "d. ", "\0", "é x ", "\n"])
    drawn = st.lists(parts, max_size=300).map("".join)
    return st.lists(drawn | st.builds(text_of, st.integers(0, 400), st.integers(0, 9)), max_size=6)


@hypothesis_settings(max_examples=60, deadline=None)
@given(documents(), st.sampled_from([40, 700, BLOCK]), st.sampled_from([1, 500, TOGETHER]))
def test_shingles_of_a_text_are_independent_of_its_neighbors(texts, block, together):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.preparation.duplicates.BLOCK", block)
        patch.setattr("data.preparation.duplicates.TOGETHER", together)
        many = [*shingles(texts)]
        assert len(many) == len(texts)
        for found, text in zip(many, texts, strict=True):
            assert found.tolist() == shingles_of(text).tolist()


def test_long_text_is_processed_in_blocks(monkeypatch):
    whole = shingles_of(text_of(5000, 9))
    monkeypatch.setattr("data.preparation.duplicates.BLOCK", 3000)
    assert np.isin(shingles_of(text_of(5000, 9)), whole).mean() > 0.95
    assert len(shingles_of(text_of(5000, 9))) > 0.9 * len(whole)


def test_hashes_are_mixed_by_splitmix64():
    """Its first three numbers from the seed 0, as published with the generator."""
    step = 0x9E3779B97F4A7C15
    found = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = np.array([k * step % 2**64 for k in (1, 2, 3)], dtype=np.uint64)
    assert mixed(states).tolist() == found
