"""Hash passages of 13 words (64 bits), at every offset of a store's text, with their token positions.

Text is normalized with NFKC and casefold, and only word characters count: letters, digits and combining
marks, not the underscore, which marks italics in books. In a script without spaces each character is a word,
and 30 of them make a passage; in mixed text a word counts 1/13 and a character 1/30 of a passage. All steps
are vectorized over bytes, since a Python loop over words would take minutes.

Decomposition (NFKD) replaces NFKC: both give the same equalities, and NFKD works on single characters.
"""

import functools
import unicodedata
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from data.preparation.duplicates import CHARACTERS, WORDS, range_hashes

VERSION = 2  # of the cache format: files of other versions are ignored
BLOCK = 1 << 17  # tokens per block: bounds memory
OVERLAP = 1 << 10  # tokens shared by blocks of one document, far more than a passage

# Scripts written without spaces between words: Thai and Lao, Myanmar, Khmer, kana and bopomofo, Han.
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
_NONE, _LETTER, _SINGLE, _MARK = range(4)  # no word, part of a word, a word by itself, combining mark
_HIGHEST = 0x110000
_FULL = WORDS * CHARACTERS  # the weight of a passage; a word weighs CHARACTERS, a single character WORDS


class Passages(NamedTuple):
    """Every passage of one block of text. All arrays (n,)."""

    hashes: np.ndarray  # uint64
    document: np.ndarray  # int64, as numbered in the store
    first: np.ndarray  # int64, stored index of the first token that holds a part of it ...
    last: np.ndarray  # ... and of the last


class _CharacterHasher:
    """Table of characters: the folded decomposition, and the kind of each of its characters."""

    def __init__(self):
        self.known = np.zeros(_HIGHEST, dtype=bool)
        self.kind = np.zeros(_HIGHEST, dtype=np.uint8)
        self.order = np.zeros(_HIGHEST, dtype=np.uint8)  # canonical combining class
        self.size = np.ones(_HIGHEST, dtype=np.uint8)  # characters of the decomposition
        self.folded = np.arange(_HIGHEST, dtype=np.uint32)  # the decomposition, if it is one character
        self.longer: dict[int, list[int]] = {}  # the decomposition otherwise

    def learn(self, codes: np.ndarray) -> None:
        new = np.unique(codes[~self.known[codes]])
        for code in new.tolist():
            folded = _folded(chr(code))
            if len(folded) == 1:
                self.folded[code] = ord(folded)
            else:
                self.size[code] = len(folded)
                self.longer[code] = [ord(one) for one in folded]
            for one in (chr(code), *folded):
                self.kind[ord(one)] = _kind(one)
                self.order[ord(one)] = unicodedata.combining(one)
        self.known[new] = True


def _folded(character: str) -> str:
    return unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", character).casefold())


def _kind(character: str) -> int:
    code = ord(character)
    if unicodedata.category(character).startswith("M"):
        return _MARK
    if not character.isalnum():
        return _NONE
    return _SINGLE if any(low <= code <= high for low, high in _UNSPACED) else _LETTER


@functools.cache
def _characters() -> _CharacterHasher:
    return _CharacterHasher()


