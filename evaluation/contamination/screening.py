"""Exclude contaminated text: passages that also occur in the training text, or earlier in the
corpus.

A passage is 13 words (evaluation/contamination/ngrams.py), at every offset, on both sides. The
passages of the evaluated corpus are held in memory and the training text is streamed. The result
depends only on the two stores and is cached on disk.

Fixed targets are drawn outside such passages. The other protocols score all tokens of a document
and drop the targets inside, equally at every length and under every method. Passages shared by
documents of the corpus count once: they are excluded from all but the first of them.
"""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import Tokenizer
from data.files import atomic, canonical_hash
from errors import EvaluationError
from evaluation.contamination.ngrams import VERSION, PassageReader
from evaluation.evaluation_settings import ContaminationSettings
from evaluation.scoring.targets import EvaluationText, targets_of
from evaluation.stores import EvaluationStores

# log2 of bits per passage in the filter that most of the training text does not pass
FILTER_BITS = 4
LONG = 1 << 20  # tokens of training text beyond which progress is shown


@dataclass(frozen=True)
class Overlap:
    """Passages of a corpus that also occur elsewhere, as (document, first token, last token), int64
    (n, 3), tokens as stored, ascending, with those that overlap or touch in one row."""

    trained: np.ndarray  # occur in the training text
    repeated: np.ndarray  # occur in an earlier document of the corpus
    # why the training text was not compared, as a sentence; '' if all of it was
    unchecked: str = ""

    @property
    def rows(self) -> np.ndarray:
        """All excluded passages."""
        return _merged(np.concatenate([self.trained, self.repeated]))


def find_overlap(store, train, tokenizer, *, cache: Path | None = None, console=None) -> Overlap:
    """What `store` shares with the training store `train` (None: with itself alone), both made with
    `tokenizer`. Cached in the folder `cache`, if it is writable."""
    path = None
    if cache is not None:
        key = [VERSION, store.hash, None if train is None else train.hash]
        path = cache / f"{canonical_hash(key)[:16]}.npz"
        if (cached := _read(path)) is not None:
            return cached
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
        except OSError as error:  # a read-only folder: only time is lost
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
    # Documents are offset on one axis, so that one running maximum serves all of them.
    gap = int(rows[:, 2].max()) + 2
    offset = rows[:, 0] * gap
    begin = offset + rows[:, 1]
    end = np.maximum.accumulate(offset + rows[:, 2])
    is_new = np.append(True, begin[1:] > end[:-1] + 1)
    is_last = np.append(is_new[1:], True)
    merged = rows[is_new]
    merged[:, 2] = end[is_last] - offset[is_last]
    return merged


def _read(path: Path) -> Overlap | None:
    # A damaged file counts as missing.
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as record:
            return Overlap(record["trained"], record["repeated"])
    except (OSError, zipfile.BadZipFile, KeyError, ValueError, EOFError):
        return None


def shared_text(
    settings: ContaminationSettings,
    stores: EvaluationStores,
    tokenizer: Tokenizer,
    console=None,
) -> Overlap:
    """What of the text to read is excluded."""
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
    """The counted targets. `record` goes to results.json, `sentence` to the summary; `unchecked`:
    what was not compared, as a sentence."""

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
            "every target also occurs in the training text: evaluate on another store"
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
    """(n_targets,) which targets are inside one of the passages `rows` (tokens as stored)."""
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
