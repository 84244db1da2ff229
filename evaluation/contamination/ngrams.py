"""Hash passages of 13 words (64 bits), at every offset of a store's text, with their token
positions.

Text is normalized with NFKC and casefold, and only word characters count: letters, digits and
combining marks, not the underscore, which marks italics in books. In a script without spaces each
character is a word, and 30 of them make a passage; in mixed text a word counts 1/13 and a character
1/30 of a passage. All steps are vectorized over bytes, since a Python loop over words would take
minutes.

Decomposition (NFKD) replaces NFKC: both give the same equalities, and NFKD works on single
characters.
"""

import functools
import unicodedata
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from data.hashing import range_hashes
from data.preparation.duplicates import CHARACTERS, WORDS

VERSION = 3  # of the cache format: files of other versions are ignored
BLOCK = 1 << 17  # tokens per block: bounds memory
OVERLAP = 1 << 10  # tokens shared by blocks of one document, far more than a passage

# Scripts written without spaces between words: Thai and Lao, Myanmar, Khmer, kana and bopomofo,
# Han.
_UNSPACED = [
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3040, 0x312F),
    (0x31A0, 0x31BF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0x20000, 0x3FFFF),
]
# no word, part of a word, a word by itself, combining mark
_NONE, _LETTER, _SINGLE, _MARK = range(4)
# the weight of a passage; a word weighs CHARACTERS, a single character WORDS
_FULL = WORDS * CHARACTERS


class Passages(NamedTuple):
    """Every passage of one block of text. All arrays (n,)."""

    hashes: np.ndarray  # uint64
    document: np.ndarray  # int64, as numbered in the store
    first: np.ndarray  # int64, stored index of the first token that holds a part of it ...
    last: np.ndarray  # ... and of the last


@functools.cache
def _folded(code: int) -> np.ndarray:
    """The folded decomposition of a character: rows (code, kind, canonical combining class)."""
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", chr(code)).casefold())
    return np.array(
        [(ord(char), _kind(char), unicodedata.combining(char)) for char in text]
    ).reshape(-1, 3)


def _kind(character: str) -> int:
    code = ord(character)
    if unicodedata.category(character).startswith("M"):
        return _MARK
    if not character.isalnum():
        return _NONE
    return _SINGLE if any(low <= code <= high for low, high in _UNSPACED) else _LETTER


