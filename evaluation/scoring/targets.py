"""The text that an evaluation reads, and the draw of fixed targets in it.

Coordinates. Every index below is an index into the *text* of a document: the stored tokens without
EOS, and with BOS by the setting `bos`:

- `as-trained`: as stored, with the leading BOS if the store has one;
- `none`: without any BOS;
- `every-window`: with a leading BOS, and the first token of every window overwritten by BOS, so
  that BOS is one of the L inputs and displaces the oldest token, at every L alike.

Index 0 is never a target because nothing precedes it, so BOS is never one. EOS is removed and never
a target either.

Fixed targets are spans of tokens, the same for every length, method and checkpoint. The draw
depends only on (corpus hash, tokenizer hash, longest length, span, counts, BOS rule, seed, excluded
ranges). Its integers come from SHA-256, not from a library's generator, so they do not depend on
library versions.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.files import canonical_hash
from errors import EvaluationError


class EvaluationText:
    """The documents of `store` (`.n_documents .lengths .has_bos .has_eos .document(i)`) under
    `bos_rule`.

    `excluded`: ranges without targets, rows (document, first token, last token) of stored tokens,
    ascending and not overlapping. Raises EvaluationError for `every-window` without a BOS id.
    """

    def __init__(
        self,
        store,
        bos_rule: str = "as-trained",
        bos_id: int | None = None,
        excluded: np.ndarray | None = None,
    ):
        self.store = store
        self.bos_rule = bos_rule
        if bos_rule == "every-window" and (bos_id is None or bos_id < 0):
            raise EvaluationError(
                "bos=every-window needs a tokenizer with a BOS token; use bos=as-trained or none"
            )
        self.bos_id = -1 if bos_id is None else bos_id  # used under every-window only
        # Text index = stored index - shift.
        self.shift = 0
        if bos_rule == "none" and store.has_bos:
            self.shift = 1
        elif bos_rule == "every-window" and not store.has_bos:
            self.shift = -1
        lengths = np.asarray(store.lengths, dtype=np.int64)
        self.lengths = np.maximum(lengths - self.shift - int(store.has_eos), 0)
        # (n, 3) document, start, end (exclusive), in text coordinates.
        stored = np.zeros((0, 3), dtype=np.int64) if excluded is None else excluded
        self.excluded = stored + np.array([0, -self.shift, 1 - self.shift])

    def clean(self, document: int, first: int = 0) -> list[tuple[int, int]]:
        """The stretches (start, end) of one document's text from `first` on that are not
        excluded."""
        length = int(self.lengths[document])
        low, high = np.searchsorted(self.excluded[:, 0], [document, document + 1])
        excluded = np.clip(self.excluded[low:high, 1:], first, length)
        edges = [first, *excluded.ravel().tolist(), length]
        pieces = zip(edges[::2], edges[1::2], strict=True)
        return [(start, end) for start, end in pieces if start < end]

    def is_clean(self, document: int, start: int, end: int) -> bool:
        """Whether no token of text [start, end) is excluded."""
        return any(first <= start and end <= last for first, last in self.clean(document))

    def excluded_in(self, documents: np.ndarray | list[int]) -> list[list[int]]:
        """The excluded stretches of these documents: [document, start, end]."""
        return self.excluded[np.isin(self.excluded[:, 0], documents)].tolist()

    def slice(self, document: int, start: int, end: int) -> np.ndarray:
        """Tokens [start, end) of one document's text, (end - start,) int64, without the overwritten
        BOS."""
        low = start + self.shift
        stored = self.store.document(document)[max(0, low) : end + self.shift].astype(np.int64)
        return stored if low >= 0 else np.append(self.bos_id, stored)

    def windows(self, documents: np.ndarray, ends: np.ndarray, inputs: int) -> np.ndarray:
        """Windows of `inputs` + 1 tokens that end (exclusively) at `ends`: (n, inputs + 1)
        int64."""
        rows = zip(documents.tolist(), ends.tolist(), strict=True)
        windows = np.stack([self.slice(document, end - inputs - 1, end) for document, end in rows])
        if self.bos_rule == "every-window":
            windows[:, 0] = self.bos_id
        return windows

    def targets(self, windows: np.ndarray) -> np.ndarray:
        """Ids of the counted targets of `windows` (n, 4), (n_targets,)."""
        rows = windows.tolist()
        return np.concatenate([self.slice(document, end - k, end) for document, end, _, k in rows])

    def units(self) -> tuple[np.ndarray, list[str], str]:
        """The independent unit of every document: ids (n_documents,), their names, and 'document'
        or 'cluster'.

        A corpus with clusters (an author, a series) declares that its documents are not
        independent. A document without a cluster is its own unit.
        """
        names = [str(name) for name in self.store.names]
        clusters = self.store.clusters
        if not any(clusters):
            return np.arange(len(names)), names, "document"
        keys = []  # clusters sort before documents without one
        for i, cluster in enumerate(clusters):
            keys.append((0, str(cluster), str(cluster)) if cluster else (1, str(i), names[i]))
        ids = {key: n for n, key in enumerate(sorted(set(keys)))}
        unit_names = [name for *_, name in ids]
        return np.array([ids[key] for key in keys]), unit_names, "cluster"


@dataclass(frozen=True)
class TargetSet:
    """Spans of `span` target tokens: text [end - span, end) of `document`; sorted by (document,
    end). `content`: the spans and everything that determines them."""

    span: int  # K
    document: np.ndarray  # (n_spans,) int64
    end: np.ndarray  # (n_spans,) int64, exclusive
    content: dict

    @property
    def record(self) -> dict:
        """The content of `targets.json`."""
        return {"format": 1, "hash": self.hash, **self.content}

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the specification and every span; only results with equal hashes are
        comparable."""
        return canonical_hash(self.content)


