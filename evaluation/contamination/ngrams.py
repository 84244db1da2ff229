"""Hash passages of 13 words (64 bits), at every offset of a store's text, with their token
positions.

Text is normalized with NFKC and casefold, and only word characters count: letters, digits and
combining marks, not the underscore, which marks italics in books. In a script without spaces each
character is a word, and 30 of them make a passage; in mixed text a word counts 1/13 and a character
1/30 of a passage.

Decomposition (NFKD) replaces NFKC: both give the same equalities, and NFKD works on single
characters.
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data.preparation.duplicates import CHARACTERS, WORDS, range_hashes

VERSION = 3  # of the cache format: files of other versions are ignored
BLOCK = 1 << 17  # tokens per block: bounds memory
OVERLAP = 1 << 10  # tokens shared by blocks of one document, far more than a passage
MOST_WORDS = 1 << 20  # whose hashes are remembered
# The weight of a passage; a word weighs CHARACTERS, a character that is a word weighs WORDS.
_FULL = WORDS * CHARACTERS
# Scripts written without spaces between words: Thai and Lao, Myanmar, Khmer, kana and bopomofo,
# Han.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"
)
# Precede, in folded text, a character that is a word and a combining mark.
_SINGLE = "\x01"
_MARK = "\x02"
_WORD = re.compile("(\x01.(?:\x02.)*|(?:\x02?[^ \x01\x02])+)")


class Passages(NamedTuple):
    """Every passage of one block of text. All arrays (n,)."""

    hashes: np.ndarray  # uint64
    document: np.ndarray  # int64, as numbered in the store
    first: np.ndarray  # int64, stored index of the first token that holds a part of it ...
    last: np.ndarray  # ... and of the last


class _FoldedCharacters(dict):
    """Code point -> its folded decomposition, with a space for what belongs to no word."""

    def __missing__(self, code: int) -> str:
        text = unicodedata.normalize("NFKC", chr(code)).casefold()
        self[code] = "".join(map(self._marked, unicodedata.normalize("NFKD", text)))
        return self[code]

    @staticmethod
    def _marked(character: str) -> str:
        if unicodedata.category(character).startswith("M"):
            return _MARK + character
        if not character.isalnum():
            return " "
        return _SINGLE + character if _UNSPACED.match(character) else character


@lru_cache(MOST_WORDS)
def _hash_of(word: str) -> int:
    """64-bit hash of a folded word, of its marks in canonical order."""
    canonical = unicodedata.normalize("NFD", word.replace(_MARK, ""))
    digest = hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class PassageReader:
    """Passages of stores made with one tokenizer (`.pieces`: the raw bytes of each id)."""

    def __init__(self, tokenizer):
        # the last one separates documents, so that no word crosses them
        self.pieces = [*tokenizer.pieces, b"\n"]
        self.size = np.array([len(piece) for piece in self.pieces], dtype=np.int64)
        self.between = len(self.pieces) - 1
        self.folded = _FoldedCharacters()

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
        ids = np.concatenate([np.append(ids, self.between) for _, _, ids in parts])
        raw = b"".join([self.pieces[token] for token in ids.tolist()])
        hashes, weight, first_byte, last_byte = self._words(raw)
        # The last word of the passage that each word starts, where the text does not end before.
        total = np.cumsum(weight)
        ends = np.searchsorted(total, total - weight + _FULL)
        starts = np.flatnonzero(ends < len(weight))
        ends = ends[starts]
        # The token of a byte is the last one that starts at or before it, after tokens without
        # bytes.
        begins = np.cumsum(self.size[ids]) - self.size[ids]
        first = np.searchsorted(begins, first_byte[starts], side="right") - 1
        last = np.searchsorted(begins, last_byte[ends], side="right") - 1
        # Keep passages within one document.
        edges = np.cumsum([0, *(len(ids) + 1 for _, _, ids in parts)])
        part = np.searchsorted(edges, first, side="right") - 1
        whole = last < edges[part + 1]
        part = part[whole]
        document = np.array([document for document, _, _ in parts], dtype=np.int64)
        offset = np.array([offset for _, offset, _ in parts])
        shift = (offset - edges[:-1])[part]
        return Passages(
            hashes=range_hashes(hashes, starts[whole], ends[whole] + 1),
            document=document[part],
            first=first[whole] + shift,
            last=last[whole] + shift,
        )

    def _words(self, raw: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Hashes (n,) uint64 of the words of UTF-8 text, their weights, and the first and last byte
        of each. A byte that is not UTF-8 belongs to no word."""
        text = raw.decode("utf-8", "surrogateescape")
        pieces = _WORD.split(text.translate(self.folded))  # words at odd indices
        words = pieces[1::2]
        lengths = np.array([len(piece) for piece in pieces])
        ends = np.cumsum(lengths)[1::2]
        starts = ends - lengths[1::2]
        if not text.isascii():
            # From folded characters to bytes, both by the characters of the text.
            codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
            in_bytes = np.zeros(int(codes.max()) + 1, dtype=np.int64)
            when_folded = np.zeros_like(in_bytes)
            for character in set(text):
                code = ord(character)
                in_bytes[code] = len(character.encode("utf-8", "surrogateescape"))
                when_folded[code] = len(self.folded[code])
            byte = np.append(0, np.cumsum(in_bytes[codes]))
            character = np.repeat(np.arange(len(text)), when_folded[codes])
            starts = byte[character[starts]]
            ends = byte[character[ends - 1] + 1]
        weight = np.array([WORDS if word[0] == _SINGLE else CHARACTERS for word in words], np.int64)
        hashes = np.array([_hash_of(word) for word in words], np.uint64)
        return hashes, weight, starts, ends - 1


def _blocks(store) -> Iterator[list[tuple[int, int, np.ndarray]]]:
    """Parts of documents, BLOCK tokens at a time: many short documents together, long ones in
    pieces."""
    parts = []
    room = BLOCK
    for number in range(store.n_documents):
        ids = store.document(number)
        for start in range(0, max(1, len(ids) - OVERLAP), BLOCK - OVERLAP):
            piece = ids[start : start + BLOCK]
            parts.append((number, start, piece))
            room -= len(piece) + 1
            if room <= 0:
                yield parts
                parts = []
                room = BLOCK
    if parts:
        yield parts
