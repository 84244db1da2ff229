"""Choose the targets of an evaluation: what is excluded from the text, the windows of every length,
and the counted targets."""

from dataclasses import dataclass, replace

import numpy as np

from data import Tokenizer
from data.files import canonical_hash
from errors import EvaluationError
from evaluation.contamination.screening import Screening, screen, shared_text
from evaluation.evaluation_settings import EvaluationSettings, TargetSettings
from evaluation.scoring.repetition import RepeatedTargets, draw_repeats
from evaluation.scoring.targets import (
    draw_documents,
    draw_targets,
    reaches,
    shorten_lengths,
)
from evaluation.scoring.text import EvaluationText
from evaluation.scoring.windows import (
    TargetWindows,
    block_windows,
    fixed_windows,
    position_windows,
    sliding_windows,
    truncated_windows,
)
from evaluation.stores import EvaluationStores


@dataclass(frozen=True)
class EvaluationPlan:
    """Windows of every length, over the same targets in the same order.

    `truncated` scores those targets with the context truncated to L0; it is `windows[L0]` except
    under by- position. `record` is the content of `targets.json`; `hash` identifies the targets.
    """

    protocol: str
    lengths: list[int]
    windows: dict[int, TargetWindows]
    truncated: TargetWindows
    hash: str
    record: dict
    candidates: TargetWindows | None = None  # all possible targets, a window per document
    note: str = ""  # changes to the requested settings
    repeats: RepeatedTargets | None = None
    # raw bytes of each window's targets: losses are per byte, over runs with different tokenizers
    span_bytes: np.ndarray | None = None

    @property
    def n_targets(self) -> int:
        return self.truncated.n_targets

    def per_byte(self, nll: np.ndarray) -> np.ndarray:
        """The losses of the targets, spread evenly over the bytes of each window's targets."""
        assert self.span_bytes is not None
        first = np.cumsum(self.truncated.keep) - self.truncated.keep
        return np.repeat(np.add.reduceat(nll, first) / self.span_bytes, self.span_bytes)

    def target_ids(self, text: EvaluationText) -> np.ndarray:
        """(n_targets,) token id of every counted target."""
        rows = self.truncated.rows()
        return np.concatenate([text.slice(d, end - keep, end) for d, end, keep in rows])

    def target_index(self) -> np.ndarray:
        """(n_targets,) index of every counted target in the text of its document."""
        rows = self.truncated.rows()
        return np.concatenate([np.arange(end - keep, end) for _, end, keep in rows])


