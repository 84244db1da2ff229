"""One evaluation as windows: for every length which windows are scored, and what the counted targets are."""

from dataclasses import dataclass

import numpy as np

from evaluation.errors import EvaluationError
from evaluation.protocols import (
    Windows,
    block_windows,
    fixed_windows,
    long_documents,
    position_windows,
    sliding_windows,
    truncated_windows,
)
from evaluation.settings import EvaluationSettings
from evaluation.targets import Targets, content_hash, draw_targets, shorten_lengths
from evaluation.text import Text


@dataclass(frozen=True)
class Plan:
    """Windows of every length, over the same targets in the same order.

    `truncated` scores those targets with the context cut to L0; it is `windows[L0]` except under by-position.
    `record` is what `targets.json` holds; `hash` identifies the targets.
    """

    protocol: str
    lengths: list[int]
    windows: dict[int, Windows]
    truncated: Windows
    hash: str
    record: dict
    span: int | None  # targets per span, where spans are equally many per document
    note: str  # what was changed of what was asked, '' if nothing

    @property
    def n_targets(self) -> int:
        return self.truncated.n_targets

    def target_ids(self, text: Text) -> np.ndarray:
        """(n_targets,) token id of every counted target."""
        w = self.truncated
        parts = [
            text.slice(d, e - k, e)
            for d, e, k in zip(w.document.tolist(), w.end.tolist(), w.keep.tolist(), strict=True)
        ]
        return np.concatenate(parts)


def make_plan(
    settings: EvaluationSettings, text: Text, corpus_hash: str, tokenizer_hash: str, trained_length: int
) -> Plan:
    """Draw the targets and lay out the windows. Raises EvaluationError where documents are too few or too
    short.
    """
    lengths = settings.grid(trained_length)
    if settings.protocol == "fixed-targets":
        return _fixed(settings, text, corpus_hash, tokenizer_hash, trained_length, lengths)
    longest = lengths[-1]
    documents = long_documents(text, longest, settings.documents, settings.seed, settings.least_documents)
    spec = {
        "corpus_hash": corpus_hash,
        "tokenizer_hash": tokenizer_hash,
        "protocol": settings.protocol,
        "longest": longest,
        "bos_rule": settings.bos,
        "documents": documents.tolist(),
        "seed": settings.seed,
    }
    if settings.protocol == "by-position":
        spec["windows_per_document"] = settings.windows_per_document
        whole = position_windows(text, documents, longest, settings.windows_per_document, settings.seed)
        windows = {longest: whole}
        truncated = truncated_windows(whole, trained_length, truncation_step(settings, trained_length))
    else:
        windows = {length: _cover(settings, text, documents, length, longest) for length in lengths}
        truncated = windows[trained_length]
    return Plan(settings.protocol, sorted(windows), windows, truncated, content_hash(spec), spec, None, "")


def truncation_step(settings: EvaluationSettings, trained_length: int) -> int:
    """by-position: targets scored at once with the context cut to L0. Of a step near L0 the first targets
    would have no context left; so each keeps at least three quarters of L0.
    """
    return max(1, min(settings.targets, trained_length // 4))


def _cover(
    settings: EvaluationSettings, text: Text, documents: np.ndarray, length: int, longest: int
) -> Windows:
    if settings.protocol == "non-overlapping":
        return block_windows(text, documents, length, longest)
    return sliding_windows(text, documents, length, settings.stride or max(1, length // 8))


def _fixed(
    settings: EvaluationSettings,
    text: Text,
    corpus_hash: str,
    tokenizer_hash: str,
    trained_length: int,
    lengths: list[int],
) -> Plan:
    if lengths[0] < settings.targets:
        raise EvaluationError(
            f"length {lengths[0]} is shorter than a span of targets={settings.targets} tokens; lower targets"
        )
    note = ""
    if settings.shorten:
        lengths, note = shorten_lengths(
            text,
            lengths,
            span=settings.targets,
            spans_per_document=settings.spans_per_document,
            least_documents=settings.least_documents,
        )
        if trained_length not in lengths:
            raise EvaluationError(
                f"too few documents reach even the trained length {trained_length}: {note}; "
                "lower spans_per_document or least_documents, or evaluate on another store"
            )
    targets: Targets = draw_targets(
        text,
        corpus_hash=corpus_hash,
        tokenizer_hash=tokenizer_hash,
        longest=lengths[-1],
        span=settings.targets,
        documents=settings.documents,
        spans_per_document=settings.spans_per_document,
        seed=settings.seed,
        least_documents=settings.least_documents,
    )
    windows = {length: fixed_windows(targets, length) for length in lengths}
    return Plan(
        "fixed-targets",
        lengths,
        windows,
        windows[trained_length],
        targets.hash,
        targets.record(),
        targets.span,
        note,
    )


def targets_bytes(ids: np.ndarray, token_bytes: np.ndarray) -> int | None:
    """Raw bytes behind the targets; None where an id stands for none, for then the tokenisation lost text."""
    sizes = np.asarray(token_bytes, dtype=np.int64)[ids]
    return int(sizes.sum()) if len(sizes) and (sizes > 0).all() else None


def spelled_out(text: Text, documents: np.ndarray, tokenizer) -> bool:
    """Whether the tokens of `documents` stand for just as many bytes as their raw text has: only then are
    bits per byte those of the text."""
    raw, prefix = getattr(text.store, "bytes", None), len(getattr(tokenizer, "prefix", b""))
    if raw is None:
        return True  # a store that does not say cannot be asked
    return all(
        int(tokenizer.token_bytes[text.store.document(document)].sum()) == int(raw[document]) + prefix
        for document in np.unique(documents).tolist()
    )
