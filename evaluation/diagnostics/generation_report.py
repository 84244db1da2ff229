"""Report of `protocol: generation`.

results.json, in addition to `protocol`, `trained_length`, `checkpoint_hash` and the like:

    cells     flat: method, source, start, stop, measure, value, low, high, rows. source: `greedy`,
              `temperature T` or `real text` (the same documents' own continuation); start and stop: positions
              of the bucket, stop excluded; rows: continuations that reach it; low and high: the interval over
              units (documents or clusters), null with fewer than 6. The measures are in `measures`.
    samples   method, source, text: what the first prompt was continued with.
    absent    method, reason: methods that end before the full length.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from evaluation.diagnostics.figures import measures_figure, titled
from evaluation.diagnostics.generation import REAL, GenerationResult
from evaluation.diagnostics.repetition import MEASURES
from evaluation.reports.base import Report, Table, dtype_note, over_units
from evaluation.reports.figures import COLOURS, DASHED, INK, MARKERS, Curve, FigureText, Panel, save
from evaluation.reports.sentences import sentences
from evaluation.scoring.methods import TRAINED

DRAWN = {
    "repeated_4": "4-grams repeated",
    "distinct_1": "distinct tokens of a bucket",
    "longest_run": "longest repeated stretch, tokens",
    "nll": "NLL of the text, nats",
}
SHARES = {"repeated_4", "distinct_1"}


class GenerationReport(Report):
    def __init__(self, result: GenerationResult, name: str = "generation"):
        self.result = result
        self.name = name

    def rows(self) -> list[dict]:
        """One record for each method, source, bucket and measure."""
        rows = []
        found = self.result
        buckets = list(enumerate(pairwise(found.edges)))
        for (method, source), values in found.values.items():
            for measure, value in values.items():  # (P, buckets)
                for n, (start, stop) in buckets:
                    where = {"method": method, "source": source, "start": start, "stop": stop}
                    count = int(np.isfinite(value[:, n]).sum())
                    rows.append(
                        {
                            **where,
                            "measure": measure,
                            **over_units(found, value[:, n]),
                            "rows": count,
                        }
                    )
        return [row for row in rows if row["rows"]]

    def document(self) -> dict:
        return {
            "kind": "generation",
            **self.result.basis(),
            "targets_hash": self.result.targets_hash,
            "prompts": len(self.result.unit),
            "edges": self.result.edges,
            "measures": MEASURES,
            "cells": self.rows(),
            "samples": [
                {"method": r, "source": s, "text": text}
                for (r, s), text in self.result.text.items()
            ],
            "absent": [
                {"method": method, "reason": reason}
                for method, reason in self.result.shorter.items()
            ],
        }

    def by_place(self) -> dict[tuple[str, str, str], list[tuple[int, int, float]]]:
        """(method, source, measure) -> (start, stop, value) of its buckets."""
        out: dict[tuple[str, str, str], list[tuple[int, int, float]]] = {}
        for row in self.rows():
            key = row["method"], row["source"], row["measure"]
            out.setdefault(key, []).append((row["start"], row["stop"], row["value"]))
        return out

    def summary(self) -> list[str]:
        return sentences("generation", found=self.result, at=self.by_place())

    def tables(self) -> list[Table]:
        at = self.by_place()
        rows = []
        found = self.result
        for method, source in found.values:
            for n, (start, stop, _) in enumerate(at[method, source, "nll"]):
                shown = [
                    format(at[method, source, measure][n][2], ".1%" if measure in SHARES else ".2f")
                    for measure in DRAWN
                ]
                rows.append([method, source, f"{start:,}–{stop:,}", *shown])
        title = "text by position" + dtype_note(found.settings)
        return [(title, ["method", "source", "positions", *DRAWN.values()], rows)]

    def draw(self, folder: Path) -> list[Path]:
        """One figure for each method."""
        drawn = []
        found = self.result
        for method in found.methods:
            if any(label == method.label for label, _ in found.values):
                name = "" if method.label == TRAINED else f"-{method.label}"
                drawn.append(save(self.figure(method.label), folder, f"generation{name}"))
        return drawn

    def figure(self, method: str) -> Figure:
        at = self.by_place()
        panels = []
        found = self.result
        l0 = found.subject.trained_length
        width = found.edges[1] - found.edges[0]
        for measure, heading in DRAWN.items():
            curves = []
            for n, source in enumerate(found.sources):
                points = at.get((method, source, measure), [])
                style: dict[str, Any] = {
                    "color": COLOURS[n % len(COLOURS)],
                    "marker": MARKERS[n % len(MARKERS)],
                }
                style = {"color": INK, "dash": DASHED, "order": 2} if source == REAL else style
                x = [(a + b) / 2 for a, b, _ in points]
                y = [value for *_, value in points]
                curves.append(Curve(source, x, y, **style))
            panels.append(Panel(curves, heading))
        return measures_figure(
            panels,
            FigureText(
                titled("Generation past the trained length", method),
                f"{found.subject.name}: {len(found.unit)} prompts of {found.edges[0]:,} tokens"
                f"{dtype_note(found.settings)}",
                f"Buckets of {width:,} tokens; repetitions are counted within the previous {width:,} tokens.",
            ),
            x="position, tokens",
            trained=l0,
            ticks=[l0 * n for n in range(1, 1 + found.edges[-1] // l0)],
            shares={DRAWN[measure] for measure in SHARES},
            log_x=False,
        )
