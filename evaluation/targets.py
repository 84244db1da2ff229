"""Which tokens are scored: spans drawn once, the same for every length, rule and checkpoint compared.

The draw is a function of (corpus hash, tokenizer hash, longest length, span, counts, BOS rule, seed) alone.
Its integers come from SHA-256, not from a library's generator, so that no new version of a library moves
the targets.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluation.errors import EvaluationError
from evaluation.text import Text


@dataclass(frozen=True)
class Targets:
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

    @property
    def n_targets(self) -> int:
        return len(self.end) * self.span

    def spec(self) -> dict:
        keys = ("corpus_hash", "tokenizer_hash", "longest", "span", "documents", "spans_per_document")
        return {key: getattr(self, key) for key in (*keys, "bos_rule", "seed")}

    @property
    def hash(self) -> str:
        """SHA-256 over the specification and every span; results with different hashes are not compared."""
        return content_hash({**self.spec(), "spans": self.pairs()})

    def pairs(self) -> list[list[int]]:
        return [[d, e] for d, e in zip(self.document.tolist(), self.end.tolist(), strict=True)]

    def record(self) -> dict:
        """What `targets.json` holds."""
        return {"format": 1, "hash": self.hash, **self.spec(), "spans": self.pairs()}


def load_targets(path: Path) -> Targets:
    """Read `targets.json`. Raises EvaluationError where its content does not give the hash it states."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        spans = np.array(record.pop("spans"), dtype=np.int64).reshape(-1, 2)
        stated = record.pop("hash")
        record.pop("format")
        targets = Targets(**record, document=spans[:, 0], end=spans[:, 1])
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


def draw_targets(
    text: Text,
    *,
    corpus_hash: str,
    tokenizer_hash: str,
    longest: int,
    span: int = 64,
    documents: int = 200,
    spans_per_document: int = 16,
    seed: int = 0,
    least_documents: int = 1,
) -> Targets:
    """Draw equally many disjoint spans in each of at most `documents` documents.

    Raises EvaluationError (how many documents there are, the longest usable length) where fewer than
    `least_documents` have room.
    """
    if span > longest:
        raise EvaluationError(f"targets={span} is more than the longest length {longest}; lower it")
    need = tokens_needed(longest, span, spans_per_document)
    eligible = np.flatnonzero(text.lengths >= need)
    if len(eligible) < max(1, least_documents):
        raise EvaluationError(
            _too_few(text, longest, span, spans_per_document, len(eligible), least_documents)
        )
    key = f"{seed}|{corpus_hash}|{tokenizer_hash}|{longest}|{span}|{spans_per_document}|{text.bos_rule}"
    ranked = sorted(eligible.tolist(), key=lambda d: (draw_integer(key, "document", d), d))
    chosen = sorted(ranked[:documents])
    pairs = [
        (d, end)
        for d in chosen
        for end in _disjoint_ends(f"{key}|{d}", int(text.lengths[d]), longest, span, spans_per_document)
    ]
    spans = np.array(pairs, dtype=np.int64)
    return Targets(
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
    )


def shorten_lengths(
    text: Text, lengths: Sequence[int], *, span: int, spans_per_document: int, least_documents: int
) -> tuple[list[int], str]:
    """Drop lengths from the top until `least_documents` documents have room; returns them and a sentence
    ('' if none).

    Raises EvaluationError where not even the shortest length has enough documents.
    """
    ordered = sorted(lengths)
    counts = {n: int((text.lengths >= tokens_needed(n, span, spans_per_document)).sum()) for n in ordered}
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
        f"(at least {least_documents} are wanted): the lengths stop at {kept[-1]}, "
        f"for which there are {counts[kept[-1]]}"
    )


def longest_usable(text: Text, span: int, spans_per_document: int, least_documents: int) -> int:
    """The longest length for which `least_documents` documents have room; 0 where there is none."""
    if len(text.lengths) < least_documents:
        return 0
    reach = int(np.sort(text.lengths)[::-1][least_documents - 1])
    return max(0, reach - tokens_needed(0, span, spans_per_document))


def _too_few(text: Text, longest: int, span: int, per_document: int, have: int, wanted: int) -> str:
    wanted = max(1, wanted)
    usable = longest_usable(text, span, per_document, wanted)
    need = tokens_needed(longest, span, per_document)
    share = have / max(1, len(text.lengths))
    mend = (
        f"the longest usable length is {usable}"
        if usable >= span
        else "no length is usable with these settings: lower targets"
        + (" or spans_per_document" if per_document > 1 else "")
    )
    return (
        f"length {longest} needs {wanted} document(s) of at least {need} tokens ({per_document} spans of "
        f"{span} "
        f"targets each); {have} of {len(text.lengths)} ({share:.1%}) have that many; {mend}"
    )


def _disjoint_ends(key: str, length: int, longest: int, span: int, count: int) -> list[int]:
    """`count` disjoint spans, every placement equally likely; ends ascending, the first at least Lmax + 1."""
    first = longest + 1 - span  # smallest start of a span
    slack = length - first - count * span
    # Stars and bars: sorted distinct draws from slack + count values, less their rank, are the gaps' prefix
    # sums.
    marks = sorted(_distinct(key, slack + count, count))
    return [first + mark - rank + (rank + 1) * span for rank, mark in enumerate(marks)]


def _distinct(key: str, population: int, count: int) -> set[int]:
    """Floyd's algorithm: `count` distinct integers below `population`, every set equally likely."""
    chosen: set[int] = set()
    for top in range(population - count, population):
        pick = draw_integer(key, "span", top) % (top + 1)
        chosen.add(top if pick in chosen else pick)
    return chosen


def draw_integer(key: str, purpose: str, index: int) -> int:
    """A 128-bit integer that depends on its arguments alone; reduced modulo n its bias is below n / 2^128."""
    return int.from_bytes(hashlib.sha256(f"{key}|{purpose}|{index}".encode()).digest()[:16], "big")
