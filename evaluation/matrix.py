"""One checkpoint under every rule at every length: the cells, in one call, none of them computed twice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evaluation.baselines import unigram_nll
from evaluation.cells import Cells
from evaluation.contamination import Screening, screen
from evaluation.errors import EvaluationError
from evaluation.plan import Plan, make_plan, spelled_out, targets_bytes
from evaluation.ranks import Ranks
from evaluation.rules import Rule, new_sinks
from evaluation.session import Session
from evaluation.settings import EvaluationSettings
from evaluation.text import Text
from model import Transformer


@dataclass(frozen=True)
class Subject:
    """The checkpoint under evaluation. `resolve(words)` -> position settings as evaluated (raises where
    illegal); `load(words, dtype)` -> the model in eval mode on the evaluation's device; `longest(words)` ->
    the longest input it can place (None: no end); `legal`: what may change after training, in words."""

    name: str
    checkpoint_hash: str
    step: int
    trained_length: int
    original_length: int
    resolve: Callable[[Sequence[str]], dict]
    load: Callable[[Sequence[str], str], Transformer]
    longest: Callable[[Sequence[str]], int | None] = lambda words: None
    legal: str = ""
    bos_first: str = ""  # why BOS is what this model knows as a text's first token, '' where it is not


@dataclass
class Result:
    """Everything measured. `nll[rule, length]` is per-target, in the order of `document` (n,): the plan's
    targets in their order, without those that `screening` drops."""

    settings: EvaluationSettings
    subject: Subject
    plan: Plan
    facts: dict
    rules: list[Rule]
    schemes: dict[str, dict]  # label -> position settings as evaluated
    document: np.ndarray
    unit: np.ndarray
    unit_kind: str
    screening: Screening
    n_bytes: int | None
    unigram: np.ndarray | None
    unit_names: list[str] = field(default_factory=list)  # of the ids in `unit`
    seen: np.ndarray | None = None  # per target: its cluster is in the training text too; None: not known
    nll: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    truncated: np.ndarray | None = None  # context cut to L0: the baseline of every net gain
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    absent: dict[tuple[str, int], str] = field(default_factory=dict)  # cells that cannot exist, and why
    notes: list[str] = field(default_factory=list)  # what a reader must know of the rules
    left_out: dict[str, str] = field(default_factory=dict)  # built-in rules that do not apply, and why
    precision: dict[tuple[str, int], float] = field(default_factory=dict)  # mean bfloat16 - float32, nats
    files: dict[str, str] = field(default_factory=dict)  # "rule@length" -> file of per-target NLL


def evaluate(
    settings: EvaluationSettings,
    subject: Subject,
    *,
    store,
    train,
    tokenizer,
    rules: list[Rule],
    cells: Path,
    earlier: Sequence = (),
    overlaps: Path | None = None,
    console=None,
    ranks: Ranks | None = None,
) -> Result:
    """Measure every cell that is not on disk yet. Raises EvaluationError before any compute where it cannot
    work.

    `store` is read; `train` (or None) is the text it was trained on: the unigram baseline, and what targets
    are dropped for, as for the text of `earlier` trainings; `overlaps`: folder in which passages found in
    both are kept. Interrupting keeps every finished cell, and of the one in progress what was done. With
    several `ranks` all must call; each measures its share and all return the same.
    """
    schemes = resolve_all(rules, subject)
    notes = _sinks(rules, schemes, settings.bos, subject)
    text = Text(store, settings.bos, getattr(tokenizer, "bos_id", None))
    plan = make_plan(settings, text, store.hash, tokenizer.hash, subject.trained_length)
    if plan.note and console:
        console.warn(plan.note)
    how = {"earlier": earlier, "cache": overlaps, "console": console}
    screening = screen(settings.contamination, text, plan.truncated, train, tokenizer, **how)
    ids = plan.target_ids(text)[screening.kept]
    unit_of, unit_names, unit_kind = text.units()
    seen = text.seen(train, *earlier)
    document = plan.truncated.target_documents()[screening.kept]
    result = Result(
        settings=settings,
        subject=subject,
        plan=plan,
        facts={
            "corpus_hash": store.hash,
            "tokenizer_hash": tokenizer.hash,
            "documents_in_corpus": store.n_documents,
        },
        rules=rules,
        schemes=schemes,
        document=document,
        unit=unit_of[document],
        unit_kind=unit_kind,
        screening=screening,
        n_bytes=targets_bytes(ids, tokenizer.token_bytes) if spelled_out(text, document, tokenizer) else None,
        unigram=None if train is None else unigram_nll(train, ids, tokenizer.vocab_size),
        unit_names=unit_names,
        seen=None if seen is None else seen[document],
        absent=absent_cells(rules, plan.lengths, subject, settings.unreachable == "refuse"),
        notes=notes,
    )
    Session(result, text, Cells(cells), console, ranks or Ranks()).run()
    return result


def resolve_all(rules: list[Rule], subject: Subject) -> dict[str, dict]:
    """Position settings of every rule; all that are refused are named at once."""
    schemes, refused = {}, []
    for rule in rules:
        try:
            schemes[rule.label] = subject.resolve(rule.words)
        except ValueError as error:
            refused.append(f"rule {rule.label!r}: {error}")
    if refused:
        raise EvaluationError("\n       ".join(refused))
    return schemes


def _sinks(rules: list[Rule], schemes: dict[str, dict], bos: str, subject: Subject) -> list[str]:
    """A note where rules keep the first tokens of windows that begin anywhere in a text.

    Raises EvaluationError where the model was trained to find BOS there.
    """
    trained = subject.resolve(())
    with_sinks = [rule.label for rule in rules if new_sinks(schemes[rule.label], trained)]
    if not with_sinks or bos == "every-window":
        return []
    names = ", ".join(with_sinks)
    if subject.bos_first:
        raise EvaluationError(
            f"{names}: the first tokens of a window are kept as sinks. {subject.bos_first}, and windows cut "
            "out of a document begin with any token: set bos=every-window, or leave out what keeps sinks"
        )
    return [
        f"Sinks ({names}) are the first tokens of a window, here any tokens of running text, as at the "
        "beginning of a training window; bos=every-window puts BOS first."
    ]


def absent_cells(
    rules: list[Rule], lengths: list[int], subject: Subject, refuse: bool
) -> dict[tuple[str, int], str]:
    """The cells that cannot exist because positions end, and why.

    Raises EvaluationError where that leaves a length without any, if `refuse`.
    """
    limits = {rule.label: subject.longest(rule.words) for rule in rules if not rule.truncates}
    absent = {
        (label, length): f"its positions end after {limit} tokens"
        for label, limit in limits.items()
        for length in lengths
        if limit is not None and length > limit
    }
    for length in lengths if refuse else ():
        if all((label, length) in absent for label in limits):
            raise EvaluationError(
                f"length {length} is beyond what {', '.join(limits)} can place: at most "
                f"{max(limit or 0 for limit in limits.values())} tokens; shorten lengths, or add a rule that "
                f"reaches further (--matrix tries all). {subject.legal}".rstrip()
            )
    return absent
