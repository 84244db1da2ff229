"""Plan an evaluation: the windows of every length, and the counted targets."""

from dataclasses import dataclass

import numpy as np

from evaluation.errors import EvaluationError
from evaluation.scoring.protocols import (
    TargetWindows,
    block_windows,
    fixed_windows,
    long_documents,
    position_windows,
    sliding_windows,
    truncated_windows,
)
from evaluation.scoring.targets import TargetSet, content_hash, draw_targets, shorten_lengths
from evaluation.scoring.text import EvaluationText
from evaluation.settings import EvaluationSettings


@dataclass(frozen=True)
class EvaluationPlan:
    """Windows of every length, over the same targets in the same order.

    `truncated` scores those targets with the context truncated to L0; it is `windows[L0]` except under by-
    position. `record` is the content of `targets.json`; `hash` identifies the targets.
    """

    protocol: str
    lengths: list[int]
    windows: dict[int, TargetWindows]
    truncated: TargetWindows
    candidates: TargetWindows  # all possible targets, a window per document; else `truncated`
    hash: str
    record: dict
    span: int | None  # targets per span, if every document has equally many
    note: str  # changes to the requested settings, '' if none

    @property
    def n_targets(self) -> int:
        return self.truncated.n_targets

    def target_ids(self, text: EvaluationText) -> np.ndarray:
        """(n_targets,) token id of every counted target."""
        w = self.truncated
        parts = [
            text.slice(d, e - k, e)
            for d, e, k in zip(w.document.tolist(), w.end.tolist(), w.keep.tolist(), strict=True)
        ]
        return np.concatenate(parts)


def make_plan(
    settings: EvaluationSettings,
    text: EvaluationText,
    corpus_hash: str,
    tokenizer_hash: str,
    trained_length: int,
) -> EvaluationPlan:
    """Draw the targets and build the windows. Raises EvaluationError if documents are too few or too
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
    if excluded := text.excluded_in(documents):
        spec["excluded"] = excluded
    if settings.protocol == "by-position":
        spec["windows_per_document"] = settings.windows_per_document
        whole = position_windows(text, documents, longest, settings.windows_per_document, settings.seed)
        windows = {longest: whole}
        truncated = truncated_windows(whole, trained_length, truncation_step(settings, trained_length))
    else:
        windows = {length: _cover(settings, text, documents, length, longest) for length in lengths}
        truncated = windows[trained_length]
    targets_hash = content_hash(spec)
    return EvaluationPlan(
        settings.protocol, sorted(windows), windows, truncated, truncated, targets_hash, spec, None, ""
    )


def truncation_step(settings: EvaluationSettings, trained_length: int) -> int:
    """by-position: targets scored per window with the context truncated to L0. Small enough that every target
    keeps at least three quarters of L0 as context.
    """
    return max(1, min(settings.targets, trained_length // 4))


def _cover(
    settings: EvaluationSettings, text: EvaluationText, documents: np.ndarray, length: int, longest: int
) -> TargetWindows:
    if settings.protocol == "non-overlapping":
        return block_windows(text, documents, length, longest)
    return sliding_windows(text, documents, length, settings.stride or max(1, length // 8))


def _fixed(
    settings: EvaluationSettings,
    text: EvaluationText,
    corpus_hash: str,
    tokenizer_hash: str,
    trained_length: int,
    lengths: list[int],
) -> EvaluationPlan:
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
    targets: TargetSet = draw_targets(
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
    documents = np.unique(targets.document)
    ends = text.lengths[documents]
    candidates = TargetWindows(documents, ends, ends - 1, ends - (targets.longest + 1 - targets.span))
    return EvaluationPlan(
        "fixed-targets",
        lengths,
        windows,
        windows[trained_length],
        candidates,
        targets.hash,
        targets.record(),
        targets.span,
        note,
    )


def targets_bytes(ids: np.ndarray, token_bytes: np.ndarray) -> int | None:
    """Raw bytes of the targets; None if an id has no bytes, as the tokenization lost text."""
    sizes = np.asarray(token_bytes, dtype=np.int64)[ids]
    return int(sizes.sum()) if len(sizes) and (sizes > 0).all() else None


def spelled_out(text: EvaluationText, documents: np.ndarray, tokenizer) -> bool:
    """Whether the tokens of `documents` have exactly as many bytes as their raw text, which bits per byte
    require."""
    raw, prefix = getattr(text.store, "bytes", None), len(getattr(tokenizer, "prefix", b""))
    if raw is None:
        return True  # the store does not record its bytes
    return all(
        int(tokenizer.token_bytes[text.store.document(document)].sum()) == int(raw[document]) + prefix
        for document in np.unique(documents).tolist()
    )
