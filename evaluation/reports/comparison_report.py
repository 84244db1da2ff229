"""Report of several runs on the same targets: losses and paired differences from the first run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
from evaluation.reports.results_table import finite
from evaluation.reports.text import listed
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED
from evaluation.statistics.intervals import Interval, interval, unit_means
from evaluation.statistics.verdicts import bits_per_byte, perplexity, pooled


@dataclass(frozen=True, eq=False)
class Entry:
    """One run under one method."""

    label: str
    result: EvaluationResult
    method: str

    def nll(self, length: int) -> np.ndarray | None:
        return self.result.nll.get((self.method, length))


def is_undertrained(result: EvaluationResult) -> bool:
    if result.unigram is None or result.truncated is None:
        return False
    return pooled(result.truncated) > pooled(result.unigram) - UNDERTRAINED


def entries_of(names: Sequence[str], results: Sequence[EvaluationResult]) -> list[Entry]:
    """Every run under each of its methods, in order; the first entry is the reference.

    Raises EvaluationError if two runs were not scored on the same targets.
    """
    first = results[0]
    for name, other in zip(names, results, strict=True):
        if other.plan.hash != first.plan.hash or not np.array_equal(other.document, first.document):
            raise EvaluationError(
                f"{name} and {names[0]} have different targets; evaluate both with equal settings"
            )
    return [
        Entry(name if method.label == TRAINED else f"{name}, {method.label}", result, method.label)
        for name, result in zip(names, results, strict=True)
        for method in result.methods
    ]


class RunComparison:
    """Entries and their differences from the first one, paired by target, in nats.

    Intervals are over units and simultaneous over all differences.

    Attributes:
        minuend: whose losses the subtrahends are taken from: of the others, or of the first.
        differences: by (entry, length), of the cells that both have.
    """

    def __init__(
        self,
        names: Sequence[str],
        results: Sequence[EvaluationResult],
        minuend: Literal["others", "first"] = "others",
    ):
        self.minuend = minuend
        self.runs = dict(zip(names, results, strict=True))
        self.entries = entries_of(names, results)
        self.first = self.entries[0]
        self.lengths = results[0].plan.lengths
        changes = {}
        for entry in self.entries[1:]:
            for length in self.lengths:
                own = entry.nll(length)
                reference = self.first.nll(length)
                # truncation to the trained length changes nothing there: it is the same array
                if own is not None and reference is not None and own is not reference:
                    change = own - reference if minuend == "others" else reference - own
                    changes[entry, length] = change
        self.differences: dict[tuple[Entry, int], Interval] = {}
        settings = results[0].settings
        for (entry, length), change in changes.items():
            self.differences[entry, length] = interval(
                unit_means(change, self.first.result.unit),
                alpha=1 - settings.confidence,
                family=len(changes),
            )

    def rows(self) -> list[dict]:
        """One record for each entry and length."""
        return [self._row(entry, length) for entry in self.entries for length in self.lengths]

    def _row(self, entry: Entry, length: int) -> dict:
        result = entry.result
        nll = entry.nll(length)
        difference = self.differences.get((entry, length))
        cell = (entry.method, length)
        return {
            "run": result.subject.name,
            "method": entry.method,
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
        }

    def results(self) -> LossResults:
        """The long table; the first entry is the baseline."""
        result = self.first.result
        first = self.first.label
        against = f"NLL minus that of {first}"
        if self.minuend == "first":
            against = f"NLL of {first} minus that of this run"
        r = LossResults(
            title=f"{len(self.runs)} runs",
            names=[entry.label for entry in self.entries],
            noun="run",
            facts={
                **result.facts,
                "protocol": result.plan.protocol,
                "trained_length": result.subject.trained_length,
                "targets": len(result.document),
                "targets_hash": result.plan.hash,
                "dtype": result.settings.dtype,
            },
            lengths=self.lengths,
            unit_kind=result.unit_kind,
            units=len(np.unique(result.unit)),
            tolerance=result.settings.tolerance,
            confidence=result.settings.confidence,
            difference_family=max(1, len(self.differences)),
            baseline=first,
            primary=self.lengths,
            against=against,
            undertrained=[entry.label for entry in self.entries if is_undertrained(entry.result)],
            also_trained=[run.subject.trained_length for run in self.runs.values()],
        )
        for entry, row in zip(
            [entry for entry in self.entries for _ in self.lengths], self.rows(), strict=True
        ):
            for metric in ("nll", "perplexity", "bits_per_byte"):
                if row[metric] is not None:
                    r.table.add(entry.label, metric, row[metric], row["length"])
            if difference := self.differences.get((entry, row["length"])):
                r.table.add(entry.label, "difference", difference, row["length"])
            if row["failure"]:
                r.table.add(entry.label, "failure", math.nan, row["length"], note=row["failure"])
        return r


def comparison_report(
    comparison: RunComparison,
    name: str,
    facts: dict,
) -> EvaluationReport:
    """`facts` (corpus, command, date) go to results.json."""
    result = comparison.first.result
    r = comparison.results()
    rows = r.table.select("difference")
    intervals = f"{100 * r.confidence:g}% over {r.unit_kind}s, simultaneous over all"
    text = FigureText(
        "Loss of several runs by context length",
        f"The same {r.sample} at every length ({result.plan.protocol})",
        bars_note(rows, f"{intervals} {r.difference_family}"),
    )
    answers = details(r) or [f"{r.against}: point estimates only."]
    runs = [
        f"{name}: {each.subject.name}, step {each.subject.step}, trained at "
        f"{each.subject.trained_length:,}."
        for name, each in comparison.runs.items()
    ]
    return EvaluationReport(
        name=name,
        title=f"Loss of {listed(list(comparison.runs))}",
        results=r,
        variants={
            entry.label: {"run": entry.result.subject.name, "method": entry.method}
            for entry in comparison.entries
        },
        record={
            **facts,
            **result.facts,
            "targets_hash": result.plan.hash,
            "targets": len(result.document),
            "cells": comparison.rows(),
        },
        verdict=answers[-1],
        details=[
            *answers[:-1],
            *runs,
            "Differences describe these checkpoints, not a training method.",
            result.screening.sentence,
        ],
        caveats=caveats(
            result.settings,
            r.units,
            r.unit_kind,
            {(row.variant, row.length): row.note for row in r.table.select("failure")},
            unchecked=result.screening.unchecked,
            precision={
                (name, *cell): difference
                for name, each in comparison.runs.items()
                for cell, difference in each.precision.items()
            },
            notes=list(dict.fromkeys(n for run in comparison.runs.values() for n in run.notes)),
        ),
        tables=[overview(r), differences(r)],
        figures={"nll_by_length": loss_figure(r, text, styles(r))},
    )
