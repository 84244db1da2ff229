"""Near-duplicates: what counts as a copy and what does not."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data.preparation.duplicates import ShingleIndex, shingles, words
from data.random_draws import mixed

RNG = random.Random(8)
VOCABULARY = ["".join(RNG.choices("abcdefgh", k=RNG.randrange(2, 9))) for _ in range(500)]


def text_of(n: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=n))


@hypothesis_settings(max_examples=40)
@given(
    st.lists(st.text("abcXYZ09é", min_size=1, max_size=7), min_size=1, max_size=9),
    st.text("., \n-_!", min_size=1),
)
def test_words_are_independent_of_separators(parts, gap):
    plain, _ = words(" ".join(parts))
    other, _ = words(gap + gap.join(parts).upper().replace("É", "é") + gap)
    assert plain.tolist() == other.tolist() == [words(part)[0][0] for part in parts]
    assert len(set(plain.tolist())) == len({part.lower() for part in parts})


def test_chinese_characters_are_words():
    hashes, is_cjk = words("天下大势，分久必合")
    assert is_cjk
    assert len(hashes) == 9  # the full-width comma is a character like the others
    assert hashes[0] == words("abc 天")[0][1]
    assert words("abc天d")[0].tolist() == words("abc 天 d")[0].tolist()
    assert not words("mostly latin text 天")[1]


FIRST = text_of(3000, 1)
SECOND = text_of(900, 2)


@pytest.mark.parametrize(
    ("text", "own", "theirs"),
    [
        (FIRST.upper().replace(" ", ",\n\t"), (1, 1), (1, 1)),
        ("Three  short, words!", (1, 1), (1, 1)),
        ("", (0, 0), (0, 0)),
        (text_of(3000, 3), (0, 0), (0, 0)),
        (" ".join(FIRST.split()[500:900]), (1, 1), (0.05, 0.3)),
        (" ".join([text_of(4000, 4), SECOND, text_of(4000, 5)]), (0.03, 0.2), (0.95, 1)),
        (f"{text_of(2000, 6)} {SECOND}", (0.15, 0.45), (0.95, 1)),
        (text_of(800, 7), (1, 1), (1, 1)),  # alone in the fourth, and a part of the fifth
    ],
)
def test_matches(text, own, theirs):
    fourth = text_of(800, 7)
    fifth = f"{fourth} {text_of(4000, 8)}"
    held_out = [FIRST, SECOND, "three short words", fourth, fifth]
    index = ShingleIndex([shingles(one) for one in held_out])
    for share, (least, most) in zip(index.shared(text), (own, theirs), strict=True):
        assert least <= share <= most


def test_hashes_are_mixed_by_splitmix64():
    """Its first three numbers from the seed 0, as published with the generator."""
    step = 0x9E3779B97F4A7C15
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = np.array([k * step % 2**64 for k in (1, 2, 3)], dtype=np.uint64)
    assert mixed(states).tolist() == published
