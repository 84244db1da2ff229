"""Report of several runs on the same targets: losses and paired differences from the first run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.figure import Figure

from errors import EvaluationError
from evaluation.reports.charts import Curve, FigureText
from evaluation.reports.document import ReportTable
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.loss_report import difference_curve, interval_note, loss_by_length
from evaluation.reports.results_table import finite
from evaluation.reports.sentences import caveats, sentences
from evaluation.reports.text import dtype_note, estimate
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
        self.runs = dict(zip(names, results, strict=True))
        self.entries = entries_of(names, results)
        self.first = self.entries[0]
        self.lengths = results[0].plan.lengths
        self.against = f"difference from {self.first.label}"
        self.sign = "better"
        if minuend == "first":
            self.against = f"{self.first.label} − this"
            self.sign = f"{self.first.label} is better"
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

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for each in self.runs.values() for note in each.notes))

    @property
    def precision(self) -> dict[tuple, float]:
        """By (run, method, length): mean bfloat16 − float32 in nats."""
        return {
            (name, *cell): difference
            for name, result in self.runs.items()
            for cell, difference in result.precision.items()
        }

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

    def table(self) -> ReportTable:
        columns = ["run", "length", "NLL", "perplexity", "bits per byte", self.against]
        formats = {"nll": ".3f", "perplexity": ".2f", "bits_per_byte": ".3f"}
        rows = []
        for entry in self.entries:
            for length in self.lengths:
                cell = self._row(entry, length)
                numbers = [
                    "—" if cell[key] is None else format(cell[key], spec)
                    for key, spec in formats.items()
                ]
                difference = self.differences.get((entry, length))
                last = cell["failure"] if difference is None else estimate(difference)
                rows.append([entry.label, f"{length:,}", *numbers, last])
        dtype = self.first.result.settings.dtype
        return ReportTable(
            f"{len(self.runs)} runs{dtype_note(dtype)}",
            columns,
            rows,
        )

    def figure(self) -> Figure:
        """NLL by length, a line for each entry, above the paired differences from the first."""
        curves = []
        differences = []
        for entry in self.entries:
            lengths = [length for length in self.lengths if entry.nll(length) is not None]
            between = [self.differences.get((entry, length)) for length in lengths]
            y = [pooled(entry.result.nll[entry.method, length]) for length in lengths]
            if lengths:
                curves.append(Curve(entry.label, lengths, y))
                differences.append(difference_curve(entry.label, lengths, between))
        result = self.first.result
        settings = result.settings
        text = FigureText(
            "Loss of several runs by context length",
            f"The same {len(result.document):,} targets at every length "
            f"({result.plan.protocol}{dtype_note(settings.dtype)})",
            interval_note(result, differences, len(self.differences)),
        )
        trained = {result.subject.trained_length for result in self.runs.values()}
        return loss_by_length(
            curves,
            None,
            sorted(trained),
            text,
            differences=differences,
            against=f"{self.against}, nats",
            tolerance=settings.tolerance,
        )


def comparison_report(
    comparison: RunComparison,
    name: str,
    facts: dict,
) -> EvaluationReport:
    """`facts` (corpus, command, date) go to results.json."""
    result = comparison.first.result
    rows = comparison.rows()
    longest = max((length for _, length in comparison.differences), default=0)
    last = {entry: each for (entry, n), each in comparison.differences.items() if n == longest}
    return EvaluationReport(
        name=name,
        title=f"Loss of {', '.join(comparison.runs)}",
        rows=rows,
        record={
            **facts,
            **result.facts,
            "targets_hash": result.plan.hash,
            "targets": len(result.document),
            "cells": rows,
        },
        summary=sentences("comparison", c=comparison, result=result, longest=longest, last=last),
        caveats=caveats(
            result.settings,
            len(np.unique(result.unit)),
            result.unit_kind,
            {},  # the table has the reasons
            unchecked=result.screening.unchecked,
            precision=comparison.precision,
            notes=comparison.notes,
        ),
        tables=[comparison.table()],
        figures={"nll_by_length": comparison.figure()},
    )
