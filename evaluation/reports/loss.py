"""Report of the loss of text: one row for each part of the units, method and length; every table is a view of
these rows."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.reports.base import (
    Report,
    Table,
    basis,
    dtype_note,
    ends_of,
    estimate,
    finite,
    provenance,
    write_clean_json,
)
from evaluation.reports.loss_figures import draw_figures
from evaluation.reports.sentences import sentences
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.statistics.analysis import Analysis, AnalysisRow
from evaluation.statistics.context_reach import ContextReach
from evaluation.statistics.intervals import Interval, unit_means
from evaluation.statistics.verdicts import MethodVerdicts

PARTS = {True: "in the training text", False: "not in the training text"}
MANY = 10**7  # units: a larger number is not useful advice
COUNTS = ("targets", "documents", "units")


class LossReport(Report):
    """`below` adds to each figure what belongs under its axes."""

    def __init__(
        self,
        result: EvaluationResult,
        analysis: Analysis,
        name: str = "loss",
        below: Callable[[Figure, Axes], object] | None = None,
    ):
        self.result = result
        self.analysis = analysis
        self.name = name
        self.below = below
        self.trained_length = result.subject.trained_length
        self.lengths = result.plan.lengths
        self.matrix = result.settings.matrix and not analysis.buckets
        kind = analysis.unit_kind
        units = analysis.units
        self.title = (
            f"{result.plan.protocol}: NLL in nats, {analysis.n_targets} targets, {units} {kind}s"
            f"{dtype_note(result.settings)}"
        )

    def rows(self) -> list[dict]:
        """`part`: `all` units, or only those `seen` (cluster in the training text) or `unseen`."""
        common = self.basis()
        rows = [{"part": "all", **self._cell(row), **common} for row in self.analysis.rows]
        for label, part in self._parts().items():
            counts = {key: part[key] for key in COUNTS}
            rows += [
                {"part": label, **cell, **_doubling(None), **common, **counts}
                for cell in part["cells"]
            ]
        return rows

    def basis(self) -> dict:
        """What every number of this evaluation depends on."""
        result = self.result
        analysis = self.analysis
        return {
            **basis(result),
            "targets": analysis.n_targets,
            "documents": analysis.documents,
            "units": analysis.units,
            "unit": analysis.unit_kind,
            "family": analysis.family,
            "tolerance": result.settings.tolerance,
            "bos": result.settings.bos,
            "corpus": result.facts.get("corpus", ""),
            "corpus_hash": result.facts["corpus_hash"],
            "tokenizer_hash": result.facts["tokenizer_hash"],
            "targets_hash": result.plan.hash,
        }

    def document(self) -> dict:
        result = self.result
        analysis = self.analysis
        return {
            **self.basis(),
            **provenance(result),
            "lengths": self.lengths,
            "left_out": result.left_out,
            "contamination": result.screening.record,
            "units": self._units(),
            "unigram_nll": analysis.unigram,
            "unigram_unit_nll": self._by_unit(result.unigram),
            "truncated_unit_nll": self._by_unit(result.truncated),
            "cells": [
                self._cell(row)
                | {"unit_nll": self._by_unit(result.nll.get((row.method, row.length)))}
                for row in analysis.rows
            ],
            "derived": [
                {"method": v.method, "held_to": v.held_to, "break_point": v.break_point}
                for v in analysis.verdicts
            ],
            "context_reach": [_reach(one) for one in analysis.reaches],
            "parts": self._parts(),
            "by_position": {
                method: [asdict(b) for b in found] for method, found in analysis.buckets.items()
            },
            "per_target_nll": result.files,
        }

    def write(self, folder: Path) -> list[Path]:
        """Also writes targets.json."""
        write_clean_json(folder / "targets.json", self.result.plan.record)
        return super().write(folder)

    def draw(self, folder: Path) -> list[Path]:
        return draw_figures(self.result, self.analysis, folder, self.below)

    def summary(self, brief: bool = False) -> list[str]:
        """Which method held to which length, by how much, and with what confidence; `brief`: one sentence for
        all methods."""
        analysis = self.analysis
        failures = {}
        for row in analysis.rows:
            if row.failure:
                failures.setdefault((row.method, row.failure), []).append(row.length)
        wide = [(v, m.method) for m in analysis.verdicts for v in m.verdicts if v.units_needed]
        return sentences(
            "loss",
            result=self.result,
            a=analysis,
            rows={(row.method, row.length): row for row in analysis.rows},
            brief=brief,
            failures=failures,
            wide=sorted(wide, key=lambda one: -one[0].delta.half),
            parts=PARTS,
            many=MANY,
        )

    def headlines(self) -> list[str]:
        return self.summary(brief=self.matrix)

    def tables(self) -> list[Table]:
        if self.matrix:
            return [self.grid()]
        tables = [self.by_position() if self.analysis.buckets else self.by_length()]
        return [*tables, self.by_part()] if self.analysis.parts else tables

    def by_length(self) -> Table:
        """NLL by method and length, with the verdict and the net gain at every length past L0."""
        l0 = self.trained_length
        difference = f"difference from {l0}, as trained"
        columns = ["method", "length", "NLL", "perplexity", difference, "verdict", "net gain"]
        rows = [
            _table_row(row, l0)
            for row in self.analysis.rows
            if row.method != TRUNCATE or row.length == l0
        ]
        return self.title, columns, rows

    def by_position(self) -> Table:
        columns = ["method", "positions", "targets", "NLL", "gain over truncation"]
        rows = [
            [
                method,
                f"{b.low}-{b.high - 1}" if b.high - b.low > 1 else str(b.low),
                str(b.count),
                f"{b.nll:.3f}",
                estimate(b.gain),
            ]
            for method, buckets in self.analysis.buckets.items()
            for b in buckets
        ]
        return f"NLL by position, factor for {self.lengths[-1]}", columns, rows

    def by_part(self) -> Table:
        """The cells once over the units in the training text, and once over the others."""
        l0 = self.trained_length
        parts = self.analysis.parts
        columns = ["method", "length"]
        rows = {}
        for part in parts:
            columns += [f"NLL: {part.units} {PARTS[part.seen]}", f"difference from {l0}"]
            for row in part.rows:
                if row.method != TRUNCATE or row.length == l0:
                    delta = estimate(row.delta) if row.delta else ""
                    rows.setdefault((row.method, row.length), []).extend([f"{row.nll:.4f}", delta])
        lines = [
            [method, "all" if method == TRUNCATE else str(length), *cells]
            for (method, length), cells in rows.items()
        ]
        return (
            f"{self.analysis.unit_kind}s, by whether the training text contains them",
            columns,
            lines,
        )

    def grid(self) -> Table:
        """A row for each method, a column for each length; the verdict, and the gain over truncation.

        As trained and truncated come first, then the methods by their NLL at the longest length.
        """
        verdicts = {v.method: v for v in self.analysis.verdicts}
        cells = {(row.method, row.length): row for row in self.analysis.rows}
        longest = self.lengths[-1]
        columns = ["method", *(f"{n:,}" for n in self.lengths), "verdict", f"gain at {longest:,}"]
        rows = []
        for label in self._order(cells):
            found = [cells.get((label, length)) for length in self.lengths]
            last = found[-1]
            gain = estimate(last.gain) if last and last.gain and len(self.lengths) > 1 else ""
            tail = (
                ["flat by construction", ""]
                if label == TRUNCATE
                else [_verdict(verdicts.get(label)), gain]
            )
            rows.append([label, *map(_nll, found), *tail])
        return self.title, columns, rows

    def footnotes(self, verbose: bool = False) -> list[str]:
        """The meaning of the grid's signs, the cells that cannot exist, and the methods that do not apply."""
        result = self.result
        if not result.settings.matrix:
            return []
        absent: dict[str, dict[str, list[int]]] = {}
        for (method, length), reason in result.absent.items():
            absent.setdefault(reason, {}).setdefault(method, []).append(length)
        reasons = [f"  {label}: {reason}" for label, reason in result.left_out.items() if verbose]
        return sentences("matrix", result=result, absent=absent, verbose=verbose) + reasons

    def _parts(self) -> dict[str, dict]:
        return {
            "seen" if part.seen else "unseen": {
                "targets": part.n_targets,
                "documents": part.documents,
                "units": part.units,
                "cells": [_flat(row) for row in part.rows],
            }
            for part in self.analysis.parts
        }

    def _cell(self, row: AnalysisRow) -> dict:
        """A row with the gain of the last doubling before its length."""
        found = [
            one.gain
            for reach in self.analysis.reaches
            for one in reach.doublings
            if (reach.method, one.longer) == (row.method, row.length)
        ]
        return _flat(row) | _doubling(found[0] if found else None)

    def _units(self) -> dict:
        """Names of the units, targets of each, and whether their cluster is also in the training text."""
        result = self.result
        ids, first, counts = np.unique(result.unit, return_index=True, return_counts=True)
        names = [result.unit_names[i] for i in ids] if result.unit_names else [str(i) for i in ids]
        seen = None if result.seen is None else result.seen[first].tolist()
        return {"kind": result.unit_kind, "names": names, "targets": counts.tolist(), "seen": seen}

    def _by_unit(self, nll: np.ndarray | None) -> list[float] | None:
        """Mean NLL of each unit in the order of `units`."""
        return None if nll is None else unit_means(nll, self.result.unit).tolist()

    def _order(self, cells: dict[tuple[str, int], AnalysisRow]) -> list[str]:
        labels = [method.label for method in self.result.methods]
        first = [label for label in labels if label in (TRAINED, TRUNCATE)]

        def last_nll(label: str) -> tuple[float, ...]:
            found = [cells.get((label, length)) for length in reversed(self.lengths)]
            return tuple(math.inf if row is None or row.nll is None else row.nll for row in found)

        return first + sorted((label for label in labels if label not in first), key=last_nll)