def _decode(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Code points of UTF-8 bytes (n,) and the byte at which each begins, (m,) both. A byte that is
    not UTF-8 is a character by itself, which belongs to no word."""
    if raw.max(initial=0) < 0x80:
        return raw.astype(np.int64), np.arange(len(raw))
    text = raw.tobytes().decode("utf-8", "surrogateescape").encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(text, dtype=np.uint32).astype(np.int64)
    size = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    size[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1  # escaped bytes
    return codes, np.cumsum(size) - size


def _normal(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Folded characters (m,), their kinds, and the first and last byte of their source
    characters."""
    codes, starts = _decode(raw)
    ends = np.append(starts[1:], len(raw)) - 1
    distinct = np.flatnonzero(np.bincount(codes))
    folded = [_folded(code) for code in distinct.tolist()]
    code, kind, order = np.concatenate(folded).T.copy()
    kind = kind.astype(np.uint8)
    order = order.astype(np.uint8)
    sizes = np.array([len(rows) for rows in folded])
    index = np.zeros(int(distinct[-1]) + 1, dtype=np.int64)
    index[distinct] = np.arange(len(distinct))
    which = index[codes]
    row = (np.cumsum(sizes) - sizes)[which]  # of the three columns
    if (size := sizes[which]).max() > 1:
        within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
        row, starts, ends = (np.repeat(column, size) for column in (row, starts, ends))
        row = row + within
    order = order[row]
    if ((order[1:] < order[:-1]) & (order[1:] > 0)).any():  # marks on one letter, in another order
        by_order = np.lexsort((order, np.cumsum(order == 0)))
        row = row[by_order]
        starts = starts[by_order]
        ends = ends[by_order]
    return code[row], kind[row], starts, ends


def _words(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Hashes (n,) uint64 of the words, their weights, and the first and last byte of each."""
    codes, kind, first_byte, last_byte = _normal(raw)
    inside = kind != _NONE
    before = np.append(_NONE, kind[:-1])
    # A mark continues the previous character; a letter starts a word after a single character and
    # its marks, so the kind of the marked character is carried forward.
    unmarked = np.where(kind != _MARK, np.arange(len(kind)), 0)
    base = np.append(_NONE, kind[np.maximum.accumulate(unmarked)][:-1])
    begins = inside & (
        (before == _NONE) | (kind == _SINGLE) | ((kind == _LETTER) & (base == _SINGLE))
    )
    closes = inside & (np.append(begins[1:], True) | np.append(~inside[1:], True))
    starts = np.flatnonzero(begins)
    last = np.flatnonzero(closes)
    hashes = range_hashes(
        np.where(inside, codes + 1, 0).astype(np.uint64),
        starts,
        last + 1,
    )
    weight = np.where(kind[starts] == _SINGLE, WORDS, CHARACTERS)
    return hashes, weight, first_byte[starts], last_byte[last]


class PassageReader:
    """Passages of stores made with one tokenizer (`.pieces`: the raw bytes of each id)."""

    def __init__(self, tokenizer):
        # the last one separates documents, so that no word crosses them
        pieces = [*tokenizer.pieces, b"\n"]
        self.size = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self.start = np.cumsum(self.size) - self.size
        self.bytes = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self.between = len(pieces) - 1

    def passages(
        self, store, after: Callable[[int], None] = lambda tokens: None
    ) -> Iterator[Passages]:
        """All passages of a store, block by block; `after(tokens)` runs after each block.

        Passages at the block edges of a long document occur twice, or with a truncated word.
        """
        for parts in _blocks(store):
            yield self._block(parts)
            after(sum(len(ids) for _, _, ids in parts))

    def _block(self, parts: list[tuple[int, int, np.ndarray]]) -> Passages:
        """`parts`: (document, index of the first token, ids)."""
        between = np.array([self.between], dtype=np.int64)
        ids = np.concatenate([piece for _, _, one in parts for piece in (one, between)]).astype(
            np.int64
        )
        tokens = np.array([len(one) + 1 for _, _, one in parts])
        size = self.size[ids]
        begins = np.cumsum(size) - size  # of each token, in bytes
        raw = self.bytes[np.repeat(self.start[ids] - begins, size) + np.arange(int(size.sum()))]
        of_word, weight, first_byte, last_byte = _words(raw)
        # The last word of the passage that each word starts, where the text does not end before.
        total = np.cumsum(weight)
        ends = np.searchsorted(total, total - weight + _FULL)
        starts = np.flatnonzero(ends < len(weight))
        ends = ends[starts]
        hashes = range_hashes(of_word, starts, ends + 1)
        # Keep passages within one document.
        edges = begins[np.cumsum(tokens) - tokens]
        part = np.searchsorted(edges, first_byte, side="right") - 1
        whole = part[starts] == part[ends]
        starts = starts[whole]
        ends = ends[whole]
        hashes = hashes[whole]
        part = part[starts]
        # The token of a byte is the last one that starts at or before it, after tokens without
        # bytes.
        first = np.searchsorted(begins, first_byte[starts], side="right") - 1
        last = np.searchsorted(begins, last_byte[ends], side="right") - 1
        shift = np.array([offset for _, offset, _ in parts]) - (np.cumsum(tokens) - tokens)
        document = np.array([number for number, _, _ in parts], dtype=np.int64)
        return Passages(
            hashes,
            document[part],
            first + shift[part],
            last + shift[part],
        )


def _blocks(store) -> Iterator[list[tuple[int, int, np.ndarray]]]:
    """Parts of documents, BLOCK tokens at a time: many short documents together, long ones in
    pieces."""
    parts = []
    room = BLOCK
    for number in range(store.n_documents):
        ids = store.document(number)
        start = 0
        while True:
            piece = ids[start : start + BLOCK]
            parts.append((number, start, piece))
            room -= len(piece) + 1
            if room <= 0:
                yield parts
                parts = []
                room = BLOCK
            if start + BLOCK >= len(ids):
                break
            start += BLOCK - OVERLAP
    if parts:
        yield parts
