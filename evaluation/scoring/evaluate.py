"""Evaluate one checkpoint under every method at every length; finished cells are reused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evaluation.contamination.screening import Screening, screen, shared_text
from evaluation.errors import EvaluationError
from evaluation.ranks import EvaluationRanks
from evaluation.scoring.cells import CellStore
from evaluation.scoring.methods import Method, new_sinks
from evaluation.scoring.plan import EvaluationPlan, make_plan, spelled_out, targets_bytes
from evaluation.scoring.scoring import unigram_nll
from evaluation.scoring.session import EvaluationSession
from evaluation.scoring.text import EvaluationText
from evaluation.settings import ContaminationSettings, EvaluationSettings
from model import Transformer


@dataclass(frozen=True)
class EvaluatedModel:
    """The checkpoint under evaluation. `resolve(words)` -> position settings as evaluated (raises where
    illegal); `load(words, dtype)` -> the model in eval mode on the evaluation's device; `longest(words)` ->
    the longest input it can place (None: unlimited); `legal`: which settings may change, as a sentence."""

    name: str
    checkpoint_hash: str
    step: int
    trained_length: int
    original_length: int
    resolve: Callable[[Sequence[str]], dict]
    load: Callable[[Sequence[str], str], Transformer]
    longest: Callable[[Sequence[str]], int | None] = lambda words: None
    legal: str = ""
    bos_first: str = ""  # why this model expects BOS as the first token, '' if it does not


@dataclass
class EvaluationResult:
    """Everything measured. `nll[method, length]` is per-target, in the order of `document` (n,): the plan's
    targets in their order, without those that `screening` drops."""

    settings: EvaluationSettings
    subject: EvaluatedModel
    plan: EvaluationPlan
    facts: dict
    methods: list[Method]
    schemes: dict[str, dict]  # label -> position settings as evaluated
    document: np.ndarray
    unit: np.ndarray
    unit_kind: str
    screening: Screening
    n_bytes: int | None
    unigram: np.ndarray | None
    unit_names: list[str] = field(default_factory=list)  # of the ids in `unit`
    seen: np.ndarray | None = None  # per target: its cluster is also in the training text; None: unknown
    nll: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    truncated: np.ndarray | None = None  # context truncated to L0: the baseline of every net gain
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    absent: dict[tuple[str, int], str] = field(default_factory=dict)  # cells that cannot exist, and why
    notes: list[str] = field(default_factory=list)  # caveats about the methods
    left_out: dict[str, str] = field(default_factory=dict)  # built-in methods that do not apply, and why
    precision: dict[tuple[str, int], float] = field(default_factory=dict)  # mean bfloat16 - float32, nats
    files: dict[str, str] = field(default_factory=dict)  # "method@length" -> file of per-target NLL


def evaluate(
    settings: EvaluationSettings, subject: EvaluatedModel, *, dry_run: bool = False, **inputs
) -> EvaluationResult:
    """Measure every cell that is not on disk yet; `inputs`: as for `prepare_session`.

    With `dry_run` the cells and their cost are printed, nothing is measured, and the search for passages
    shared with the training text is skipped. An interrupted call keeps every finished cell and the finished
    part of the current one. With several `ranks` all of them must call; each measures its share and all
    return the same result.
    """
    session = prepare_session(settings, subject, dry_run=dry_run, **inputs)
    session.forecast() if dry_run else session.run()
    return session.result


def prepare_session(
    settings: EvaluationSettings,
    subject: EvaluatedModel,
    *,
    store,
    train,
    tokenizer,
    methods: list[Method],
    cells: Path,
    earlier: Sequence = (),
    overlaps: Path | None = None,
    console=None,
    ranks: EvaluationRanks | None = None,
    dry_run: bool = False,
) -> EvaluationSession:
    """Choose the targets and the cells of one evaluation. Raises EvaluationError for invalid settings.

    Args:
        store: the text to read.
        train: the text the model was trained on (or None): gives the unigram baseline; passages that `store`
            shares with it, or with the text of `earlier` trainings, are excluded.
        overlaps: folder that caches the shared passages.
    """
    schemes = resolve_all(methods, subject)
    notes = _sinks(methods, schemes, settings.bos, subject)
    if dry_run:
        train, earlier = None, ()
        settings = settings.model_copy(update={"contamination": ContaminationSettings(check=False)})
    how = {"earlier": earlier, "cache": overlaps, "console": console}
    text, plan, screening = choose_targets(settings, store, train, tokenizer, subject.trained_length, **how)
    if plan.note and console:
        console.warn(plan.note)
    ids = plan.target_ids(text)[screening.kept]
    unit_of, unit_names, unit_kind = text.units()
    seen = text.seen(train, *earlier)
    document = plan.truncated.target_documents()[screening.kept]
    result = EvaluationResult(
        settings=settings,
        subject=subject,
        plan=plan,
        facts={
            "corpus_hash": store.hash,
            "tokenizer_hash": tokenizer.hash,
            "documents_in_corpus": store.n_documents,
        },
        methods=methods,
        schemes=schemes,
        document=document,
        unit=unit_of[document],
        unit_kind=unit_kind,
        screening=screening,
        n_bytes=targets_bytes(ids, tokenizer.token_bytes) if spelled_out(text, document, tokenizer) else None,
        unigram=None if train is None else unigram_nll(train, ids, tokenizer.vocab_size),
        unit_names=unit_names,
        seen=None if seen is None else seen[document],
        absent=absent_cells(methods, plan.lengths, subject, settings.unreachable == "refuse"),
        notes=notes,
    )
    return EvaluationSession(result, text, CellStore(cells), console, ranks or EvaluationRanks())


def choose_targets(
    settings: EvaluationSettings, store, train, tokenizer, trained_length: int, **how
) -> tuple[EvaluationText, EvaluationPlan, Screening]:
    """The text, the targets, and what is excluded; `how`: as for `shared_text`.

    Raises EvaluationError if too little text remains.
    """
    shared = shared_text(settings.contamination, store, train, tokenizer, **how)
    text = EvaluationText(store, settings.bos, getattr(tokenizer, "bos_id", None), shared.rows)
    plan = make_plan(settings, text, store.hash, tokenizer.hash, trained_length)
    return text, plan, screen(shared, text, plan.truncated, plan.candidates)


def resolve_all(methods: list[Method], subject: EvaluatedModel) -> dict[str, dict]:
    """Position settings of every method; the error names all illegal methods at once."""
    schemes, refused = {}, []
    for method in methods:
        try:
            schemes[method.label] = subject.resolve(method.words)
        except ValueError as error:
            refused.append(f"method {method.label!r}: {error}")
    if refused:
        raise EvaluationError("\n       ".join(refused))
    return schemes


def _sinks(methods: list[Method], schemes: dict[str, dict], bos: str, subject: EvaluatedModel) -> list[str]:
    """A note for methods that keep the first tokens of windows, which start anywhere in a document.

    Raises EvaluationError if the model was trained with BOS there.
    """
    trained = subject.resolve(())
    with_sinks = [method.label for method in methods if new_sinks(schemes[method.label], trained)]
    if not with_sinks or bos == "every-window":
        return []
    names = ", ".join(with_sinks)
    if subject.bos_first:
        raise EvaluationError(
            f"{names}: the first tokens of a window are kept as sinks. {subject.bos_first}, but windows "
            "inside a document start with any token: set bos=every-window, or remove these methods"
        )
    return [
        f"Sinks ({names}) are the first tokens of a window, here arbitrary tokens, as at the start of a "
        "training window; bos=every-window puts BOS first."
    ]


def absent_cells(
    methods: list[Method], lengths: list[int], subject: EvaluatedModel, refuse: bool
) -> dict[tuple[str, int], str]:
    """The cells beyond the reach of a method's positions, and why.

    Raises EvaluationError if no cell remains at a length, with `refuse`.
    """
    limits = {method.label: subject.longest(method.words) for method in methods if not method.truncates}
    absent = {
        (label, length): f"its positions end after {limit} tokens"
        for label, limit in limits.items()
        for length in lengths
        if limit is not None and length > limit
    }
    for length in lengths if refuse else ():
        if all((label, length) in absent for label in limits):
            raise EvaluationError(
                f"length {length} is beyond the reach of {', '.join(limits)}: at most "
                f"{max(limit or 0 for limit in limits.values())} tokens; shorten lengths, or add a method "
                f"with a longer reach (--matrix tries all). {subject.legal}".rstrip()
            )
    return absent