def _doubling(gain: Interval | None) -> dict:
    name = "gain_per_doubling"
    return {name: gain.estimate if gain else None, **ends_of(name, gain)}


def _reach(found: ContextReach) -> dict:
    gains = [
        {
            "from": one.shorter,
            "to": one.longer,
            "gain": one.gain.estimate,
            "low": one.gain.low,
            "high": one.gain.high,
        }
        for one in found.doublings
    ]
    about = {"method": found.method, "reach": found.reach, "longest": found.longest}
    return {**about, "gain_per_doubling": gains}


def _flat(row: AnalysisRow) -> dict:
    verdict = row.verdict
    shown = ("method", "scheme", "length", "nll", "perplexity", "bits_per_byte")
    out = {key: getattr(row, key) for key in shown} | ends_of("nll", row.level)
    for name, one in (("delta", row.delta), ("gain", row.gain)):
        out |= {name: one.estimate if one else None, **ends_of(name, one)}
    for end in ("", "_low", "_high"):
        value = out[f"delta{end}"]
        out[f"perplexity_ratio{end}"] = None if value is None else math.exp(min(value, 700.0))
    return out | {
        "delta_upper_one_sided": finite(verdict.upper) if verdict else None,
        "verdict": verdict.word if verdict else None,
        "units_needed": verdict.units_needed if verdict else None,
        "spans_needed": verdict.spans_needed if verdict else None,
        "bfloat16_minus_float32": row.precision,
        "failure": row.failure or None,
        "exists": row.exists,
    }


def _table_row(row: AnalysisRow, l0: int) -> list[str]:
    if row.nll is None:
        return [
            row.method,
            str(row.length),
            "failed" if row.exists else "—",
            "",
            "",
            row.failure,
            "",
        ]
    numbers = [f"{row.nll:.4f}", f"{row.perplexity:.2f}"]
    if row.method == TRUNCATE:
        return [row.method, "all", *numbers, "", "flat by construction", ""]
    delta = estimate(row.delta) if row.delta else ""
    gain = estimate(row.gain) if row.gain and row.length > l0 else ""
    return [
        row.method,
        str(row.length),
        *numbers,
        delta,
        row.verdict.word if row.verdict else "",
        gain,
    ]


def _nll(row: AnalysisRow | None) -> str:
    if row is None or not row.exists:
        return "—"
    return "failed" if row.nll is None else f"{row.nll:.3f}"


def _verdict(method: MethodVerdicts | None) -> str:
    if method is None or not method.verdicts:
        return ""
    if method.verdicts[-1].word == "points only":
        return "points only"
    words = [f"held to {method.held_to:,}"] if method.held_to else []
    words += [f"broken at {method.break_point:,}"] if method.break_point else []
    return ", ".join(words) or "inconclusive"
