"""Targets that are no test: those in passages that stand in the training text too, or earlier in the corpus.

A passage is 13 words (evaluation/shingles.py), at every offset, on both sides. The passages of the evaluated
corpus are kept and the training text is streamed past them, so that its size costs time but no memory, and
none of it is left out by sampling. What was found is a function of the two stores and is kept on disk.

A target inside such a passage is dropped, at every length and under every rule alike, so that pairs stay
pairs. Passages shared by evaluated documents count once: they are dropped in all but the first of them.
"""

import zipfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.files import atomic
from evaluation.errors import EvaluationError
from evaluation.protocols import Windows
from evaluation.settings import ContaminationSettings
from evaluation.shingles import VERSION, Reader
from evaluation.targets import content_hash
from evaluation.text import Text

MOST = 1 << 26  # tokens of an evaluated corpus beyond which its passages are sampled, by their own hashes
FILTER_BITS = 4  # times as many bits as passages, as a power of two: most of the training text stops there
NAMED = 5  # documents named in a refusal
LONG = 1 << 20  # tokens of training text from which on progress is shown


@dataclass(frozen=True)
class Overlap:
    """Passages of a corpus that stand elsewhere too, as (document, first token, last token), int64 (n, 3),
    tokens as stored; `group` (m,) says which of `repeated` are the same passage. `sample`: one passage in so
    many was looked at."""

    trained: np.ndarray  # stand in the training text; of passages that touch, one row
    repeated: np.ndarray  # stand in several documents of the corpus
    group: np.ndarray
    sample: int = 1

    def later(self, documents: np.ndarray) -> np.ndarray:
        """The rows of `repeated` of these documents whose passage stands in an earlier one of them."""
        here = np.isin(self.repeated[:, 0], documents)
        rows, group = self.repeated[here], self.group[here]
        first = np.full(int(group.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, group, rows[:, 0])
        return rows[rows[:, 0] > first[group]]


def find_overlap(
    store, train, tokenizer, *, cache: Path | None = None, console=None, most: int = MOST
) -> Overlap:
    """What `store` shares with the training store `train` (None: with itself alone), both made with
    `tokenizer`. Kept in the folder `cache`, where one is given that can be written to."""
    known = {"version": VERSION, "corpus": store.hash, "train": None if train is None else train.hash}
    path = None if cache is None else Path(cache) / f"{content_hash({**known, 'most': most})[:16]}.npz"
    found = None if path is None else _read(path)
    if found is None:
        tokens = 0 if train is None else int(train.lengths.sum())
        progress = nullcontext()
        if console is not None and tokens >= LONG:
            progress = console.bar("comparing with the training text", total=tokens / 1e6, unit="Mtok")
        with progress as bar:

            def advance(n: int) -> None:
                if bar:
                    bar.advance(n / 1e6)

            found = _search(store, train, Reader(tokenizer), most, advance)
        if path is not None:
            _save(path, found, console)
    return found


def _search(store, train, reader: Reader, most: int, advance: Callable[[int], None]) -> Overlap:
    sample = 1
    while store.lengths.sum() > most * sample:
        sample *= 2
    parts = []
    for block in reader.passages(store):
        here = block.hashes % np.uint64(sample) == 0
        parts.append([column[here] for column in block])
    hashes, document, first, last = (np.concatenate(column) for column in zip(*parts, strict=True))
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

    low, high = np.full(len(keys), store.n_documents), np.full(len(keys), -1)
    np.minimum.at(low, key, document)
    np.maximum.at(high, key, document)
    several = (low < high)[key]
    return Overlap(_merged(rows[seen[key]]), rows[several], key[several], sample)


def _merged(rows: np.ndarray) -> np.ndarray:
    """Passages that overlap or touch, as one."""
    if not len(rows):
        return rows
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    # Documents far apart on one line, so that one running maximum does for all of them.
    gap = int(rows[:, 2].max()) + 2
    begin, end = rows[:, 0] * gap + rows[:, 1], np.maximum.accumulate(rows[:, 0] * gap + rows[:, 2])
    new = np.append(True, begin[1:] > end[:-1] + 1)
    stops = np.append(np.flatnonzero(new)[1:], len(rows)) - 1
    return np.stack([rows[new, 0], rows[new, 1], end[stops] - rows[new, 0] * gap], axis=1)


def _read(path: Path) -> Overlap | None:
    # A damaged file is as good as absent.
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as record:
            return Overlap(record["trained"], record["repeated"], record["group"], int(record["sample"]))
    except (OSError, zipfile.BadZipFile, KeyError, ValueError, EOFError):
        return None


def _save(path: Path, found: Overlap, console) -> None:
    try:
        with atomic(path) as file:
            np.savez_compressed(
                file,
                trained=found.trained,
                repeated=found.repeated,
                group=found.group,
                sample=np.array(found.sample),
            )
    except OSError as error:  # a folder that may not be written to: nothing is lost but the time
        if console:
            console.warn(f"the shared passages found are not kept: {error}")


@dataclass(frozen=True)
class Screening:
    """Which targets count. `record` is what results.json says of it, `sentence` what a reader is told."""

    kept: np.ndarray  # (n_targets,) bool
    record: dict
    sentence: str

    def hash(self, targets_hash: str) -> str:
        """What the targets that count are known by: `targets_hash` itself where none is dropped."""
        dropped = self.record.get("dropped")
        return content_hash({"targets": targets_hash, "dropped": dropped}) if dropped else targets_hash


def screen(
    settings: ContaminationSettings,
    text: Text,
    windows: Windows,
    train,
    tokenizer,
    *,
    earlier: Sequence = (),
    cache: Path | None = None,
    console=None,
) -> Screening:
    """Which targets of `windows` are a test. `train`: the model's own training store; `earlier`: those of the
    runs it goes on from; None where one is gone.

    Raises EvaluationError, naming share and documents, where more than `settings.limit` of them are none.
    """
    trained = [train, *earlier]
    store, n = text.store, windows.n_targets
    unscreened = ""
    if not settings.check:
        unscreened = "Whether the text was seen in training was not looked for (contamination.check=false)."
    elif any(one is not None and one.hash == store.hash for one in trained):
        unscreened = "This is the text it was trained on, and no held-out text."
    if unscreened:
        return Screening(np.ones(n, dtype=bool), {"checked": False, "why": unscreened}, unscreened)
    known = [one for one in trained if one is not None] or [None]
    overlaps = [find_overlap(store, one, tokenizer, cache=cache, console=console) for one in known]
    overlap = overlaps[0]
    seen = np.any([_targets_in(one.trained, text, windows) for one in overlaps], axis=0)
    again = _targets_in(overlap.later(np.unique(windows.document)), text, windows) & ~seen
    dropped = seen | again
    counts = _by_document(text, windows, seen, again)
    record = {
        "checked": None not in trained,
        "sample": overlap.sample,
        "share": float(dropped.mean()),
        "in_training": int(seen.sum()),
        "repeated": int(again.sum()),
        "targets": n,
        "documents": counts,
        "dropped": _ranges(dropped),
    }
    if dropped.mean() > settings.limit:
        raise EvaluationError(_refusal(record, settings.limit))
    if dropped.all():
        raise EvaluationError("every target stands in the training text too: evaluate on other text")
    return Screening(~dropped, record, _sentence(record))


def _targets_in(rows: np.ndarray, text: Text, windows: Windows) -> np.ndarray:
    """(n_targets,) which targets lie in one of the passages `rows` (tokens as stored)."""
    documents, index = windows.target_documents(), windows.target_indices() + text.shift
    inside = np.zeros(len(index), dtype=bool)
    for document in np.intersect1d(documents, rows[:, 0]):
        here, own = documents == document, rows[rows[:, 0] == document]
        edges = np.zeros(int(text.store.lengths[document]) + 1, dtype=np.int64)
        np.add.at(edges, own[:, 1], 1)
        np.add.at(edges, own[:, 2] + 1, -1)
        inside[here] = np.cumsum(edges)[index[here]] > 0
    return inside


def _by_document(text: Text, windows: Windows, seen: np.ndarray, again: np.ndarray) -> list[dict]:
    """Documents that lose targets, the worst first."""
    documents = windows.target_documents()
    rows = []
    for document in np.unique(documents[seen | again]):
        here = documents == document
        rows.append(
            {
                "name": str(text.store.names[document]),
                "targets": int(here.sum()),
                "in_training": int(seen[here].sum()),
                "repeated": int(again[here].sum()),
            }
        )
    return sorted(rows, key=lambda row: -(row["in_training"] + row["repeated"]) / row["targets"])


def _ranges(mask: np.ndarray) -> list[list[int]]:
    """[first, one past the last] of each run of targets where `mask` is set."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return edges.reshape(-1, 2).tolist()


def _parts(record: dict) -> str:
    parts = []
    if record["in_training"]:
        parts.append(f"{record['in_training']} in the training text")
    if record["repeated"]:
        parts.append(f"{record['repeated']} in an earlier document evaluated")
    return " and ".join(parts)


def _sentence(record: dict) -> str:
    if not record["checked"]:
        text = "Training text is gone: whether this text stands in it was not looked for."
    else:
        text = ""
    if record["dropped"]:
        n = record["in_training"] + record["repeated"]
        text += (
            f" {n} of {record['targets']} targets ({record['share']:.2%}) are not counted: they lie in "
            f"passages of 13 words that also stand elsewhere, {_parts(record)}."
        )
    return text.strip()


def _refusal(record: dict, limit: float) -> str:
    worst = record["documents"][:NAMED]
    names = ", ".join(
        f"{row['name']} ({(row['in_training'] + row['repeated']) / row['targets']:.0%})" for row in worst
    )
    more = len(record["documents"]) - len(worst)
    return (
        f"{record['share']:.2%} of the {record['targets']} targets are no test: they lie in passages of 13 "
        f"words (30 Chinese characters) that also stand elsewhere, {_parts(record)}; more than "
        f"contamination.limit={limit:g} allows. Documents: {names}{f' and {more} more' if more else ''}. "
        "Evaluate on other text, or drop these targets and go on with "
        f"contamination.limit={np.ceil(record['share'] * 100) / 100:g}"
    )
