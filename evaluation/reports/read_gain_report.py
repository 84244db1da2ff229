"""Repeated text in the report of losses: NLL and read gain by distance."""

from collections.abc import Iterator

from evaluation.reports.document import ReportTable, pivot
from evaluation.reports.position_report import positions
from evaluation.reports.reported_results import ReportedResults, melted
from evaluation.reports.text import interval_text, listed
from evaluation.results_table import ResultRow
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRUNCATE
from evaluation.statistics.analysis import Analysis


def read_gain_record(result: EvaluationResult, analysis: Analysis) -> dict:
    """Repeated text in results.json."""
    repeats = result.plan.repeats
    if repeats is None:
        return {}
    cells = analysis.read_gains
    return {"repeated": {"hash": repeats.hash, "ngram": repeats.ngram, "cells": cells}}


def read_gain_rows(record: dict) -> Iterator[ResultRow]:
    """The long table of repeated text in a record."""
    for cell in record.get("repeated", {}).get("cells", ()):
        place = {"at": cell["distance_low"], "until": cell["distance_high"]}
        sample = {"units": len(cell["units"])}
        cell = {**cell, "repeated_nll": cell["nll"]}
        for row in melted([cell], ("repeated_nll", "control_nll", "read_gain")):
            is_read = row.metric != "read_gain" or cell["readable"]
            if is_read and cell["method"] != TRUNCATE:
                note = f"{cell['targets']} targets"
                yield row._replace(note=note, **place, **sample)


def read_gain_table(r: ReportedResults) -> ReportTable:
    gains = r.table.select("read_gain")
    gains.sort(key=lambda row: (r.names.index(row.variant), row.at))
    return pivot(
        "Read gain by distance and length",
        gains,
        interval_text,
        index={r.noun: lambda row: row.variant, "distance": positions},
        note="Nats: NLL after the earlier text was replaced minus NLL; individual intervals.",
    )


def read_gain_sentences(r: ReportedResults) -> list[str]:
    """The farthest distances at which variants are shown to read; none without repeated text."""
    rows = r.table.select("read_gain")
    if not rows:
        return []
    farthest = {}
    for row in rows:
        if row.low > 0:
            farthest[row.variant] = max(row.until - 1, farthest.get(row.variant, 0))
    parts = [f"{name} up to {distance:,}" for name, distance in farthest.items()]
    return [f"Read gains are shown for {listed(parts) or 'no distance'} tokens."]
