"""What `protocol: generation` leaves behind: words, a table, CSV, JSON and figures.

results.json, beside what the numbers rest on (`protocol`, `trained_length`, `checkpoint_hash`, ...):

    cells     flat: rule, source, start, stop, measure, value, low, high, rows. source: `greedy`,
              `temperature T` or `real text` (the same documents' own continuation); start and stop: positions
              of the bucket, stop excluded; rows: continuations that reach it; low and high: the interval over
              units (documents or clusters), null with fewer than 6. The measures are in `measures`.
    samples   rule, source, text: what the first prompt was continued with.
    absent    rule, reason: rules that end before the full length.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from data.files import write_json, write_text
from evaluation.diagnostics.attention_report import basis, rounded, write_table
from evaluation.diagnostics.generation import REAL, Generated
from evaluation.diagnostics.panels import Panel, Series, panels_figure
from evaluation.diagnostics.repetition import MEASURES
from evaluation.figures import COLOURS, INK, save
from evaluation.position_figures import Words
from evaluation.rules import TRAINED
from evaluation.statistics import interval, unit_means

COLUMNS = ("rule", "source", "start", "stop", "measure", "value", "low", "high", "rows")
DRAWN = {
    "repeated_4": "4-grams repeated",
    "distinct_1": "distinct tokens of a bucket",
    "longest_run": "longest repeated stretch, tokens",
    "nll": "NLL of the text, nats",
}
SHARES = {"repeated_4", "distinct_1"}


def cells(found: Generated) -> list[dict]:
    """One flat record for each rule, source, bucket and measure."""
    rows = []
    for (rule, source), values in found.values.items():
        for measure, value in values.items():  # (P, buckets)
            for n in range(value.shape[1]):
                there = np.isfinite(value[:, n])
                if not there.any():
                    continue
                means = unit_means(value[there, n], found.unit[there])
                span = interval(means, alpha=1 - found.settings.confidence, resamples=0)
                place = {"rule": rule, "source": source, "start": found.edges[n], "stop": found.edges[n + 1]}
                ends = {"value": span.estimate, "low": span.low, "high": span.high}
                numbers = {key: rounded(x) for key, x in ends.items()}
                rows.append({**place, "measure": measure, **numbers, "rows": int(there.sum())})
    return rows


def _by_place(found: Generated) -> dict[tuple[str, str, str], list[tuple[int, int, float]]]:
    """(rule, source, measure) -> (start, stop, value) of its buckets."""
    out: dict[tuple[str, str, str], list[tuple[int, int, float]]] = {}
    for row in cells(found):
        key = row["rule"], row["source"], row["measure"]
        out.setdefault(key, []).append((row["start"], row["stop"], row["value"]))
    return out


def words(found: Generated) -> list[str]:
    """What happened, in sentences: first bucket against last."""
    at, lines = _by_place(found), []
    for rule in found.rules:
        for source in found.sources[:-1]:
            if (rule.label, source, "repeated_4") not in at:
                continue
            name = "as trained" if rule.label == TRAINED else rule.label
            (a, b, first), (c, d, last) = (at[rule.label, source, "repeated_4"][n] for n in (0, -1))
            nll = [at[rule.label, source, "nll"][n][2] for n in (0, -1)]
            real = [at[rule.label, REAL, "nll"][n][2] for n in (0, -1)]
            usual = at[rule.label, REAL, "repeated_4"][-1][2]
            lines.append(
                f"{name}, {source}: 4-grams repeated {first:.0%} at {a:,}–{b:,} → {last:.0%} at {c:,}–{d:,} "
                f"tokens (real text {usual:.0%}); NLL of its own text {nll[0]:.2f} → {nll[1]:.2f} nats (of "
                f"real text {real[0]:.2f} → {real[1]:.2f})."
            )
    lines += [f"{rule}: shorter, {reason}." for rule, reason in found.absent.items()]
    lines.append(
        f"{len(found.unit)} prompts of {found.edges[0]:,} tokens from {found.documents} documents "
        f"({len(set(found.unit.tolist()))} {found.unit_kind}s); trained at {found.subject.trained_length:,}."
    )
    return lines


def table(found: Generated) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns, rows for a terminal: what is drawn, by bucket."""
    at, rows = _by_place(found), []
    for rule, source in found.values:
        for n, (start, stop, _) in enumerate(at[rule, source, "nll"]):
            shown = [
                format(at[rule, source, measure][n][2], ".1%" if measure in SHARES else ".2f")
                for measure in DRAWN
            ]
            rows.append([rule, source, f"{start:,}–{stop:,}", *shown])
    return "text by position", ["rule", "source", "positions", *DRAWN.values()], rows


def write(found: Generated, folder: Path) -> None:
    """`results.csv`, `results.json` and `summary.txt` in `folder`."""
    rows, summary = cells(found), words(found)
    document = {
        "format": 1,
        "kind": "generation",
        "summary": summary,
        **basis(found),
        "targets_hash": found.targets_hash,
        "prompts": len(found.unit),
        "edges": found.edges,
        "measures": MEASURES,
        "cells": rows,
        "samples": [{"rule": r, "source": s, "text": text} for (r, s), text in found.text.items()],
        "absent": [{"rule": rule, "reason": reason} for rule, reason in found.absent.items()],
    }
    write_table(folder / "results.csv", COLUMNS, rows)
    write_json(folder / "results.json", document)
    write_text(folder / "summary.txt", "\n".join(summary) + "\n")


def draw(found: Generated, folder: Path) -> list[Path]:
    """Write a figure for each rule into `folder`; returns the PNG files."""
    drawn = []
    for rule in found.rules:
        if any(label == rule.label for label, _ in found.values):
            name = "" if rule.label == TRAINED else f"-{rule.label}"
            drawn.append(save(_figure(found, rule.label), folder, f"generation{name}"))
    return drawn


def _figure(found: Generated, rule: str) -> Figure:
    at, l0, panels = _by_place(found), found.subject.trained_length, []
    for measure, heading in DRAWN.items():
        lines = []
        for n, source in enumerate(found.sources):
            points = at.get((rule, source, measure), [])
            colour, dashed = (INK, True) if source == REAL else (COLOURS[n % len(COLOURS)], False)
            x, y = [(a + b) / 2 for a, b, _ in points], [value for *_, value in points]
            lines.append(Series(x, y, colour, source, dashed=dashed, marker=None if dashed else n))
        panels.append(Panel(heading, lines, share=measure in SHARES))
    name = "as trained" if rule == TRAINED else f"rule {rule}"
    width = found.edges[1] - found.edges[0]
    return panels_figure(
        panels,
        Words(
            f"Writing past the trained length, {name}",
            f"{found.subject.name}: {len(found.unit)} prompts of {found.edges[0]:,} tokens",
            f"Buckets of {width:,} tokens; a repetition is looked for in the {width:,} tokens before.",
        ),
        x="position, tokens",
        marked=l0,
        ticks=[l0 * n for n in range(1, 1 + found.edges[-1] // l0)],
        log_x=False,
    )
