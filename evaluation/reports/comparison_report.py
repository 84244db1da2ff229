"""Report of several runs on the same targets: losses and paired differences from the first run."""

import math
from collections.abc import Sequence

import numpy as np

from errors import EvaluationError
from evaluation.reports.caveats import caveats
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.figures import FigureText
from evaluation.reports.loss_report import (
    UNDERTRAINED,
    LossResults,
    bars_note,
    details,
    differences,
    loss_figure,
    overview,
    styles,
)
from evaluation.reports.results_files import finite
from evaluation.reports.text import listed
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, Method
from evaluation.statistics.intervals import Interval, interval, unit_means
from evaluation.statistics.verdicts import bits_per_byte, perplexity, pooled


def comparison_report(
    names: Sequence[str],
    results: Sequence[EvaluationResult],
    name: str,
    facts: dict,
) -> EvaluationReport:
    """Every run under each of its methods. Differences are paired by target; their intervals are
    over units and simultaneous over all differences.

    Args:
        names: of the runs.
        facts: (corpus, command, date) for results.json.

    Raises:
        EvaluationError: two runs were not scored on the same targets.
    """
    first = results[0]
    runs = dict(zip(names, results, strict=True))
    for other_name, other in runs.items():
        if other.plan.hash != first.plan.hash or not np.array_equal(other.document, first.document):
            raise EvaluationError(
                f"{other_name} and {names[0]} have different targets; evaluate both with equal "
                "settings"
            )
    entries = {
        run if method.label == TRAINED else f"{run}, {method.label}": (result, method)
        for run, result in runs.items()
        for method in result.methods
    }
    cells = _cells(entries, first)
    differing = [cell for cell in cells if cell["difference"] is not None]
    r = LossResults(
        title=f"{len(runs)} runs",
        names=list(entries),
        noun="run",
        facts={
            **first.facts,
            "protocol": first.plan.protocol,
            "trained_length": first.subject.trained_length,
            "targets": len(first.document),
            "targets_hash": first.plan.hash,
            "dtype": first.settings.dtype,
        },
        lengths=first.plan.lengths,
        unit_kind=first.unit_kind,
        units=len(np.unique(first.unit)),
        tolerance=first.settings.tolerance,
        confidence=first.settings.confidence,
        difference_family=max(1, len(differing)),
        undertrained=[label for label, (run, _) in entries.items() if _is_undertrained(run)],
        baseline=names[0],
        primary=first.plan.lengths,
        against=f"NLL minus that of {names[0]}",
        per="token" if first.plan.span_bytes is None else "byte",
        also_trained=[run.subject.trained_length for run in results],
    )
    for label, cell in zip([label for label in entries for _ in r.lengths], cells, strict=True):
        for metric in ("nll", "perplexity", "bits_per_byte"):
            if cell[metric] is not None:
                r.table.add(label, metric, cell[metric], cell["length"])
        if cell["interval"] is not None:
            r.table.add(label, "difference", cell["interval"], cell["length"])
        if cell["failure"]:
            r.table.add(label, "failure", math.nan, cell["length"], note=cell["failure"])
    intervals = f"{100 * r.confidence:g}% intervals over {r.unit_kind}s, simultaneous over all"
    text = FigureText(
        "Loss of several runs by context length",
        f"The same {r.sample} at every length ({first.plan.protocol})",
        bars_note(r.table.select("difference"), f"{intervals} {r.difference_family}"),
    )
    answers = details(r) or [f"{r.against}: point estimates only."]
    return EvaluationReport(
        name=name,
        title=f"Loss of {listed(list(names))}",
        results=r,
        variants={
            label: {"run": result.subject.name, "method": method.label}
            for label, (result, method) in entries.items()
        },
        record={
            **facts,
            **first.facts,
            "targets_hash": first.plan.hash,
            "targets": len(first.document),
            "cells": [{k: v for k, v in cell.items() if k != "interval"} for cell in cells],
        },
        verdict=answers[-1],
        details=[
            *answers[:-1],
            *(
                f"{run}: {each.subject.name}, step {each.subject.step}, trained at "
                f"{each.subject.trained_length:,}."
                for run, each in runs.items()
            ),
            "Differences describe these checkpoints, not a training method.",
            first.screening.sentence,
        ],
        caveats=caveats(
            first.settings,
            r.units,
            r.unit_kind,
            {(row.variant, row.length): row.note for row in r.table.select("failure")},
            unchecked=first.screening.unchecked,
            precision={
                (run, *cell): difference
                for run, each in runs.items()
                for cell, difference in each.precision.items()
            },
            notes=list(dict.fromkeys(note for each in results for note in each.notes)),
        ),
        tables=[overview(r), differences(r)],
        draw=lambda: {"nll_by_length": loss_figure(r, text, styles(r))},
        more_records={"targets.json": first.plan.record},
    )


def _is_undertrained(result: EvaluationResult) -> bool:
    if result.unigram is None or result.truncated is None:
        return False
    return pooled(result.truncated) > pooled(result.unigram) - UNDERTRAINED


def _cells(
    entries: dict[str, tuple[EvaluationResult, Method]], first: EvaluationResult
) -> list[dict]:
    """The numbers of each entry at each length, with the interval of its difference from the first
    entry."""
    losses = {
        (label, length): result.nll.get((method.label, length))
        for label, (result, method) in entries.items()
        for length in first.plan.lengths
    }
    reference = next(iter(entries))
    changes = {}
    for (label, length), nll in losses.items():
        base = losses[reference, length]
        # truncation to the trained length changes nothing there: it is the same array
        if nll is not None and base is not None and nll is not base:
            changes[label, length] = unit_means(nll - base, first.unit)
    alpha = 1 - first.settings.confidence
    cells = []
    for (label, length), nll in losses.items():
        result, method = entries[label]
        change = changes.get((label, length))
        difference: Interval | None = None
        if change is not None:
            difference = interval(change, alpha=alpha, family=len(changes))
        cell = (method.label, length)
        cells.append({
            "run": result.subject.name,
            "method": method.label,
            "step": result.subject.step,
            "checkpoint_hash": result.subject.checkpoint_hash,
            "train_length": result.subject.trained_length,
            "length": length,
            "nll": None if nll is None else pooled(nll),
            "perplexity": None if nll is None else perplexity(nll),
            "bits_per_byte": None if nll is None else bits_per_byte(nll, result.n_bytes),
            "difference": difference and difference.estimate,
            "low": difference and finite(difference.low),
            "high": difference and finite(difference.high),
            "units": difference and difference.units,
            "family": difference and difference.family,
            "failure": result.absent.get(cell) or result.failed.get(cell) or "",
            "interval": difference,
        })  # fmt: skip
    return cells
