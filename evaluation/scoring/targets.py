"""Draw fixed targets: spans of tokens, the same for every length, method and checkpoint.

The draw depends only on (corpus hash, tokenizer hash, longest length, span, counts, BOS rule, seed, excluded
ranges). Its integers come from SHA-256, not from a library's generator, so library versions do not matter.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evaluation.errors import EvaluationError
from evaluation.scoring.text import EvaluationText


@dataclass(frozen=True)
class TargetSet:
    """Spans of `span` target tokens: text [end - span, end) of `document`; sorted by (document, end)."""

    corpus_hash: str
    tokenizer_hash: str
    longest: int  # Lmax in input tokens
    span: int  # K
    documents: int  # the cap asked for; len(set(document)) is how many there are
    spans_per_document: int
    bos_rule: str
    seed: int
    document: np.ndarray  # (n_spans,) int64
    end: np.ndarray  # (n_spans,) int64, exclusive
    # The excluded ranges, [document, start, end], of documents in which spans had to avoid them.
    excluded: list[list[int]] = field(default_factory=list)

    @property
    def n_targets(self) -> int:
        return len(self.end) * self.span

    def spec(self) -> dict:
        keys = ("corpus_hash", "tokenizer_hash", "longest", "span", "documents", "spans_per_document")
        spec = {key: getattr(self, key) for key in (*keys, "bos_rule", "seed")}
        return spec | ({"excluded": self.excluded} if self.excluded else {})

    @property
    def hash(self) -> str:
        """SHA-256 over the specification and every span; only results with equal hashes are comparable."""
        return content_hash({**self.spec(), "spans": self.pairs()})

    def pairs(self) -> list[list[int]]:
        return [[d, e] for d, e in zip(self.document.tolist(), self.end.tolist(), strict=True)]

    def record(self) -> dict:
        """What `targets.json` holds."""
        return {"format": 1, "hash": self.hash, **self.spec(), "spans": self.pairs()}


def load_targets(path: Path) -> TargetSet:
    """Read `targets.json`. Raises EvaluationError if its content does not match its hash."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        spans = np.array(record.pop("spans"), dtype=np.int64).reshape(-1, 2)
        stated = record.pop("hash")
        record.pop("format")
        targets = TargetSet(**record, document=spans[:, 0], end=spans[:, 1])
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluationError(
            f"{path}: not a targets file ({error}); delete it to draw the targets anew"
        ) from error
    if targets.hash != stated:
        raise EvaluationError(
            f"{path}: its spans do not give the hash it states; delete it to draw them anew"
        )
    return targets


def content_hash(record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def tokens_needed(longest: int, span: int, spans_per_document: int) -> int:
    """Text tokens a document must have: Lmax + 1 up to the first span's end, and room for the other spans."""
    return longest + 1 + (spans_per_document - 1) * span


def reaches(text: EvaluationText, span: int, spans_per_document: int) -> np.ndarray:
    """The longest length for which each document has room, (n_documents,): below `span` where there is none.

    It is what the spans leave before them when they are packed at the end, outside excluded stretches.
    """
    out = text.lengths - tokens_needed(0, span, spans_per_document)
    for document in np.unique(text.excluded[:, 0]).tolist():
        out[document], left = -1, spans_per_document
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
    corpus_hash: str,
    tokenizer_hash: str,
    longest: int,
    span: int = 64,
    documents: int = 200,
    spans_per_document: int = 16,
    seed: int = 0,
    least_documents: int = 1,
) -> TargetSet:
    """Draw equally many disjoint spans, outside excluded stretches, in each of at most `documents` documents.

    Raises EvaluationError (how many documents there are, the longest usable length) where fewer than
    `least_documents` have room.
    """
    if span > longest:
        raise EvaluationError(f"targets={span} is more than the longest length {longest}; lower it")
    eligible = np.flatnonzero(reaches(text, span, spans_per_document) >= longest)
    if len(eligible) < max(1, least_documents):
        raise EvaluationError(
            _too_few(text, longest, span, spans_per_document, len(eligible), least_documents)
        )
    key = f"{seed}|{corpus_hash}|{tokenizer_hash}|{longest}|{span}|{spans_per_document}|{text.bos_rule}"
    ranked = sorted(eligible.tolist(), key=lambda d: (draw_integer(key, "document", d), d))
    chosen = sorted(ranked[:documents])
    pairs, moved, first = [], [], longest + 1 - span
    for d in chosen:
        clean = text.clean(d, first)
        ends = _disjoint_ends(f"{key}|{d}", [(first, int(text.lengths[d]))], first, span, spans_per_document)
        # Redrawn only if a span overlaps excluded text: every valid placement remains equally likely, and
        # text excluded elsewhere in the document does not move the targets.
        if not all(any(start <= end - span and end <= stop for start, stop in clean) for end in ends):
            ends = _disjoint_ends(f"{key}|{d}|clean", clean, first, span, spans_per_document)
            moved.append(d)
        pairs += [(d, end) for end in ends]
    spans = np.array(pairs, dtype=np.int64)
    return TargetSet(
        corpus_hash,
        tokenizer_hash,
        longest,
        span,
        documents,
        spans_per_document,
        text.bos_rule,
        seed,
        document=spans[:, 0],
        end=spans[:, 1],
        excluded=text.excluded_in(moved),
    )


