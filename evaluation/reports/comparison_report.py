"""Report of several runs on the same targets: losses and paired differences from the first run."""

from collections.abc import Sequence

import numpy as np

from errors import EvaluationError
from evaluation.reports.evaluation_report import EvaluationReport, caveats
from evaluation.reports.figures import FigureText
from evaluation.reports.loss_report import (
    LossResults,
    bars_note,
    details,
    differences,
    loss_figure,
    overview,
    styles,
    warning,
)
from evaluation.reports.text import listed
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, Method
from evaluation.statistics.analysis import add_levels
from evaluation.statistics.intervals import interval_over_units
from evaluation.statistics.verdicts import is_undertrained

Entries = dict[str, tuple[EvaluationResult, Method]]  # run, or run and method, by label


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
    for run, other in runs.items():
        if other.plan.hash != first.plan.hash or not np.array_equal(other.document, first.document):
            raise EvaluationError(
                f"{run} and {names[0]} have different targets; evaluate both with equal settings"
            )
    entries = {
        run if method.label == TRAINED else f"{run}, {method.label}": (result, method)
        for run, result in runs.items()
        for method in result.methods
    }
    record = {
        **facts,
        **first.facts,
        "protocol": first.plan.protocol,
        "trained_length": first.subject.trained_length,
        "dtype": first.settings.dtype,
        "targets_hash": first.plan.hash,
        "targets": len(first.document),
    }
    r = LossResults(
        title=f"{len(runs)} runs",
        variants={
            label: {"run": result.subject.name, "method": method.label}
            for label, (result, method) in entries.items()
        },
        noun="run",
        facts=record,
        lengths=first.plan.lengths,
        unit_kind=first.unit_kind,
        units=len(np.unique(first.unit)),
        tolerance=first.settings.tolerance,
        confidence=first.settings.confidence,
        undertrained=[label for label, (run, _) in entries.items() if _is_undertrained(run)],
        baseline=names[0],
        per="token" if first.plan.span_bytes is None else "byte",
        also_trained=[run.subject.trained_length for run in results],
    )
    _add_losses(r, entries)
    record["family"] = r.difference_family
    record["runs"] = [
        {
            "run": run.subject.name,
            "step": run.subject.step,
            "checkpoint_hash": run.subject.checkpoint_hash,
            "train_length": run.subject.trained_length,
        }
        for run in results
    ]
    over = f"{100 * r.confidence:g}% intervals over {r.unit_kind}s, simultaneous over all"
    text = FigureText(
        "Loss of several runs by context length",
        f"The same {r.sample} at every length ({first.plan.protocol})",
        bars_note(r.table.select("difference"), f"{over} {r.difference_family}"),
    )
    *sentences, verdict = details(r) or [f"{r.against}: point estimates only."]
    return EvaluationReport(
        name=name,
        title=f"Loss of {listed(list(names))}",
        results=r,
        verdict=warning(r) + verdict,
        details=[
            *sentences,
            *(
                f"{run}: {each.subject.name}, step {each.subject.step}, trained at "
                f"{each.subject.trained_length:,}."
                for run, each in runs.items()
            ),
            "Differences describe these checkpoints, not a training method.",
            first.screening.sentence,
        ],
        caveats=caveats(r.units, r.unit_kind, runs),
        tables=[overview(r), differences(r)],
        draw=lambda: {"nll_by_length": loss_figure(r, text, styles(r))},
        more_records={"targets.json": first.plan.record},
    )


def _is_undertrained(result: EvaluationResult) -> bool:
    if result.unigram is None or result.truncated is None:
        return False
    return is_undertrained(float(result.truncated.mean()), float(result.unigram.mean()))


def _add_losses(r: LossResults, entries: Entries) -> None:
    """The losses of each entry at each length, and their differences from the first entry."""
    first, method = next(iter(entries.values()))
    changes = {}
    for label, (result, own) in entries.items():
        add_levels(r.table, result, own.label, label)
        for length in r.lengths:
            base = first.nll.get((method.label, length))
            nll = result.nll.get((own.label, length))
            # truncation to the trained length changes nothing there: it is the same array
            if base is not None and nll is not None and nll is not base:
                changes[label, length] = nll - base
    r.difference_family = max(1, len(changes))
    for (label, length), change in changes.items():
        difference = interval_over_units(
            change, first.unit, alpha=1 - r.confidence, family=r.difference_family
        )
        r.table.add(label, "difference", difference, length)
