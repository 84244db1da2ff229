"""Targets that repeat earlier text of their document, by the distance at which they can be read.

Token t is a target at distance d if its preceding n-gram occurred exactly once before in the
document, d tokens earlier and without overlap, and was continued by the same token:
text[t - n : t + 1] == text[t - d - n : t - d + 1] and d > n. The control scores the same targets
after the earlier occurrence was replaced by other text of the corpus of equal length.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from data.files import canonical_hash
from errors import EvaluationError
from evaluation.scoring.targets import EvaluationText, draw_integer

TRIES = 100  # maximum number of draws of a replacement


@dataclass(frozen=True)
class RepeatedTargets:
    """Groups of consecutive targets at one distance. All arrays (n,) int64.

    The last `keep` tokens of text[: end] of `document` are targets. Their earlier occurrence, with
    the `ngram` tokens before it, is replaced by as many tokens of document `source` from
    `source_start` on.
    """

    ngram: int
    document: np.ndarray
    end: np.ndarray
    keep: np.ndarray
    distance: np.ndarray
    source: np.ndarray
    source_start: np.ndarray
    spec: dict = field(repr=False)  # everything that determines the targets

    @property
    def hash(self) -> str:
        return canonical_hash(self.record)

    @property
    def record(self) -> dict:
        """The content of `targets.json`."""
        columns = ("document", "end", "keep", "distance", "source", "source_start")
        return {**self.spec, **{name: getattr(self, name).tolist() for name in columns}}

    def windows(self, length: int) -> np.ndarray:
        """One window of `length` inputs for each group, (n, 4)."""
        inputs = np.full_like(self.end, length)
        return np.stack([self.document, self.end, inputs, self.keep], axis=1)

    def is_changed(self, length: int) -> np.ndarray:
        """(n,) whether a window of `length` inputs contains a replaced token."""
        return self.distance <= length

    def target_distances(self) -> np.ndarray:
        """(n_targets,) the distance of every target."""
        return np.repeat(self.distance, self.keep)

    def is_readable(self, length: int) -> np.ndarray:
        """(n_targets,) whether the earlier n-gram of a target and its continuation are among the
        `length` inputs, the first of which may be BOS."""
        last = np.cumsum(self.keep)
        to_end = np.repeat(last, self.keep) - np.arange(int(self.keep.sum()))
        return self.target_distances() + self.ngram + to_end <= length


class ControlText:
    """The documents of `text` as windows in which the earlier occurrences are replaced."""

    def __init__(self, text: EvaluationText, targets: RepeatedTargets):
        self.text = text
        self.store = text.store
        self.targets = targets
        self._groups = {
            place: group for group, place in enumerate(_places(targets.document, targets.end))
        }

    def windows(self, documents: np.ndarray, ends: np.ndarray, inputs: int) -> np.ndarray:
        """Like `EvaluationText.windows`; each window must end with a group of targets."""
        out = self.text.windows(documents, ends, inputs)
        first = int(self.text.bos_rule == "every-window")
        for row, place in zip(out, _places(documents, ends), strict=True):
            group = self._groups[place]
            size = self.targets.ngram + self.targets.keep[group]
            stop = inputs + 1 - self.targets.distance[group]
            start = max(first, stop - size)
            if start < stop:
                end = self.targets.source_start[group] + size
                source = int(self.targets.source[group])
                row[start:stop] = self.text.slice(source, end - (stop - start), end)
        return out


def _places(documents: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(documents.tolist(), ends.tolist(), strict=True))


def draw_repeats(
    text: EvaluationText,
    documents: np.ndarray,
    *,
    longest: int,
    most: int,
    per_document: int,
    ngram: int,
    spec: dict,
) -> RepeatedTargets:
    """Draw groups of at most `most` targets whose earlier occurrence is inside a window of
    `longest` inputs; at most `per_document` groups in each octave of distances of each of the
    `documents`.

    Raises EvaluationError if there are no groups.
    """
    spec = {**spec, "ngram": ngram}
    key = canonical_hash(spec)
    rows = []
    for document in documents.tolist():
        octaves: Counter[int] = Counter()
        tokens = text.slice(document, 0, int(text.lengths[document]))
        targets, distances = find_repeats(tokens, ngram)
        clean = _inside(targets, text.clean(document))
        groups = _groups(targets[clean], distances[clean], ngram, most)
        drawn = {draw_integer(key, f"repeat {document}", group[0]): group for group in groups}
        for _, (end, keep, distance) in sorted(drawn.items()):
            octave = distance.bit_length()
            is_held = end > longest and distance + ngram + keep <= longest
            if not is_held or octaves[octave] == per_document:
                continue
            repeated = tokens[end - keep - ngram : end]
            place = _replacement(text, key, document, end, repeated, ngram)
            if place is not None:
                octaves[octave] += 1
                rows.append((document, end, keep, distance, *place))
    if not rows:
        raise EvaluationError(
            f"targets_by=repetition found no {ngram} tokens that occur twice in a document, with "
            f"one continuation and within {longest} tokens: lower ngram, or evaluate longer "
            "documents"
        )
    columns = np.array(sorted(rows), dtype=np.int64).T
    document, end, keep, distance, source, source_start = columns
    return RepeatedTargets(ngram, document, end, keep, distance, source, source_start, spec)


def find_repeats(tokens: np.ndarray, ngram: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the targets in `tokens` (N,), ascending, and the distance of each."""
    targets = []
    distances = []
    # index after the first occurrence of an n-gram; None after its second
    first: dict[bytes, int | None] = {}
    for index in range(ngram, len(tokens)):
        gram = tokens[index - ngram : index].tobytes()
        earlier = first.get(gram)
        first[gram] = None if gram in first else index
        if earlier is None or tokens[index] != tokens[earlier]:
            continue
        if index - earlier > ngram:
            targets.append(index)
            distances.append(index - earlier)
    return np.array(targets, dtype=np.int64), np.array(distances, dtype=np.int64)


