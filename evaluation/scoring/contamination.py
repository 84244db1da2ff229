"""Exclude contaminated text: passages that also occur in the training text, or earlier in the
corpus.

A passage is 13 words, at every offset of both texts. Words are compared in Unicode's normal form
NFKC and casefolded. Only word characters count: letters, digits and combining marks, but not the
underscore, which marks italics in books. In a script without spaces each character is a word, and
30 of them make a passage; in mixed text a word counts 1/13 and a character 1/30 of a passage.

The passages of the evaluated corpus are held in memory and the training text is streamed. The
result depends only on the two stores and is cached on disk.

Fixed targets are drawn outside shared passages. The other protocols score all tokens of a document
and drop the targets inside shared passages, equally at every length and under every method. A
passage shared by documents of the corpus is excluded from all of them but the first.
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import Tokenizer
from data.files import atomic, canonical_hash, read_arrays
from data.preparation.duplicates import CHARACTERS, WORDS, range_hashes
from errors import EvaluationError
from evaluation.evaluation_settings import ContaminationSettings
from evaluation.scoring.targets import EvaluationText, targets_of
from evaluation.stores import EvaluationStores

VERSION = 4  # version of the cache format: files of other versions are ignored
BLOCK = 1 << 17  # tokens per block: bounds memory
OVERLAP = 1 << 10  # tokens shared by blocks of one document, far more than a passage
MOST_WORDS = 1 << 20  # number of words whose hashes are cached
# log2 of the bits per passage in the filter that rejects most of the training text
FILTER_BITS = 4
LONG = 1 << 20  # number of training tokens above which progress is shown
# Minimum weight of a passage; a word has the weight CHARACTERS, a character that is a word the
# weight WORDS.
_FULL = WORDS * CHARACTERS
# Scripts written without spaces between words: Thai and Lao, Myanmar, Khmer, kana and bopomofo,
# Han.
_SCRIPTS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
)
# Combining marks up to U+FFFF; a class with rarer ones is searched a hundred times slower.
_MARKS = "".join(chr(n) for n in range(1 << 16) if unicodedata.category(chr(n)).startswith("M"))
_UNSPACED = re.compile(f"[{_SCRIPTS}]")
_WORD = re.compile(f"([{_SCRIPTS}][{_MARKS}]*|(?:[^\\W_{_SCRIPTS}]|[{_MARKS}])+)")


class Passages(NamedTuple):
    """Every passage of one block of text. All arrays (n,)."""

    hashes: np.ndarray  # uint64
    document: np.ndarray  # int64, as numbered in the store
    first: np.ndarray  # int64, stored index of the first token that overlaps the passage
    last: np.ndarray  # int64, stored index of the last such token


@lru_cache(MOST_WORDS)
def _hash_of(word: str) -> int:
    """64-bit hash of a folded word with its marks in canonical order."""
    folded = unicodedata.normalize("NFKC", word).casefold()
    canonical = unicodedata.normalize("NFKD", folded)
    digest = hashlib.blake2b(canonical.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class PassageReader:
    """Passages of stores made with one tokenizer (`.pieces`: the raw bytes of each id)."""

    def __init__(self, tokenizer):
        # the last entry separates documents, so that no word spans two
        self.pieces = [*tokenizer.pieces, b"\n"]
        self.size = np.array([len(piece) for piece in self.pieces], dtype=np.int64)
        self.between = len(self.pieces) - 1

    def passages(
        self,
        store,
        after: Callable[[int], None] = lambda tokens: None,
    ) -> Iterator[Passages]:
        """All passages of a store, block by block; `after(tokens)` runs after each block.

        Passages at the block edges of a long document may occur twice, or with a truncated word.
        """
        for parts in _blocks(store):
            yield self._block(parts)
            after(sum(len(ids) for _, _, ids in parts))

    def _block(self, parts: list[tuple[int, int, np.ndarray]]) -> Passages:
        """`parts`: (document, index of the first token, ids)."""
        ids = np.concatenate([np.append(ids, self.between) for _, _, ids in parts])
        raw = b"".join([self.pieces[token] for token in ids.tolist()])
        hashes, weight, first_byte, last_byte = self._words(raw)
        # The last word of the passage that each word starts, if the text does not end before it.
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
        pieces = _WORD.split(text)  # words at odd indices
        words = pieces[1::2]
        ends = np.cumsum([len(piece) for piece in pieces])
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        in_bytes = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
        in_bytes[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1  # a byte that is not UTF-8
        byte = np.append(0, np.cumsum(in_bytes))
        weight = np.array([WORDS if _UNSPACED.match(word) else CHARACTERS for word in words], int)
        hashes = np.array([_hash_of(word) for word in words], np.uint64)
        return hashes, weight, byte[ends[:-1:2]], byte[ends[1::2]] - 1


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


@dataclass(frozen=True)
class Overlap:
    """Passages of a corpus that also occur elsewhere. Rows (document, first token, last token),
    int64 (n, 3), index stored tokens, ascending; passages that overlap or touch are merged."""

    trained: np.ndarray  # passages that occur in the training text
    repeated: np.ndarray  # passages that occur in an earlier document of the corpus
    # why the training text was not compared, as a sentence; '' if all of it was compared
    unchecked: str = ""

    @property
    def rows(self) -> np.ndarray:
        """All excluded passages."""
        return _merged(np.concatenate([self.trained, self.repeated]))


def find_overlap(store, train, tokenizer, *, cache: Path | None = None, console=None) -> Overlap:
    """The passages that `store` shares with the training store `train` (None: within `store` only).
    Both were made with `tokenizer`. Cached in the folder `cache`, if it is writable."""
    path = None
    if cache is not None:
        key = [VERSION, store.hash, None if train is None else train.hash]
        path = cache / f"{canonical_hash(key)[:16]}.npz"
        cached = read_arrays(path)
        if cached.keys() >= {"trained", "repeated"}:
            return Overlap(cached["trained"], cached["repeated"])
    reader = PassageReader(tokenizer)
    tokens = 0 if train is None else int(train.lengths.sum())
    if console is None or tokens < LONG:
        overlap = _search(store, train, reader)
    else:
        title = "comparing with the training text"
        with console.bar(title, total=tokens / 1e6, unit="Mtok") as bar:
            overlap = _search(store, train, reader, lambda n: bar.advance(n / 1e6))
    if path is not None:
        try:
            with atomic(path) as file:
                np.savez_compressed(file, trained=overlap.trained, repeated=overlap.repeated)
        except OSError as error:  # a read-only folder: the result is not cached
            if console:
                console.warn(f"cannot cache the shared passages: {error}")
    return overlap


def _search(
    store,
    train,
    reader: PassageReader,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Overlap:
    columns = zip(*reader.passages(store), strict=True)
    hashes, document, first, last = (np.concatenate(column) for column in columns)
    rows = np.stack([document, first, last], axis=1)
    keys, key = np.unique(hashes, return_inverse=True)

    seen = np.zeros(len(keys), dtype=bool)
    if train is not None and len(keys):
        bits = max(10, len(keys).bit_length() + FILTER_BITS)
        maybe = np.zeros(1 << bits, dtype=bool)
        maybe[keys >> np.uint64(64 - bits)] = True
        for block in reader.passages(train, advance):
            asked = block.hashes[maybe[block.hashes >> np.uint64(64 - bits)]]
            where = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
            seen[where[keys[where] == asked]] = True

    earliest = np.full(len(keys), store.n_documents)
    np.minimum.at(earliest, key, document)
    return Overlap(_merged(rows[seen[key]]), _merged(rows[document > earliest[key]]))


def _merged(rows: np.ndarray) -> np.ndarray:
    """Merge passages that overlap or touch."""
    if not len(rows):
        return rows
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    # Documents are offset on one axis, so that one running maximum works for all of them.
    gap = int(rows[:, 2].max()) + 2
    offset = rows[:, 0] * gap
    begin = offset + rows[:, 1]
    end = np.maximum.accumulate(offset + rows[:, 2])
    is_new = np.append(True, begin[1:] > end[:-1] + 1)
    is_last = np.append(is_new[1:], True)
    merged = rows[is_new]
    merged[:, 2] = end[is_last] - offset[is_last]
    return merged


def shared_text(
    settings: ContaminationSettings,
    stores: EvaluationStores,
    tokenizer: Tokenizer,
    console=None,
) -> Overlap:
    """The passages of the evaluated text that must contain no target."""
    unchecked = ""
    if not settings.check:
        unchecked = "Not compared with the training text (contamination.check=false)."
    elif any(train.hash == stores.read.hash for train in stores.trained):
        unchecked = "This is training text, not held-out text."
    if unchecked:
        nothing = np.zeros((0, 3), dtype=np.int64)
        return Overlap(nothing, nothing, unchecked)
    overlaps = [
        find_overlap(stores.read, train, tokenizer, cache=stores.overlaps, console=console)
        for train in stores.trained or [None]
    ]
    together = _merged(np.concatenate([overlap.trained for overlap in overlaps]))
    return Overlap(together, overlaps[0].repeated, stores.unknown)


@dataclass(frozen=True)
class Screening:
    """The targets that count. `record` is written to results.json, `sentence` to the summary.
    `unchecked`: what was not compared, as a sentence."""

    kept: np.ndarray  # (n_targets,) bool
    record: dict
    sentence: str
    unchecked: str


def screen(
    shared: Overlap,
    text: EvaluationText,
    windows: np.ndarray,
    candidates: np.ndarray | None = None,
) -> Screening:
    """Drop the targets of `windows` (n, 4) inside excluded text. `candidates`: windows of the
    possible targets, if the draw already avoided excluded text.

    Raises EvaluationError if no target remains.
    """
    dropped = _targets_in(shared.rows, text, windows)
    if dropped.all():
        raise EvaluationError(
            "every target is inside a passage that also occurs in the training text or in an "
            "earlier document of the corpus: evaluate on another store"
        )
    of = windows if candidates is None else candidates
    seen = _targets_in(shared.trained, text, of)
    again = _targets_in(shared.repeated, text, of) & ~seen
    record = {
        "checked": not shared.unchecked,
        "share": float((seen | again).mean()),
        "in_training": int(seen.sum()),
        "repeated": int(again.sum()),
        "tokens": len(seen),
        "dropped": _ranges(dropped),
    }
    return Screening(~dropped, record, _sentence(record), shared.unchecked)


def _targets_in(rows: np.ndarray, text: EvaluationText, windows: np.ndarray) -> np.ndarray:
    """(n_targets,) whether each target is inside one of the passages `rows` (stored tokens)."""
    documents, index = targets_of(windows)
    if not len(rows):
        return np.zeros(len(index), dtype=bool)
    index = index + text.shift
    # documents are offset on one axis
    gap = 1 + int(max(index.max(initial=0), rows[:, 2].max()))
    at = documents * gap + index
    begins = rows[:, 0] * gap + rows[:, 1]
    ends = rows[:, 0] * gap + rows[:, 2]
    row = np.searchsorted(begins, at, side="right") - 1
    return (row >= 0) & (at <= ends[row])


def _ranges(mask: np.ndarray) -> list[list[int]]:
    """[first, one past the last] of each run of targets where `mask` is set."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return edges.reshape(-1, 2).tolist()


def _sentence(record: dict) -> str:
    if not record["share"]:
        return ""
    action = "dropped" if record["dropped"] else "excluded before the draw"
    return (
        f"{record['share']:.2%} of the {record['tokens']:,} possible targets are {action}: "
        "passages of 13 words (30 Chinese characters) that also occur in the training text "
        f"({record['in_training']:,} tokens) or in an earlier document of the corpus "
        f"({record['repeated']:,})."
    )