def make_plan(
    settings: EvaluationSettings,
    text: EvaluationText,
    tokenizer_hash: str,
    trained_length: int,
) -> EvaluationPlan:
    """Draw the targets and build the windows. Raises EvaluationError if documents are too few or
    short."""
    if settings.protocol == "fixed-targets":
        plan = fixed_plan(settings, text, tokenizer_hash, trained_length)
        return with_repeats(plan, settings, text) if settings.targets_by else plan
    lengths = settings.grid(trained_length)
    longest = lengths[-1]
    documents = draw_documents(
        f"{settings.seed}|{longest}",
        text.lengths - 1,
        longest,
        limit=settings.documents,
        least=settings.least_documents,
        need=f"at least {longest + 1} tokens",
    )
    spec = {
        "corpus_hash": text.store.hash,
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
        spec["windows_per_document"] = per_document = settings.windows_per_document
        whole = position_windows(text, documents, longest, per_document, settings.seed)
        windows = {longest: whole}
        step = truncation_step(settings, trained_length)
        truncated = truncated_windows(whole, trained_length, step)
    else:
        if settings.protocol == "non-overlapping":
            windows = {n: block_windows(text, documents, n, longest) for n in lengths}
        else:
            windows = {n: sliding_windows(text, documents, n, settings.step(n)) for n in lengths}
        truncated = windows[trained_length]
    digest = canonical_hash(spec)
    return EvaluationPlan(settings.protocol, list(windows), windows, truncated, digest, spec)


def truncation_step(settings: EvaluationSettings, trained_length: int) -> int:
    """by-position: targets scored per window with the context truncated to L0. Small enough that
    every target keeps at least three quarters of L0 as context.
    """
    return max(1, min(settings.targets, trained_length // 4))


def fixed_plan(
    settings: TargetSettings,
    text: EvaluationText,
    tokenizer_hash: str,
    trained_length: int,
) -> EvaluationPlan:
    """The plan of `fixed-targets`."""
    lengths = settings.grid(trained_length)
    span = settings.targets
    if lengths[0] < span:
        raise EvaluationError(f"targets={span} is more than the length {lengths[0]}; lower it")
    each = settings.spans_per_document
    note = ""
    if settings.shorten:
        room = reaches(text, span, each)
        lengths, note = shorten_lengths(room, lengths, settings.least_documents)
        lengths = sorted({*lengths, trained_length})
    targets = draw_targets(
        text,
        tokenizer_hash=tokenizer_hash,
        longest=lengths[-1],
        span=span,
        documents=settings.documents,
        spans_per_document=each,
        seed=settings.seed,
        least_documents=settings.least_documents,
    )
    windows = {length: fixed_windows(targets, length) for length in lengths}
    documents = np.unique(targets.document)
    ends = text.lengths[documents]
    first = lengths[-1] + 1 - span
    return EvaluationPlan(
        protocol="fixed-targets",
        lengths=lengths,
        windows=windows,
        truncated=windows[trained_length],
        hash=targets.hash,
        record=targets.record(),
        candidates=TargetWindows(documents, ends, inputs=ends - 1, keep=ends - first),
        note=note,
    )


def with_repeats(
    plan: EvaluationPlan, settings: EvaluationSettings, text: EvaluationText
) -> EvaluationPlan:
    """The plan with repeated text of the same documents as further targets."""
    repeats = draw_repeats(
        text,
        np.unique(plan.truncated.document),
        longest=plan.lengths[-1],
        most=settings.targets,
        per_document=settings.spans_per_document,
        ngram=settings.ngram,
        spec={"targets": plan.hash},
    )
    record = plan.record | {"repeats": repeats.record()}
    return replace(plan, repeats=repeats, record=record)


def raw_bytes(
    ids: np.ndarray,
    documents: np.ndarray,
    index: np.ndarray,
    text: EvaluationText,
    tokenizer,
) -> int | None:
    """Raw bytes of the targets with these token `ids`, each at this `index` of the text of its
    document, without what the tokenizer inserts before a text.

    None if an id has no bytes, or a document's tokens have other bytes than its raw text: bits per
    byte would be wrong.
    """
    size = np.asarray(tokenizer.token_bytes, dtype=np.int64)
    for document in np.unique(documents).tolist():
        raw = int(text.store.bytes[document]) + len(tokenizer.prefix)
        if int(size[text.store.document(document)].sum()) != raw:
            return None
    if not (size[ids] > 0).all():
        return None
    first = int(text.store.has_bos) - text.shift  # index of the first token after BOS
    return int(size[ids].sum()) - len(tokenizer.prefix) * int((index == first).sum())


@dataclass(frozen=True)
class ChosenTargets:
    """The targets of one run. `stores`: the text to read, and the text the model was trained on,
    which gives the unigram baseline; passages that both share are excluded."""

    stores: EvaluationStores
    tokenizer: Tokenizer
    text: EvaluationText
    plan: EvaluationPlan
    screening: Screening


def choose_targets(
    settings: EvaluationSettings,
    stores: EvaluationStores,
    tokenizer: Tokenizer,
    trained_length: int,
    console=None,
) -> ChosenTargets:
    """Raises EvaluationError if too little text remains."""
    shared = shared_text(settings.contamination, stores, tokenizer, console)
    text = EvaluationText(stores.read, settings.bos, tokenizer.bos_id, shared.rows)
    plan = make_plan(settings, text, tokenizer.hash, trained_length)
    screening = screen(shared, text, plan.truncated, plan.candidates)
    return ChosenTargets(stores, tokenizer, text, plan, screening)