def targets_of(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Document and text index of every counted target, each (n_targets,); `windows` (n, 4) as in
    `evaluation_plan.py`."""
    document, end, _, keep = windows.T
    index = np.repeat(end - np.cumsum(keep), keep) + np.arange(keep.sum())
    return np.repeat(document, keep), index


def tokens_needed(longest: int, span: int, spans_per_document: int) -> int:
    """Number of text tokens that a document must have: Lmax + 1 up to the first span's end, and
    room for the other spans."""
    return longest + 1 + (spans_per_document - 1) * span


def reaches(text: EvaluationText, span: int, spans_per_document: int) -> np.ndarray:
    """The longest length for which each document has room, (n_documents,); less than `span` if it
    has room for none.

    It is the number of tokens before the spans if they are packed at the end, outside excluded
    ranges.
    """
    out = text.lengths - tokens_needed(0, span, spans_per_document)
    for document in np.unique(text.excluded[:, 0]).tolist():
        out[document] = -1
        left = spans_per_document
        for start, end in reversed(text.clean(document)):
            fitting = (end - start) // span
            if fitting >= left:
                out[document] = end - (left - 1) * span - 1
                break
            left -= fitting
    return out


def draw_targets(
    text: EvaluationText,
    *,
    tokenizer_hash: str,
    longest: int,
    span: int,
    documents: int = 200,
    spans_per_document: int,
    seed: int = 0,
    least_documents: int = 1,
) -> TargetSet:
    """Draw equally many disjoint spans, outside excluded stretches, in each of at most `documents`
    documents.

    Raises EvaluationError, with the number of documents and the longest usable length, if fewer
    than `least_documents` have room.
    """
    corpus = text.store.hash
    spec = {
        "corpus_hash": corpus,
        "tokenizer_hash": tokenizer_hash,
        "longest": longest,
        "span": span,
        "documents": documents,
        "spans_per_document": spans_per_document,
        "bos_rule": text.bos_rule,
        "seed": seed,
    }
    key = f"{seed}|{corpus}|{tokenizer_hash}|{longest}|{span}|{spans_per_document}|{text.bos_rule}"
    outside = " outside excluded text" if len(text.excluded) else ""
    chosen = draw_documents(
        key,
        reaches(text, span, spans_per_document),
        longest,
        limit=documents,
        least=least_documents,
        need=f"at least {tokens_needed(longest, span, spans_per_document)} tokens "
        f"({spans_per_document} spans of {span} targets each){outside}",
        fix="; or lower targets or spans_per_document",
    )
    pairs = []
    moved = []
    first = longest + 1 - span
    for d in chosen.tolist():
        whole = [(first, int(text.lengths[d]))]
        ends = _disjoint_ends(f"{key}|{d}", whole, first, span, spans_per_document)
        # Redrawn only if a span overlaps excluded text: every valid placement remains equally
        # likely, and text excluded elsewhere in the document does not move the targets.
        if not all(text.is_clean(d, end - span, end) for end in ends):
            clean = text.clean(d, first)
            ends = _disjoint_ends(f"{key}|{d}|clean", clean, first, span, spans_per_document)
            moved.append(d)
        pairs += [[d, end] for end in ends]
    # excluded ranges of the documents whose spans had to avoid them
    if excluded := text.excluded_in(moved):
        spec["excluded"] = excluded
    document, end = np.array(pairs, dtype=np.int64).T
    return TargetSet(span, document, end, {**spec, "spans": pairs})


def shorten_lengths(
    room: np.ndarray,
    lengths: Sequence[int],
    least_documents: int,
) -> tuple[list[int], str]:
    """Drop the longest lengths, but never the shortest one, until `least_documents` documents have
    `room` (n_documents,) for the rest. Returns the remaining lengths and a sentence about the drop
    ('' if none)."""
    shortest, *longer = sorted(lengths)
    counts = {n: int((room >= n).sum()) for n in longer}
    kept = [shortest, *(n for n in longer if counts[n] >= least_documents)]
    if len(kept) > len(longer):
        return kept, ""
    dropped = longer[len(kept) - 1]
    return kept, (
        f"only {counts[dropped]} of {len(room)} documents are long enough for length {dropped} "
        f"(at least {least_documents} are required): the longest length is now {kept[-1]}"
    )


def draw_documents(
    key: str,
    room: np.ndarray,
    longest: int,
    limit: int,
    least: int,
    need: str,
    fix: str = "",
) -> np.ndarray:
    """Draw at most `limit` of the documents whose `room` (n_documents,) is at least `longest`, with
    `key` as the seed. Returns their indices, ascending.

    Raises EvaluationError, with the longest usable length, if fewer than `least` documents qualify.
    `need`: what a document must have, for this error.
    """
    eligible = np.flatnonzero(room >= longest).tolist()
    if len(eligible) < least:
        usable = 0
        if len(room) >= least:
            usable = max(0, int(np.sort(room)[-least]))
        raise EvaluationError(
            f"length {longest} needs {least} document(s) of {need}: only {len(eligible)} of "
            f"{len(room)} documents are long enough; the longest usable length is {usable}{fix}"
        )
    ranked = sorted(eligible, key=lambda d: (draw_integer(key, "document", d), d))
    return np.array(sorted(ranked[:limit]), dtype=np.int64)


def _disjoint_ends(
    key: str,
    pieces: Sequence[tuple[int, int]],
    first: int,
    span: int,
    count: int,
) -> list[int]:
    """Ends of `count` disjoint spans inside `pieces` (start, end), ascending, every placement
    equally likely.

    `first`: the smallest start of a span; draws are numbered by the distance of their piece from
    it.
    """

    def ways(size: int, spans: int) -> int:
        slack = size - spans * span
        return math.comb(slack + spans, spans) if slack >= 0 else 0

    # after[i][n]: number of ways to place n spans in pieces[i:].
    after = [[1] + [0] * count]
    for start, end in reversed(pieces):
        own = [ways(end - start, n) for n in range(count + 1)]
        rest = after[0]
        totals = []
        for n in range(count + 1):
            totals.append(sum(own[i] * rest[n - i] for i in range(n + 1)))
        after.insert(0, totals)
    ends = []
    left = count
    for (start, end), here, rest in zip(pieces, after[:-1], after[1:], strict=True):
        pick = (draw_integer(key, "piece", start - first) * here[left]) >> 128
        n = 0
        while pick >= (share := ways(end - start, n) * rest[left - n]):
            pick -= share
            n += 1
        # Stars and bars: sorted distinct draws from slack + n values, less their rank, are the
        # gaps' prefix sums.
        slack = end - start - n * span
        for rank, place in enumerate(sorted(_distinct(key, slack + n, n, start - first))):
            ends.append(start + place - rank + (rank + 1) * span)
        left -= n
    return ends


def _distinct(key: str, population: int, count: int, offset: int) -> set[int]:
    """Floyd's algorithm: `count` distinct integers below `population`, every set equally likely."""
    chosen: set[int] = set()
    for top in range(population - count, population):
        pick = draw_integer(key, "span", offset + top) % (top + 1)
        chosen.add(top if pick in chosen else pick)
    return chosen


def draw_integer(key: str, purpose: str, index: int) -> int:
    """A 128-bit integer that depends only on the arguments. Reduced modulo n, its bias is below n /
    2^128."""
    digest = hashlib.sha256(f"{key}|{purpose}|{index}".encode()).digest()
    return int.from_bytes(digest[:16], "big")
