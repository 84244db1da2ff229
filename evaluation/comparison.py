"""Comparison of several runs on the same targets: losses and paired differences from the first run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from errors import EvaluationError
from evaluation.reports.base import Report, Table, dtype_note, estimate, finite
from evaluation.reports.figures import FigureText, save
from evaluation.reports.loss_figures import length_figure, loss_curve
from evaluation.reports.sentences import sentences
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
                f"{name} and {names[0]} have different targets; evaluate both with the same settings"
            )
    return [
        Entry(name if method.label == TRAINED else f"{name}, {method.label}", result, method.label)
        for name, result in zip(names, results, strict=True)
        for method in result.methods
    ]


def differences(
    minuend: Sequence[Entry], subtrahend: Sequence[Entry], lengths: Sequence[int]
) -> dict[tuple[int, int], Interval]:
    """NLL of `minuend[i]` − `subtrahend[i]` by (i, length), in nats: paired by target, with intervals over
    units that are simultaneous over all of them."""
    found = {
        (i, length): one - other
        for i, (a, b) in enumerate(zip(minuend, subtrahend, strict=True))
        for length in lengths
        if (one := a.nll(length)) is not None
        and (other := b.nll(length)) is not None
        and one is not other  # truncation to the trained length changes nothing there
    }
    intervals = {}
    for where, nll in found.items():
        result = minuend[where[0]].result
        alpha = 1 - result.settings.confidence
        how = {"family": len(found), "seed": result.settings.seed}
        means = unit_means(nll, result.unit)
        intervals[where] = interval(means, alpha=alpha, resamples=result.settings.resamples, **how)
    return intervals


class RunComparison(Report):
    """The first run is the reference: of every difference the subtrahend, or the minuend. `facts` go to
    results.json."""

    def __init__(
        self,
        names: Sequence[str],
        results: Sequence[EvaluationResult],
        name: str = "comparison",
        facts: dict | None = None,
        minuend: Literal["others", "first"] = "others",
    ):
        self.name = name
        self.facts = facts or {}
        self.results = results
        self.runs = dict(zip(names, results, strict=True))
        self.notes = list(dict.fromkeys(note for result in results for note in result.notes))
        self.precision = {
            (name, *cell): difference
            for name, result in self.runs.items()
            for cell, difference in result.precision.items()
        }
        self.entries = entries_of(names, results)
        self.first = self.entries[0]
        self.lengths = results[0].plan.lengths
        others = self.entries[1:]
        references = [self.first] * len(others)
        self.against = f"difference from {self.first.label}"
        self.sign = "better"
        sides = others, references
        if minuend == "first":
            self.against = f"{self.first.label} − this"
            self.sign = f"{self.first.label} is better"
            sides = references, others
        found = differences(*sides, self.lengths)
        self.differences = {(others[i], length): one for (i, length), one in found.items()}

    def rows(self) -> list[dict]:
        """One record for each entry and length."""
        rows = []
        for entry in self.entries:
            subject = entry.result.subject
            result = entry.result
            for length in self.lengths:
                nll = entry.nll(length)
                one = self.differences.get((entry, length))
                where = (entry.method, length)
                rows.append(
                    {
                        "run": subject.name,
                        "method": entry.method,
                        "step": subject.step,
                        "checkpoint_hash": subject.checkpoint_hash,
                        "train_length": subject.trained_length,
                        "length": length,
                        "nll": None if nll is None else pooled(nll),
                        "perplexity": None if nll is None else perplexity(nll),
                        "bits_per_byte": None
                        if nll is None
                        else bits_per_byte(nll, result.n_bytes),
                        "difference": one and one.estimate,
                        "low": one and finite(one.low),
                        "high": one and finite(one.high),
                        "units": one and one.units,
                        "family": one and one.family,
                        "failure": result.absent.get(where) or result.failed.get(where) or "",
                    }
                )
        return rows

    def document(self) -> dict:
        result = self.results[0]
        about = {
            "targets_hash": result.plan.hash,
            "targets": len(result.document),
            "cells": self.rows(),
        }
        return {**self.facts, **result.facts, **about}

    def summary(self) -> list[str]:
        return sentences("comparison", c=self, result=self.results[0])

    def tables(self) -> list[Table]:
        columns = ["run", "length", "NLL", "perplexity", "bits per byte"]
        formats = {"nll": ".3f", "perplexity": ".2f", "bits_per_byte": ".3f"}
        rows = []
        entries = [entry for entry in self.entries for _ in self.lengths]
        for entry, cell in zip(entries, self.rows(), strict=True):
            numbers = [
                "—" if cell[key] is None else format(cell[key], how) for key, how in formats.items()
            ]
            one = self.differences.get((entry, cell["length"]))
            tail = cell["failure"] if one is None else estimate(one)
            rows.append([entry.label, f"{cell['length']:,}", *numbers, tail])
        title = f"{len(self.results)} runs{dtype_note(self.results[0].settings)}"
        return [(title, [*columns, self.against], rows)]

    def draw(self, folder: Path) -> list[Path]:
        """NLL by length, a line for each entry; error bars are those of the paired differences."""
        curves = []
        for entry in self.entries:
            points = [(n, pooled(nll)) for n in self.lengths if (nll := entry.nll(n)) is not None]
            bars = [self.differences.get((entry, n)) for n, _ in points]
            x = [float(n) for n, _ in points]
            y = [nll for _, nll in points]
            curves += [loss_curve(entry.label, x, y, bars)] if points else []
        result, trained = (
            self.results[0],
            {result.subject.trained_length for result in self.results},
        )
        level = f"{100 * result.settings.confidence:g}%"
        text = FigureText(
            "Loss of several runs by context length",
            f"The same {len(result.document):,} targets at every length "
            f"({result.plan.protocol}{dtype_note(result.settings)})",
            f"Bars: {level} intervals over {result.unit_kind}s of the paired difference from "
            f"{self.first.label}.",
        )
        return [save(length_figure(curves, None, sorted(trained), text), folder, "nll_by_length")]
