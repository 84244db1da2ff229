"""Find near-duplicates of validation text by shared shingles.

A shingle is the hash of 13 consecutive words (30 characters if the text is mostly Chinese, Japanese or
Korean), in lower case, without punctuation and spaces. One in SAMPLE is kept, selected by its hash, so the
same passage yields the same shingles in any document. All steps are vectorized over bytes, since a Python
loop over words would be slower than the tokenizer.
"""

from typing import NamedTuple

import numpy as np

from data.hashing import STEP, mixed, powers, range_hashes

WORDS, CHARACTERS = 13, 30
SAMPLE = 8
BLOCK = 1 << 20  # characters per block, to bound memory; the few shingles across block edges are skipped
FEWEST = 4  # with fewer sampled shingles, only identical text counts as a copy

_CLASS = np.zeros(256, dtype=bool)  # bytes of words: ASCII letters and digits, and all non-ASCII bytes
_CLASS[[*range(48, 58), *range(65, 91), *range(97, 123), *range(128, 256)]] = True
_LOWER = np.arange(256, dtype=np.uint64)
_LOWER[65:91] += 32


def words(text: str) -> tuple[np.ndarray, bool]:
    """Hashes of the words of a text, uint64, and whether most words are single CJK characters."""
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    inside = _CLASS[raw]
    single = (raw >= 0xE3) & (raw <= 0xED)  # lead bytes of U+3000 to U+DFFF: one word each
    before = np.concatenate([[False], inside[:-1]])
    begins = inside & (~before | single)
    # If a word of another script follows a CJK character, it starts after the three bytes of that character.
    ends_cjk = np.zeros(len(raw), dtype=bool)
    ends_cjk[3:] = single[:-3]
    begins |= inside & ends_cjk
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.zeros(0, dtype=np.uint64), False
    cjk = 2 * int(single[starts].sum()) > len(starts)
    # Only letters, so that the hash of a word does not depend on its context.
    letters = _LOWER[raw] * inside
    return range_hashes(letters, starts, np.append(starts[1:], len(raw))), cjk


def _sampled(text: str) -> np.ndarray:
    hashes, cjk = words(text)
    width = CHARACTERS if cjk else WORDS
    total = np.zeros(max(0, len(hashes) - width + 1), dtype=np.uint64)
    for k in range(width):
        total = total * STEP + hashes[k : k + len(total)]
    total = mixed(total)
    return total[total % np.uint64(SAMPLE) == 0]


def shingles(text: str) -> np.ndarray:
    """The unique sampled shingles of a text, sorted. If there are too few, a single shingle of the whole
    text.
    """
    blocks = [_sampled(text[start : start + BLOCK]) for start in range(0, len(text), BLOCK)]
    sampled = np.unique(np.concatenate(blocks)) if blocks else np.zeros(0, dtype=np.uint64)
    if len(sampled) >= FEWEST:
        return sampled
    hashes, _ = words(text)
    whole = (hashes * powers(int(STEP), max(1, len(hashes)))[: len(hashes)]).sum(dtype=np.uint64)
    return mixed(np.array([whole + np.uint64(len(hashes))]))


class DuplicateMatch(NamedTuple):
    own: float  # fraction of the text's sampled shingles found in validation text
    theirs: float  # largest fraction of one validation document's sampled shingles found in the text
    hits: np.ndarray  # the shared shingles


class ShingleIndex:
    """The shingles of all validation documents. `sets` has those of one document per entry."""

    def __init__(self, sets: list[np.ndarray]):
        self.counts = np.array([len(one) for one in sets], dtype=np.int64)
        hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *sets])
        order = np.argsort(hashes, kind="stable")
        self.hashes, self.owners = hashes[order], np.repeat(np.arange(len(sets)), self.counts)[order]

    def match(self, text: str) -> DuplicateMatch:
        own = shingles(text)
        low = np.searchsorted(self.hashes, own, side="left")
        spans = np.searchsorted(self.hashes, own, side="right") - low
        found = spans > 0
        if not found.any():
            return DuplicateMatch(0.0, 0.0, own[:0])
        # Every (shingle, document) pair of the hits: low[k], low[k] + 1, ... for each hit k.
        low, spans = low[found], spans[found]
        offsets = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
        owners, shared = np.unique(self.owners[np.repeat(low, spans) + offsets], return_counts=True)
        return DuplicateMatch(float(found.mean()), float((shared / self.counts[owners]).max()), own[found])
