"""Repeated text in the report of losses: NLL and read gain by distance."""

from evaluation.reports.document import ReportTable
from evaluation.reports.results_table import interval_columns
from evaluation.reports.text import estimate
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRUNCATE, name_of
from evaluation.statistics.analysis import Analysis
from evaluation.statistics.read_gain import ReadGain


def distances(each: ReadGain) -> str:
    """`32–63`."""
    return f"{each.low}–{each.high - 1}"


def read_gain_columns(each: ReadGain) -> dict:
    """The numbers of repeated text at one length and distance."""
    return {
        "method": each.method,
        "length": each.length,
        "targets": each.targets,
        "documents": each.documents,
        "units": each.read_gain.units,
        "nll": each.nll,
        **interval_columns("gain", each.gain),
        "distance_low": each.low,
        "distance_high": each.high,
        "readable": each.readable,
        "control_nll": each.control,
        **interval_columns("read_gain", each.read_gain),
    }


def read_gain_record(result: EvaluationResult, analysis: Analysis) -> dict:
    """Repeated text in results.json; `units` are ids among the names of all units."""
    if result.plan.repeats is None:
        return {}
    cells = [
        {
            **read_gain_columns(each),
            "units": [result.unit_names[unit] for unit in each.unit],
            "unit_nll": each.unit_nll.tolist(),
            "unit_control_nll": each.unit_control.tolist(),
        }
        for each in analysis.read_gains
    ]
    repeats = result.plan.repeats
    return {"repeated": {"hash": repeats.hash, "ngram": repeats.ngram, "cells": cells}}


def read_gain_tables(result: EvaluationResult, analysis: Analysis) -> list[ReportTable]:
    """NLL by distance beside that of all targets, and the read gain."""
    gains = {(each.method, each.length, each.low): each for each in analysis.read_gains}
    lows = sorted({low for _, _, low in gains})
    if not lows:
        return []
    lengths = result.plan.lengths
    all_targets = {(row.method, row.length): row.nll for row in analysis.rows}
    losses = []
    for method, length in dict.fromkeys((method, length) for method, length, _ in gains):
        if method != TRUNCATE or length == lengths[0]:
            row = [gains[method, length, low] for low in lows]
            nll = all_targets[method, length]
            of_all = "" if nll is None else f"{nll:.3f}"
            place = "all" if method == TRUNCATE else str(length)
            losses.append([method, place, of_all, *(f"{each.nll:.3f}" for each in row)])
    read = []
    for method in dict.fromkeys(method for method, *_ in gains if method != TRUNCATE):
        for low in lows:
            row = {length: gains.get((method, length, low)) for length in lengths}
            cells = [estimate(g.read_gain) if g and g.readable else "—" for g in row.values()]
            first = next(filter(None, row.values()))
            read.append([method, distances(first), str(first.targets), *cells])
    heads = [distances(next(g for g in analysis.read_gains if g.low == low)) for low in lows]
    n = result.plan.repeats.ngram
    return [
        ReportTable(
            f"NLL of tokens that repeat earlier text after the same {n} tokens, by distance",
            ["method", "length", "all targets", *heads],
            losses,
        ),
        ReportTable(
            "Read gain by distance and length",
            ["method", "distance", "targets", *(f"{length:,}" for length in lengths)],
            read,
            "Read gain: NLL after the earlier text was replaced minus NLL, in nats.",
        ),
    ]


def read_gain_sentence(result: EvaluationResult, analysis: Analysis) -> str:
    """The farthest distance of each method at the longest length; '' without repeated text."""
    longest = result.plan.lengths[-1]
    last = {
        each.method: each
        for each in analysis.read_gains
        if each.length == longest and each.readable and each.method != TRUNCATE
    }
    texts = [
        f"{name_of(method)} {estimate(each.read_gain)} at {distances(each)} tokens"
        for method, each in last.items()
    ]
    return f"Read gain with {longest} tokens: {', '.join(texts)}." if texts else ""