def _decode(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Code points of UTF-8 bytes (n,) and the byte at which each begins, (m,) both."""
    starts = np.flatnonzero((raw & 0xC0) != 0x80)
    lead = raw[starts].astype(np.uint32)
    if len(starts) == len(raw):
        return np.minimum(lead, 0x7F), starts
    code = lead.copy()
    size = np.diff(np.append(starts, len(raw)))
    for length, mask in ((2, 0x1F), (3, 0x0F), (4, 0x07)):
        here = np.flatnonzero((size == length) & (lead >= 0xC0))
        value = lead[here] & mask
        for k in range(1, length):
            value = (value << 6) | (raw[starts[here] + k] & 0x3F)
        code[here] = value
    return np.minimum(code, _HIGHEST - 1), starts


def _normal(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Folded characters (m,), their kinds, and the first and last byte of their source characters."""
    table = _characters()
    codes, starts = _decode(raw)
    ends = np.append(starts[1:], len(raw)) - 1
    table.learn(codes)
    size = table.size[codes]
    if (size == 1).all():
        codes = table.folded[codes]
    else:
        origin = np.repeat(np.arange(len(codes)), size)
        folded = table.folded[codes]
        out = folded[origin]
        first = np.cumsum(size, dtype=np.int64) - size
        for at in np.flatnonzero(size > 1).tolist():
            longer = table.longer[int(codes[at])]
            out[first[at] : first[at] + len(longer)] = longer
        codes, starts, ends = out, starts[origin], ends[origin]
    order = table.order[codes]
    if ((order[1:] < order[:-1]) & (order[1:] > 0)).any():  # marks on one letter, in another order
        by_order = np.lexsort((order, np.cumsum(order == 0)))
        codes, starts, ends = codes[by_order], starts[by_order], ends[by_order]
    return codes, table.kind[codes], starts, ends


class _WordHasher(NamedTuple):
    hashes: np.ndarray  # (n,) uint64
    weight: np.ndarray  # (n,) int64
    first: np.ndarray  # (n,) byte at which the word begins
    last: np.ndarray  # (n,) its last byte


def _words(raw: np.ndarray) -> _WordHasher:
    codes, kind, first_byte, last_byte = _normal(raw)
    inside = kind != _NONE
    before = np.concatenate([np.zeros(1, dtype=np.uint8), kind[:-1]])
    # A mark continues the previous character; a letter starts a word after a single character and its marks,
    # so the kind of the marked character is carried forward.
    base = before
    if (kind == _MARK).any():
        where = np.where(kind != _MARK, np.arange(len(kind)), 0)
        carried = kind[np.maximum.accumulate(where)]
        base = np.concatenate([np.zeros(1, dtype=np.uint8), carried[:-1]])
    begins = inside & ((before == _NONE) | (kind == _SINGLE) | ((kind == _LETTER) & (base == _SINGLE)))
    starts = np.flatnonzero(begins)
    if not len(starts):
        nothing = np.zeros(0, dtype=np.int64)
        return _WordHasher(nothing.astype(np.uint64), nothing, nothing, nothing)
    closes = np.append(begins[1:], True) | np.append(~inside[1:], True)
    last = np.flatnonzero(inside & closes)
    hashes = range_hashes(np.where(inside, codes + 1, 0).astype(np.uint64), starts, last + 1)
    weight = np.where(kind[starts] == _SINGLE, WORDS, CHARACTERS)
    return _WordHasher(hashes, weight, first_byte[starts], last_byte[last])


class PassageReader:
    """Passages of stores made with one tokenizer (`.pieces`: the raw bytes of each id)."""

    def __init__(self, tokenizer):
        pieces = [*tokenizer.pieces, b"\n"]  # the last one separates documents, so that no word crosses them
        self.size = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self.start = np.cumsum(self.size) - self.size
        self.bytes = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self.between = len(pieces) - 1

    def passages(self, store, after: Callable[[int], None] = lambda tokens: None) -> Iterator[Passages]:
        """All passages of a store, block by block; `after(tokens)` runs after each block.

        Passages at the block edges of a long document occur twice, or with a truncated word.
        """
        for parts in _blocks(store):
            yield self._block(parts)
            after(sum(len(ids) for _, _, ids in parts))

    def _block(self, parts: list[tuple[int, int, np.ndarray]]) -> Passages:
        """`parts`: (document, index of the first token, ids)."""
        between = np.array([self.between], dtype=np.int64)
        ids = np.concatenate([piece for _, _, one in parts for piece in (one, between)]).astype(np.int64)
        tokens = np.array([len(one) + 1 for _, _, one in parts])
        size = self.size[ids]
        begins = np.cumsum(size) - size  # of each token, in bytes
        raw = self.bytes[np.repeat(self.start[ids] - begins, size) + np.arange(int(size.sum()))]
        words = _words(raw)
        ends, hashes = _spans(words)
        starts = np.arange(len(words.hashes))[ends >= 0]
        ends = ends[ends >= 0]
        # Keep passages within one document.
        edges = begins[np.cumsum(tokens) - tokens]
        part = np.searchsorted(edges, words.first, side="right") - 1
        whole = part[starts] == part[ends]
        starts, ends, hashes = starts[whole], ends[whole], hashes[whole]
        part = part[starts]
        # The token of a byte is the last one that starts at or before it, after tokens without bytes.
        first = np.searchsorted(begins, words.first[starts], side="right") - 1
        last = np.searchsorted(begins, words.last[ends], side="right") - 1
        shift = np.array([offset for _, offset, _ in parts]) - (np.cumsum(tokens) - tokens)
        document = np.array([number for number, _, _ in parts], dtype=np.int64)
        return Passages(hashes, document[part], first + shift[part], last + shift[part])


def _spans(words: _WordHasher) -> tuple[np.ndarray, np.ndarray]:
    """For each word the last word of the passage it starts, (n,), -1 if the text ends before; and the hashes
    of the complete passages."""
    n = len(words.hashes)
    weight = np.cumsum(words.weight)
    ends = np.searchsorted(weight, weight - words.weight + _FULL)
    ends = np.where(ends < n, ends, -1)
    starts = np.flatnonzero(ends >= 0)
    return ends, range_hashes(words.hashes, starts, ends[starts] + 1)


def _blocks(store) -> Iterator[list[tuple[int, int, np.ndarray]]]:
    """Parts of documents, BLOCK tokens at a time: many short documents together, long ones in pieces."""
    parts, room = [], BLOCK
    for number in range(store.n_documents):
        ids = store.document(number)
        start = 0
        while True:
            piece = ids[start : start + BLOCK]
            parts.append((number, start, piece))
            room -= len(piece) + 1
            if room <= 0:
                yield parts
                parts, room = [], BLOCK
            if start + BLOCK >= len(ids):
                break
            start += BLOCK - OVERLAP
    if parts:
        yield parts
