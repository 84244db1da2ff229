"""Find near-duplicates of validation text by shared shingles.

A shingle is the hash of 13 consecutive words (30 characters if the text is mostly Chinese, Japanese
or Korean), in lower case, without punctuation and spaces. One in SAMPLE is kept, selected by its
hash, so the same passage yields the same shingles in any document. All steps are vectorized over
bytes: a Python loop would be slower than the tokenizer, and its threads would wait for each other.
"""

import functools

import numpy as np

from data.random_draws import STEP, mixed

WORDS = 13
CHARACTERS = 30
SAMPLE = 8
# characters per block, to bound memory; the few shingles across block edges are skipped
BLOCK = 1 << 20
FEWEST = 4  # with fewer sampled shingles, only identical text counts as a copy

# bytes of words: ASCII letters and digits, and all non-ASCII bytes
_CLASS = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])
_LOWER = np.arange(256, dtype=np.uint64)
_LOWER[ord("A") : ord("Z") + 1] += 32
_FACTOR = 0x5851F42D4C957F2D  # odd, hence invertible modulo 2**64
_INVERSE = pow(_FACTOR, -1, 1 << 64)


def powers(base: int, n: int) -> np.ndarray:
    """base**0 ... base**(n-1) modulo 2**64."""
    out = np.full(n, base, dtype=np.uint64)
    out[0] = 1
    return np.multiply.accumulate(out)


_power_table = functools.cache(powers)


def range_hashes(
    values: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
) -> np.ndarray:
    """uint64 polynomial hash of each range values[start:stop], independent of its offset. values:
    uint64 (n,)."""
    table = 1 << max(10, (len(values) - 1).bit_length())  # a table for each power of two
    prefix = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values * _power_table(_FACTOR, table)[: len(values)], out=prefix[1:])
    sums = prefix[stops] - prefix[starts]
    sums = sums * _power_table(_INVERSE, table)[starts]
    return mixed(sums + STEP)


def words(text: str) -> tuple[np.ndarray, bool]:
    """Hashes of the words of a text, uint64, and whether most words are single CJK characters."""
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    inside = _CLASS[raw]
    single = (raw >= 0xE3) & (raw <= 0xED)  # lead bytes of U+3000 to U+DFFF: one word each
    begins = inside.copy()
    begins[1:] &= ~inside[:-1] | single[1:]
    # If a word of another script follows a CJK character, it starts after the three bytes of that
    # character.
    begins[3:] |= inside[3:] & single[:-3]
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], len(raw))
    # Only letters, so that the hash of a word does not depend on its context.
    letters = _LOWER[raw] * inside
    hashes = range_hashes(letters, starts, stops)
    return hashes, 2 * int(single[starts].sum()) > len(starts)


def _rolling(hashes: np.ndarray, width: int) -> np.ndarray:
    """Hashes of `width` consecutive words."""
    total = np.zeros(max(0, len(hashes) - width + 1), dtype=np.uint64)
    for k in range(width):
        total = total * STEP + hashes[k : k + len(total)]
    return mixed(total)


def shingles(text: str) -> np.ndarray:
    """The unique sampled shingles of a text, sorted. If there are too few, a single shingle of the
    whole text.
    """
    blocks = [np.zeros(0, dtype=np.uint64)]
    for start in range(0, len(text), BLOCK):
        hashes, is_cjk = words(text[start : start + BLOCK])
        total = _rolling(hashes, CHARACTERS if is_cjk else WORDS)
        blocks.append(total[total % np.uint64(SAMPLE) == 0])
    sampled = np.unique(np.concatenate(blocks))
    if len(sampled) >= FEWEST:
        return sampled
    hashes, _ = words(text)
    factors = powers(int(STEP), max(1, len(hashes)))[: len(hashes)]
    whole = (hashes * factors).sum(dtype=np.uint64)
    return mixed(np.array([whole + np.uint64(len(hashes))]))


class ShingleIndex:
    """The shingles of all validation documents. Each entry of `sets` has the shingles of one
    document."""

    def __init__(self, sets: list[np.ndarray]):
        self.counts = np.array([len(own) for own in sets], dtype=np.int64)
        hashes = np.concatenate([np.zeros(0, dtype=np.uint64), *sets])
        order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[order]
        self.owners = np.repeat(np.arange(len(sets)), self.counts)[order]

    def shared(self, text: str) -> tuple[float, float]:
        """The fraction of the text's shingles that are in validation text, and the largest fraction
        of one validation document's shingles that are in the text."""
        own = shingles(text)
        low = np.searchsorted(self.hashes, own, side="left")
        high = np.searchsorted(self.hashes, own, side="right")
        hits = np.flatnonzero(high > low)
        shared = np.zeros(len(self.counts), dtype=np.int64)
        for hit in hits:  # a document has each of its shingles once
            shared[self.owners[low[hit] : high[hit]]] += 1
        return len(hits) / len(own), float((shared / self.counts).max(initial=0.0))