def _inside(index: np.ndarray, pieces: list[tuple[int, int]]) -> np.ndarray:
    """(n,) whether each index is in one of the `pieces` (start, end), which are ascending."""
    edges = np.array(pieces, dtype=np.int64).ravel()
    return np.searchsorted(edges, index, side="right") % 2 == 1


def _groups(
    targets: np.ndarray,
    distances: np.ndarray,
    ngram: int,
    most: int,
) -> Iterator[tuple[int, int, int]]:
    """(end, keep, distance) of each run of neighboring targets at one distance: its first `most`
    targets, fewer if they would overlap their earlier occurrence."""
    if not len(targets):
        return
    is_new = (np.diff(targets) != 1) | (np.diff(distances) != 0)
    for run in np.split(np.arange(len(targets)), np.flatnonzero(is_new) + 1):
        distance = int(distances[run[0]])
        keep = min(len(run), most, distance - ngram)
        yield int(targets[run[0]]) + keep, keep, distance


def _replacement(
    text: EvaluationText,
    key: str,
    document: int,
    end: int,
    repeated: np.ndarray,
    ngram: int,
) -> tuple[int, int] | None:
    """Document and start of a replacement: as many tokens as `repeated`, with none of its n-grams,
    in another document if there is one; None if no draw gives such text."""
    size = len(repeated)
    grams = _grams(repeated, ngram)
    others = np.flatnonzero(text.lengths > size)  # index 0 may be BOS
    if len(others) > 1:
        others = others[others != document]
    purpose = f"replacement {document} {end}"
    for attempt in range(TRIES):
        source = int(others[draw_integer(key, purpose, 2 * attempt) % len(others)])
        room = int(text.lengths[source]) - size
        start = 1 + draw_integer(key, purpose, 2 * attempt + 1) % room
        if grams.isdisjoint(_grams(text.slice(source, start, start + size), ngram)):
            return source, start
    return None


def _grams(tokens: np.ndarray, ngram: int) -> set[bytes]:
    return {tokens[i : i + ngram].tobytes() for i in range(len(tokens) - ngram + 1)}
