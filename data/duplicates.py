"""Near-duplicates of validation text, found by shared shingles.

A shingle is the hash of 13 consecutive words (30 characters where the text is mostly Chinese, Japanese or
Korean), letters in lower case, punctuation and spacing ignored. One in SAMPLE is kept, chosen by its own
hash, so that the same passage yields the same shingles wherever it stands. Everything is done on arrays of
bytes: a Python loop over words would take longer than the tokenizer.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

WORDS, CHARACTERS = 13, 30
SAMPLE = 8
BLOCK = 1 << 20  # characters looked at together: bounds memory; the few shingles across an edge are not seen
FEWEST = 4  # sampled shingles below which only an identical text counts as a copy

_CLASS = np.zeros(256, dtype=bool)  # bytes that belong to words: ASCII letters and digits, all of non-ASCII
_CLASS[[*range(48, 58), *range(65, 91), *range(97, 123), *range(128, 256)]] = True
_LOWER = np.arange(256, dtype=np.uint64)
_LOWER[65:91] += 32
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTOR = 0x5851F42D4C957F2D  # odd, so that it can be divided by modulo 2**64
_INVERSE = pow(_FACTOR, -1, 1 << 64)


def mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: spreads the bits of uint64 values."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def powers(base: int, n: int) -> np.ndarray:
    """base**0 ... base**(n-1) modulo 2**64."""
    out = np.full(n, base, dtype=np.uint64)
    out[0] = 1
    return np.multiply.accumulate(out)


def words(text: str) -> tuple[np.ndarray, bool]:
    """Hashes of the words of a text, uint64; and whether they are mostly single CJK characters."""
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    inside = _CLASS[raw]
    single = (raw >= 0xE3) & (raw <= 0xED)  # lead bytes of U+3000 to U+DFFF: a word each
    before = np.concatenate([[False], inside[:-1]])
    begins = inside & (~before | single)
    # A word of another script that follows a CJK character begins where that character's three bytes end.
    ends_cjk = np.zeros(len(raw), dtype=bool)
    ends_cjk[3:] = single[:-3]
    begins |= inside & ends_cjk
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.zeros(0, dtype=np.uint64), False
    cjk = 2 * int(single[starts].sum()) > len(starts)
    # Letters only, so that a word's hash depends on nothing around it.
    letters = _LOWER[raw] * inside
    prefix = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(letters * powers(_FACTOR, len(raw)))])
    stops = np.concatenate([starts[1:], [len(raw)]])
    sums = (prefix[stops] - prefix[starts]) * powers(_INVERSE, len(raw))[starts]
    return mixed(sums + _STEP), cjk


def _sampled(text: str) -> np.ndarray:
    hashes, cjk = words(text)
    width = CHARACTERS if cjk else WORDS
    total = np.zeros(max(0, len(hashes) - width + 1), dtype=np.uint64)
    for k in range(width):
        total = total * _STEP + hashes[k : k + len(total)]
    total = mixed(total)
    return total[total % np.uint64(SAMPLE) == 0]


def shingles(text: str) -> np.ndarray:
    """The sampled shingles of a text, sorted, each once; one for the whole of a text too short for FEWEST."""
    blocks = [_sampled(text[start : start + BLOCK]) for start in range(0, len(text), BLOCK)]
    sampled = np.unique(np.concatenate(blocks)) if blocks else np.zeros(0, dtype=np.uint64)
    if len(sampled) >= FEWEST:
        return sampled
    hashes, _ = words(text)
    whole = (hashes * powers(int(_STEP), max(1, len(hashes)))[: len(hashes)]).sum(dtype=np.uint64)
    return mixed(np.array([whole + np.uint64(len(hashes))]))


class Match(NamedTuple):
    own: float  # share of the text's own sampled shingles that stand in validation text
    theirs: float  # largest share of one validation document's sampled shingles that stand in the text
    hits: np.ndarray  # the shared shingles


class Index:
    """The shingles of all validation documents, memory-mapped so that workers share one copy."""

    def __init__(self, folder: Path):
        self.hashes = np.load(folder / "hashes.npy", mmap_mode="r")
        self.owners = np.load(folder / "owners.npy", mmap_mode="r")
        self.counts = np.load(folder / "counts.npy", mmap_mode="r")

    def match(self, text: str) -> Match:
        own = shingles(text)
        low = np.searchsorted(self.hashes, own, side="left")
        spans = np.searchsorted(self.hashes, own, side="right") - low
        found = spans > 0
        if not found.any():
            return Match(0.0, 0.0, own[:0])
        # Every (shingle, document) pair behind the hits: low[k], low[k] + 1, ... for each hit k.
        low, spans = low[found], spans[found]
        offsets = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
        owners, shared = np.unique(self.owners[np.repeat(low, spans) + offsets], return_counts=True)
        return Match(float(found.mean()), float((shared / self.counts[owners]).max()), own[found])


def save_index(folder: Path, sets: list[np.ndarray]) -> None:
    """Write the index of `sets`, the shingles of one validation document each."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = np.array([len(one) for one in sets], dtype=np.int64)
    hashes = np.concatenate(sets) if sets else np.zeros(0, dtype=np.uint64)
    owners = np.repeat(np.arange(len(sets), dtype=np.int64), counts)
    order = np.argsort(hashes, kind="stable")
    np.save(folder / "hashes.npy", hashes[order])
    np.save(folder / "owners.npy", owners[order])
    np.save(folder / "counts.npy", counts)