def shorten_lengths(
    text: EvaluationText, lengths: Sequence[int], *, span: int, spans_per_document: int, least_documents: int
) -> tuple[list[int], str]:
    """Drop lengths from the top until `least_documents` documents have room; returns them and a sentence
    ('' if none).

    Raises EvaluationError where not even the shortest length has enough documents.
    """
    ordered = sorted(lengths)
    room = reaches(text, span, spans_per_document)
    counts = {n: int((room >= n).sum()) for n in ordered}
    kept = [n for n in ordered if counts[n] >= max(1, least_documents)]
    if not kept:
        raise EvaluationError(
            _too_few(text, ordered[0], span, spans_per_document, counts[ordered[0]], least_documents)
        )
    if len(kept) == len(ordered):
        return kept, ""
    dropped = [n for n in ordered if n not in kept]
    return kept, (
        f"only {counts[dropped[0]]} of {len(text.lengths)} documents are long enough for length {dropped[0]} "
        f"(at least {least_documents} are required): the longest length is now {kept[-1]}, "
        f"for which there are {counts[kept[-1]]}"
    )


def longest_usable(text: EvaluationText, span: int, spans_per_document: int, least_documents: int) -> int:
    """The longest length for which `least_documents` documents have room; 0 where there is none."""
    if len(text.lengths) < least_documents:
        return 0
    return max(0, int(np.sort(reaches(text, span, spans_per_document))[::-1][least_documents - 1]))


def _too_few(text: EvaluationText, longest: int, span: int, per_document: int, have: int, wanted: int) -> str:
    wanted = max(1, wanted)
    usable = longest_usable(text, span, per_document, wanted)
    need = tokens_needed(longest, span, per_document)
    share = have / max(1, len(text.lengths))
    outside = " outside text that also occurs in the training text" if len(text.excluded) else ""
    fix = (
        f"the longest usable length is {usable}"
        if usable >= span
        else "no length is usable with these settings: lower targets"
        + (" or spans_per_document" if per_document > 1 else "")
    )
    return (
        f"length {longest} needs {wanted} document(s) of at least {need} tokens ({per_document} spans of "
        f"{span} "
        f"targets each){outside}; {have} of {len(text.lengths)} ({share:.1%}) have that many; {fix}"
    )


def _disjoint_ends(
    key: str, pieces: Sequence[tuple[int, int]], first: int, span: int, count: int
) -> list[int]:
    """Ends of `count` disjoint spans inside `pieces` (start, end), ascending, every placement equally likely.

    `first`: the smallest start a span can have; draws are numbered by their distance from it.
    """

    def ways(size: int, spans: int) -> int:
        return math.comb(size - spans * span + spans, spans) if size >= spans * span else 0

    # after[i][n]: the ways to place n spans in pieces[i:].
    after = [[1] + [0] * count]
    for start, end in reversed(pieces):
        own = [ways(end - start, n) for n in range(min(count, (end - start) // span) + 1)]
        rest = after[0]
        after.insert(0, [sum(w * rest[n - i] for i, w in enumerate(own[: n + 1])) for n in range(count + 1)])
    ends, left = [], count
    for (start, end), here, rest in zip(pieces, after, after[1:], strict=False):
        pick, n = (draw_integer(key, "piece", start - first) * here[left]) >> 128, 0
        while pick >= (found := ways(end - start, n) * rest[left - n]):
            pick, n = pick - found, n + 1
        # Stars and bars: sorted distinct draws from slack + n values, less their rank, are the gaps' prefix
        # sums.
        marks = sorted(_distinct(key, end - start - n * span + n, n, start - first))
        ends += [start + mark - rank + (rank + 1) * span for rank, mark in enumerate(marks)]
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
    """A 128-bit integer that depends on its arguments alone; reduced modulo n its bias is below n / 2^128."""
    return int.from_bytes(hashlib.sha256(f"{key}|{purpose}|{index}".encode()).digest()[:16], "big")
