"""The targets of an evaluation and the windows in which a protocol scores them.

Windows are rows of integers (n, 4): document, end, inputs L and targets K. A window is
text[end - L - 1 : end], and the last K of its L outputs count. Counted targets are in (document,
index) order, the same at every length, so lengths are comparable target by target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from data import Tokenizer
from data.files import canonical_hash
from errors import EvaluationError
from evaluation.evaluation_settings import EvaluationSettings, TargetSettings
from evaluation.scoring.contamination import Screening, screen, shared_text
from evaluation.scoring.repetition import RepeatedTargets, draw_repeats
from evaluation.scoring.targets import (
    EvaluationText,
    TargetSet,
    draw_documents,
    draw_integer,
    draw_targets,
    reaches,
    shorten_lengths,
)
from evaluation.stores import EvaluationStores

Window = tuple[int, int, int, int]  # document, end, inputs, targets


@dataclass(frozen=True)
class EvaluationPlan:
    """Windows of every length, over the same targets in the same order.

    `truncated_windows` score those targets with the context truncated to L0; they are `windows[L0]`
    except under by-position. `record` is the content of `targets.json`; `hash` identifies the
    targets.
    """

    protocol: str
    windows: dict[int, np.ndarray]
    truncated_windows: np.ndarray
    hash: str
    record: dict
    candidates: np.ndarray | None = None  # all possible targets, a window per document
    note: str = ""  # changes to the requested settings
    repeats: RepeatedTargets | None = None
    # raw bytes of each window's targets if losses are per byte (runs with different tokenizers)
    span_bytes: np.ndarray | None = None

    @property
    def lengths(self) -> list[int]:
        return list(self.windows)


@dataclass(frozen=True)
class ChosenTargets:
    """The targets of one run. `stores`: the text to read, and the training text, which gives the
    unigram baseline; passages shared by both are excluded."""

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
    """Choose the targets of one run outside excluded passages. Raises EvaluationError if too little
    text remains."""
    shared = shared_text(settings.contamination, stores, tokenizer, console)
    text = EvaluationText(stores.read, settings.bos, tokenizer.bos_id, shared.rows)
    plan = make_plan(settings, text, tokenizer.hash, trained_length)
    screening = screen(shared, text, plan.truncated_windows, plan.candidates)
    return ChosenTargets(stores, tokenizer, text, plan, screening)


def make_plan(
    settings: EvaluationSettings,
    text: EvaluationText,
    tokenizer_hash: str,
    trained_length: int,
) -> EvaluationPlan:
    """Draw the targets and build the windows. Raises EvaluationError if documents are too few or
    too short."""
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
        windows = {longest: position_windows(text, documents, longest, per_document, settings.seed)}
        step = truncation_step(settings, trained_length)
        baseline = truncated_windows(windows[longest], trained_length, step)
    else:
        if settings.protocol == "non-overlapping":
            windows = {n: block_windows(text, documents, n, longest) for n in lengths}
        else:
            windows = {n: sliding_windows(text, documents, n, settings.step(n)) for n in lengths}
        baseline = windows[trained_length]
    return EvaluationPlan(settings.protocol, windows, baseline, canonical_hash(spec), spec)


def truncation_step(settings: EvaluationSettings, trained_length: int) -> int:
    """by-position: number of targets per window with the context truncated to L0; small enough that
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
    possible = ends - (lengths[-1] + 1 - span)  # number of targets
    return EvaluationPlan(
        protocol="fixed-targets",
        windows=windows,
        truncated_windows=windows[trained_length],
        hash=targets.hash,
        record=targets.record,
        candidates=np.stack([documents, ends, ends - 1, possible], axis=1),
        note=note,
    )


def with_repeats(
    plan: EvaluationPlan,
    settings: EvaluationSettings,
    text: EvaluationText,
) -> EvaluationPlan:
    """The plan with repeated text in the same documents as further targets."""
    repeats = draw_repeats(
        text,
        np.unique(plan.truncated_windows[:, 0]),
        longest=plan.lengths[-1],
        most=settings.targets,
        per_document=settings.spans_per_document,
        ngram=settings.ngram,
        spec={"targets": plan.hash},
    )
    record = plan.record | {"repeats": repeats.record}
    return replace(plan, repeats=repeats, record=record)


def fixed_windows(targets: TargetSet, length: int) -> np.ndarray:
    """`fixed-targets`: one window of `length` inputs per span; target k of K sees length - K + k
    tokens."""
    same = np.ones_like(targets.end)
    columns = (targets.document, targets.end, length * same, targets.span * same)
    return np.stack(columns, axis=1)


def _stepped(document: int, end: int, stop: int, length: int, step: int) -> Iterator[Window]:
    """Windows of `length` inputs between the ends `end` and `stop`; each scores the next `step`
    outputs."""
    ends = [*range(end, stop, step), stop] if end < stop else []
    for before, here in pairwise(ends):
        yield document, here, length, here - before


def _stacked(windows: Sequence[Window]) -> np.ndarray:
    return np.array(windows, dtype=np.int64).reshape(-1, 4)


def sliding_windows(
    text: EvaluationText,
    documents: np.ndarray,
    length: int,
    stride: int,
) -> np.ndarray:
    """`sliding`: all outputs of the first window and the last `stride` outputs of the others count;
    the tail of a document has full context."""
    if not 1 <= stride <= length:
        raise EvaluationError(f"stride={stride} must lie between 1 and the length {length}")
    windows: list[Window] = []
    for document in documents.tolist():
        windows.append((document, length + 1, length, length))
        windows += _stepped(document, length + 1, int(text.lengths[document]), length, stride)
    return _stacked(windows)


def block_windows(
    text: EvaluationText,
    documents: np.ndarray,
    length: int,
    longest: int,
) -> np.ndarray:
    """`non-overlapping`: all outputs count. Each document is cut to a multiple of Lmax, which
    `length` must divide.
    """
    if longest % length:
        raise EvaluationError(
            f"protocol=non-overlapping needs lengths that divide the longest: {length} does not "
            f"divide {longest}"
        )
    windows: list[Window] = []
    for document in documents.tolist():
        end = (int(text.lengths[document]) - 1) // longest * longest
        windows += [(document, at + length + 1, length, length) for at in range(0, end, length)]
    return _stacked(windows)


def position_windows(
    text: EvaluationText,
    documents: np.ndarray,
    longest: int,
    per_document: int,
    seed: int,
) -> np.ndarray:
    """`by-position`: windows of Lmax at seeded random offsets (they may overlap), all outputs
    count."""
    windows: list[Window] = []
    for document in documents.tolist():
        room = int(text.lengths[document]) - longest  # offsets 0 .. room - 1
        key = f"{seed}|{longest}|{document}"
        offsets = sorted(draw_integer(key, "offset", i) % room for i in range(per_document))
        windows += [(document, offset + longest + 1, longest, longest) for offset in offsets]
    return _stacked(windows)


def truncated_windows(whole: np.ndarray, length: int, span: int) -> np.ndarray:
    """Windows of the same targets as `whole`, in which each target sees at most `length` tokens of
    its own window.

    Windows advance by `span`, so that a target sees between length - span + 1 and `length` tokens,
    as a fixed target does. A target among the first `length` of its window sees all tokens before
    it in the window.
    """
    windows: list[Window] = []
    for document, end, inputs, _ in whole.tolist():  # all inputs of a whole window count
        first = min(length, inputs)
        begin = end - inputs + first
        windows.append((document, begin, first, first))
        windows += _stepped(document, begin, end, length, span)
    return _stacked(windows)
