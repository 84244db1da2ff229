"""Find near-duplicates of validation text by shared shingles.

A shingle is the hash of 13 consecutive words (30 characters if the text is mostly Chinese, Japanese
or Korean), in lower case, without punctuation and spaces. One in SAMPLE is kept, selected by its
hash, so the same passage yields the same shingles in any document. All steps are vectorized over
the bytes of many documents: a Python loop would be slower than the tokenizer, and its threads would
wait for each other.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from data.hashing import STEP, mixed, powers, range_hashes

WORDS = 13
CHARACTERS = 30
SAMPLE = 8
# characters per block, to bound memory; the few shingles across block edges are skipped
BLOCK = 1 << 20
TOGETHER = 1 << 18  # characters of documents that are processed together
FEWEST = 4  # with fewer sampled shingles, only identical text counts as a copy

# bytes of words: ASCII letters and digits, and all non-ASCII bytes
_CLASS = np.zeros(256, dtype=bool)
_CLASS[[*range(48, 58), *range(65, 91), *range(97, 123), *range(128, 256)]] = True
_LOWER = np.arange(256, dtype=np.uint64)
_LOWER[65:91] += 32


def words(text: str) -> tuple[np.ndarray, bool]:
    """Hashes of the words of a text, uint64, and whether most words are single CJK characters."""
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    hashes, starts, single = _words(raw)
    return hashes, 2 * int(single[starts].sum()) > len(starts)


def _words(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hash and start of each word in bytes of UTF-8, and for each byte whether it begins a CJK
    character."""
    inside = _CLASS[raw]
    single = (raw >= 0xE3) & (raw <= 0xED)  # lead bytes of U+3000 to U+DFFF: one word each
    before = np.concatenate([[False], inside[:-1]])
    begins = inside & (~before | single)
    # If a word of another script follows a CJK character, it starts after the three bytes of that
    # character.
    ends_cjk = np.zeros(len(raw), dtype=bool)
    ends_cjk[3:] = single[:-3]
    begins |= inside & ends_cjk
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.zeros(0, dtype=np.uint64), starts, single
    # Only letters, so that the hash of a word does not depend on its context.
    letters = _LOWER[raw] * inside
    return (
        range_hashes(
            letters,
            starts,
            np.append(starts[1:], len(raw)),
        ),
        starts,
        single,
    )


def _rolling(hashes: np.ndarray, width: int) -> np.ndarray:
    """Hashes of `width` consecutive words."""
    total = np.zeros(max(0, len(hashes) - width + 1), dtype=np.uint64)
    for k in range(width):
        total = total * STEP + hashes[k : k + len(total)]
    return mixed(total)


def _is_sampled(hashes: np.ndarray) -> np.ndarray:
    return hashes % np.uint64(SAMPLE) == 0


def _shingles_of_one(text: str) -> np.ndarray:
    """`shingles` of a long text, of one mostly in CJK characters, or of one with few shingles."""
    blocks = []
    for start in range(0, len(text), BLOCK):
        hashes, cjk = words(text[start : start + BLOCK])
        total = _rolling(hashes, CHARACTERS if cjk else WORDS)
        blocks.append(total[_is_sampled(total)])
    sampled = np.unique(np.concatenate(blocks)) if blocks else np.zeros(0, dtype=np.uint64)
    if len(sampled) >= FEWEST:
        return sampled
    hashes, _ = words(text)
    whole = (hashes * powers(int(STEP), max(1, len(hashes)))[: len(hashes)]).sum(dtype=np.uint64)
    return mixed(np.array([whole + np.uint64(len(hashes))]))


def shingles(texts: Iterable[str]) -> Iterator[np.ndarray]:
    """The unique sampled shingles of each text, sorted. If there are too few, a single shingle of
    the whole text.
    """
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > TOGETHER:
            yield from _shingles_of_short(batch)
            batch = []
            size = 0
        if len(text) > TOGETHER:
            yield _shingles_of_one(text)
        else:
            batch.append(text)
            size += len(text)
    if batch:
        yield from _shingles_of_short(batch)


def _shingles_of_short(texts: list[str]) -> Iterator[np.ndarray]:
    parts = [text.encode() for text in texts]
    stops = np.cumsum([len(part) + 1 for part in parts])  # a byte that is in no word separates them
    hashes, starts, single = _words(np.frombuffer(b"\0".join([*parts, b""]), dtype=np.uint8))
    owner = np.searchsorted(stops, starts, side="right")
    count = np.bincount(owner, minlength=len(texts))
    cjk = 2 * np.bincount(owner, weights=single[starts], minlength=len(texts)) > count
    total = _rolling(hashes, WORDS)
    first = owner[: len(total)]
    kept = _is_sampled(total) & (first == owner[len(owner) - len(total) :])
    total = total[kept]
    first = first[kept]
    order = np.lexsort((total, first))
    total = total[order]
    first = first[order]
    new = np.ones(len(total), dtype=bool)
    new[1:] = (total[1:] != total[:-1]) | (first[1:] != first[:-1])
    total = total[new]
    first = first[new]
    bounds = np.searchsorted(first, np.arange(len(texts) + 1))
    for i, text in enumerate(texts):
        own = total[bounds[i] : bounds[i + 1]]
        yield own if len(own) >= FEWEST and not cjk[i] else _shingles_of_one(text)


class DuplicateMatch(NamedTuple):
    own: float  # fraction of the text's sampled shingles found in validation text
    # largest fraction of one validation document's sampled shingles found in the text
    theirs: float
    hits: np.ndarray  # the shared shingles


class ShingleIndex:
    """The shingles of all validation documents. `sets` has those of one document per entry."""

    def __init__(self, sets: list[np.ndarray]):
        self.counts = np.array([len(one) for one in sets], dtype=np.int64)
        hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *sets])
        order = np.argsort(hashes, kind="stable")
        self.hashes, self.owners = (
            hashes[order],
            np.repeat(np.arange(len(sets)), self.counts)[order],
        )

    def matches(self, texts: Iterable[str]) -> Iterator[DuplicateMatch]:
        for own in shingles(texts):
            low = np.searchsorted(self.hashes, own, side="left")
            spans = np.searchsorted(self.hashes, own, side="right") - low
            found = spans > 0
            if not found.any():
                yield DuplicateMatch(0.0, 0.0, own[:0])
                continue
            # Every (shingle, document) pair of the hits: low[k], low[k] + 1, ... for each hit k.
            low = low[found]
            spans = spans[found]
            offsets = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
            owners, shared = np.unique(
                self.owners[np.repeat(low, spans) + offsets], return_counts=True
            )
            theirs = float((shared / self.counts[owners]).max())
            yield DuplicateMatch(float(found.mean()), theirs, own[found])
