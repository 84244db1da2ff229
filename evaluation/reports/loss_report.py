"""Report of the loss of text: a row for each part of the units, method and length."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from matplotlib.figure import Figure

from data.sampling.exposure import Exposure
from evaluation.reports.charts import (
    COLOURS,
    DASHED,
    FAINT,
    INK,
    MARKERS,
    Curve,
    FigureText,
    Panel,
)
from evaluation.reports.document import Cell, ReportTable, verdict_cell
from evaluation.reports.evaluation_report import EvaluationReport
from evaluation.reports.exposure_panel import exposure_panel
from evaluation.reports.length_charts import ReferenceLines, difference_panel, length_chart
from evaluation.reports.provenance import basis, provenance
from evaluation.reports.read_gain_report import (
    read_gain_columns,
    read_gain_record,
    read_gain_sentence,
    read_gain_tables,
)
from evaluation.reports.results_table import finite, interval_columns
from evaluation.reports.sentences import caveats, sentences
from evaluation.reports.text import dtype_note, estimate
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE, name_of
from evaluation.statistics.analysis import Analysis, AnalysisRow
from evaluation.statistics.intervals import Interval, unit_means
from evaluation.statistics.verdicts import MethodVerdicts

NLL = "NLL, nats per token"
PARTS = {True: "in the training text", False: "not in the training text"}
MANY = 10**7  # units: a larger number is not useful advice


def loss_report(
    result: EvaluationResult,
    analysis: Analysis,
    name: str = "loss",
    exposure: Exposure | None = None,
) -> EvaluationReport:
    """The report; `exposure` in training is drawn below the figure."""
    figure = by_position_figure if analysis.buckets else by_length_figure
    figure_name = "nll_by_position" if analysis.buckets else "nll_by_length"
    drawn = figure(result, analysis, exposure if result.settings.exposure else None)
    matrix = result.settings.matrix and not analysis.buckets
    if matrix:
        tables = [matrix_table(result, analysis)]
    elif analysis.buckets:
        tables = [position_table(result, analysis)]
    else:
        tables = [length_table(result, analysis)]
    if analysis.parts and not matrix:
        tables.append(parts_table(result, analysis))
    tables += read_gain_tables(result, analysis)
    return EvaluationReport(
        name=name,
        title=f"Loss of {result.subject.name}",
        rows=results_rows(result, analysis),
        record=record_of(result, analysis),
        summary=summary_of(result, analysis, brief=matrix),
        caveats=caveats(
            result.settings,
            analysis.units,
            analysis.unit_kind,
            {**result.absent, **result.failed},
            unchecked=result.screening.unchecked,
            learned=analysis.learned,
            precision=result.precision,
            notes=[*analysis.notes, *result.notes],
        ),
        tables=tables,
        figures={figure_name: drawn},
        more_records={"targets.json": result.plan.record},
    )


def results_rows(result: EvaluationResult, analysis: Analysis) -> list[dict]:
    """`part`: `all` units, or only those `seen` (cluster in the training text) or `unseen`."""
    common = loss_basis(result, analysis)
    rows = [{"part": "all", **cell_columns(row, analysis), **common} for row in analysis.rows]
    rows += [{**common, "part": "repeated", **read_gain_columns(g)} for g in analysis.read_gains]
    for part in analysis.parts:
        counts = {
            "targets": part.n_targets,
            "documents": part.documents,
            "units": part.units,
        }
        rows += [
            {
                "part": "seen" if part.seen else "unseen",
                **row_columns(row),
                **interval_columns("gain_per_doubling", None),
                **common,
                **counts,
            }
            for row in part.rows
        ]
    return rows


def row_columns(row: AnalysisRow) -> dict:
    """The numbers of one method at one length."""
    verdict = row.verdict
    level = interval_columns("nll", row.level)
    delta = interval_columns("delta", row.delta)
    ratio = {
        key.replace("delta", "perplexity_ratio"): None
        if value is None
        else math.exp(min(value, 700.0))
        for key, value in delta.items()
    }
    return {
        "method": row.method,
        "scheme": row.scheme,
        "length": row.length,
        "nll": row.nll,
        "perplexity": row.perplexity,
        "bits_per_byte": row.bits_per_byte,
        "nll_low": level["nll_low"],
        "nll_high": level["nll_high"],
        **delta,
        **interval_columns("gain", row.gain),
        **ratio,
        "delta_upper_one_sided": finite(verdict.upper) if verdict else None,
        "verdict": verdict.word if verdict else None,
        "units_needed": verdict.units_needed if verdict else None,
        "spans_needed": verdict.spans_needed if verdict else None,
        "bfloat16_minus_float32": row.precision,
        "failure": row.failure or None,
        "exists": row.exists,
    }


def cell_columns(row: AnalysisRow, analysis: Analysis) -> dict:
    """The numbers of a cell with the gain of the last doubling before its length."""
    gains = {
        (reach.method, doubling.longer): doubling.gain
        for reach in analysis.reaches
        for doubling in reach.doublings
    }
    gain = gains.get((row.method, row.length))
    return {**row_columns(row), **interval_columns("gain_per_doubling", gain)}


def loss_basis(result: EvaluationResult, analysis: Analysis) -> dict:
    """What every number of this evaluation depends on."""
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


def record_of(result: EvaluationResult, analysis: Analysis) -> dict:
    """The content of results.json."""

    def by_unit(nll: np.ndarray | None) -> list[float] | None:
        """Mean NLL of each unit in the order of `units`."""
        return None if nll is None else unit_means(nll, result.unit).tolist()

    ids, first, counts = np.unique(
        result.unit,
        return_index=True,
        return_counts=True,
    )
    units = {
        "kind": result.unit_kind,
        "names": [result.unit_names[i] if result.unit_names else str(i) for i in ids],
        "targets": counts.tolist(),
        # whether the cluster of each is also in the training text
        "seen": None if result.seen is None else result.seen[first].tolist(),
    }
    reaches = [
        {
            "method": reach.method,
            "reach": reach.reach,
            "gain_shown_to": reach.shown,
            "longest": reach.longest,
            "gain_per_doubling": [
                {
                    "from": doubling.shorter,
                    "to": doubling.longer,
                    "gain": doubling.gain.estimate,
                    "low": doubling.gain.low,
                    "high": doubling.gain.high,
                }
                for doubling in reach.doublings
            ],
        }
        for reach in analysis.reaches
    ]
    parts = {
        "seen" if part.seen else "unseen": {
            "targets": part.n_targets,
            "documents": part.documents,
            "units": part.units,
            "cells": [row_columns(row) for row in part.rows],
        }
        for part in analysis.parts
    }
    return {
        **loss_basis(result, analysis),
        **provenance(result),
        "lengths": result.plan.lengths,
        "left_out": result.left_out,
        "contamination": result.screening.record,
        "units": units,
        "unigram_nll": analysis.unigram,
        "unigram_unit_nll": by_unit(result.unigram),
        "truncated_unit_nll": by_unit(result.truncated),
        "cells": [
            cell_columns(row, analysis)
            | {"unit_nll": by_unit(result.nll.get((row.method, row.length)))}
            for row in analysis.rows
        ],
        "derived": [
            {"method": v.method, "held_to": v.held_to, "break_point": v.break_point}
            for v in analysis.verdicts
        ],
        "context_reach": reaches,
        "parts": parts,
        "by_position": {
            method: [asdict(bucket) for bucket in buckets]
            for method, buckets in analysis.buckets.items()
        },
        "per_target_nll": result.files,
        **read_gain_record(result, analysis),
    }


def summary_of(
    result: EvaluationResult,
    analysis: Analysis,
    brief: bool = False,
) -> list[str]:
    """Which method held to which length, by how much, and with what confidence; `brief`: one
    sentence for all methods."""
    wide = [
        (verdict, method.method)
        for method in analysis.verdicts
        for verdict in method.verdicts
        if verdict.units_needed
    ]
    return sentences(
        "loss",
        result=result,
        a=analysis,
        rows={(row.method, row.length): row for row in analysis.rows},
        brief=brief,
        wide=sorted(wide, key=lambda pair: -pair[0].delta.half),
        parts=PARTS,
        many=MANY,
        read_gain=read_gain_sentence(result, analysis),
    )


def table_title(result: EvaluationResult, analysis: Analysis) -> str:
    counts = f"{analysis.n_targets} targets, {analysis.units} {analysis.unit_kind}s"
    return f"{result.plan.protocol}: NLL in nats, {counts}{dtype_note(result.settings.dtype)}"


def length_table(result: EvaluationResult, analysis: Analysis) -> ReportTable:
    """NLL by method and length, with the verdict and the net gain at every length past L0."""
    l0 = result.subject.trained_length
    rows = []
    for row in analysis.rows:
        if row.method == TRUNCATE and row.length != l0:
            continue
        length = "all" if row.method == TRUNCATE else str(row.length)
        if row.nll is None:
            word = "failed" if row.exists else "—"
            rows.append([row.method, length, word, "", "", row.failure, ""])
            continue
        delta = estimate(row.delta) if row.delta else ""
        gain = estimate(row.gain) if row.gain and row.length > l0 else ""
        word: Cell = verdict_cell(row.verdict.word) if row.verdict else ""
        if row.method == TRUNCATE:
            word = "flat by construction"
        numbers = [f"{row.nll:.4f}", f"{row.perplexity:.2f}", delta]
        rows.append([row.method, length, *numbers, word, gain])
    difference = f"difference from {l0}, as trained"
    columns = ["method", "length", "NLL", "perplexity", difference, "verdict", "net gain"]
    return ReportTable(table_title(result, analysis), columns, rows)


def position_table(result: EvaluationResult, analysis: Analysis) -> ReportTable:
    rows = []
    for method, buckets in analysis.buckets.items():
        for bucket in buckets:
            last = bucket.high - 1
            where = str(last) if bucket.low == last else f"{bucket.low}-{last}"
            gain = estimate(bucket.gain)
            rows.append([method, where, str(bucket.count), f"{bucket.nll:.3f}", gain])
    title = f"NLL by position, factor for {result.plan.lengths[-1]}"
    columns = ["method", "positions", "targets", "NLL", "gain over truncation"]
    return ReportTable(title + dtype_note(result.settings.dtype), columns, rows)


def parts_table(result: EvaluationResult, analysis: Analysis) -> ReportTable:
    """The cells once over the units in the training text, and once over the others."""
    l0 = result.subject.trained_length
    columns = ["method", "length"]
    lines: dict[tuple[str, str], list[str]] = {}
    for part in analysis.parts:
        columns += [f"NLL: {part.units} {PARTS[part.seen]}", f"difference from {l0}"]
        for row in part.rows:
            if row.method != TRUNCATE or row.length == l0:
                length = "all" if row.method == TRUNCATE else str(row.length)
                delta = estimate(row.delta) if row.delta else ""
                lines.setdefault((row.method, length), []).extend([f"{row.nll:.4f}", delta])
    title = f"{analysis.unit_kind}s, by whether the training text contains them"
    return ReportTable(
        title,
        columns,
        [[*where, *cells] for where, cells in lines.items()],
    )


def matrix_table(result: EvaluationResult, analysis: Analysis) -> ReportTable:
    """A row for each method, a column for each length; the verdict, and the gain over truncation.

    As trained and truncated come first, then the methods by their NLL at the longest length.
    """
    lengths = result.plan.lengths
    verdicts = {verdict.method: verdict for verdict in analysis.verdicts}
    cells = {(row.method, row.length): row for row in analysis.rows}

    def nll(label: str, length: int) -> str:
        row = cells.get((label, length))
        if row is None or not row.exists:
            return "—"
        return "failed" if row.nll is None else f"{row.nll:.3f}"

    def rank(label: str) -> tuple[bool, list[float]]:
        rows = [cells.get((label, length)) for length in reversed(lengths)]
        losses = [math.inf if row is None or row.nll is None else row.nll for row in rows]
        return label not in (TRAINED, TRUNCATE), [] if label in (TRAINED, TRUNCATE) else losses

    rows = []
    for label in sorted([method.label for method in result.methods], key=rank):
        last = cells.get((label, lengths[-1]))
        gain = estimate(last.gain) if last and last.gain and len(lengths) > 1 else ""
        words = [_verdict(verdicts.get(label)), gain]
        if label == TRUNCATE:
            words = ["flat by construction", ""]
        rows.append([label, *(nll(label, length) for length in lengths), *words])
    columns = ["method", *(f"{n:,}" for n in lengths), "verdict", f"gain at {lengths[-1]:,}"]
    l0 = result.subject.trained_length
    note = f"Gain: NLL with the context truncated to {l0} minus that of the method."
    return ReportTable(table_title(result, analysis), columns, rows, note)


def _verdict(method: MethodVerdicts | None) -> str:
    if method is None or not method.verdicts:
        return ""
    if method.verdicts[-1].word == "points only":
        return "points only"
    words = [f"held to {method.held_to:,}"] if method.held_to else []
    words += [f"broken at {method.break_point:,}"] if method.break_point else []
    return ", ".join(words) or "inconclusive"


def difference_curve(
    label: str, x: Sequence[float], differences: Sequence[Interval | None]
) -> Curve:
    """Differences with their intervals, where there are any."""
    shown = [(at, one) for at, one in zip(x, differences, strict=True) if one is not None]
    return Curve(
        label,
        [at for at, _ in shown],
        [one.estimate for _, one in shown],
        low=[one.low for _, one in shown],
        high=[one.high for _, one in shown],
    )


def by_length_figure(
    result: EvaluationResult, analysis: Analysis, exposure: Exposure | None
) -> Figure:
    l0 = result.subject.trained_length
    curves = []
    differences = []
    for method in result.methods:
        rows = [row for row in analysis.rows if row.method == method.label and row.nll is not None]
        if method.label != TRUNCATE and rows:
            name = name_of(method.label)
            x = [float(row.length) for row in rows]
            curves.append(Curve(name, x, [row.nll or 0.0 for row in rows]))
            differences.append(difference_curve(name, x, [row.delta for row in rows]))
    baseline = None if result.truncated is None else float(result.truncated.mean())
    protocol = f"({result.plan.protocol}{dtype_note(result.settings.dtype)})"
    targets = f"{analysis.n_targets:,} targets of {analysis.documents} documents"
    if result.plan.protocol == "fixed-targets":
        targets = f"the same {targets} at every length"
    text = FigureText(
        "Loss beyond the trained length",
        f"{result.subject.name}: {targets} {protocol}",
        interval_note(result, differences, analysis.family),
    )
    return loss_by_length(
        curves,
        baseline,
        [l0],
        text,
        differences=differences,
        against=f"difference from {l0} tokens as trained, nats",
        tolerance=result.settings.tolerance,
        exposure=exposure,
    )


def loss_by_length(
    curves: Sequence[Curve],
    baseline: float | None,
    trained: Sequence[int],
    text: FigureText,
    *,
    differences: Sequence[Curve] = (),
    against: str = "",
    tolerance: float = 0.02,
    exposure: Exposure | None = None,
) -> Figure:
    """NLL against length: a line per method, trained lengths and the truncation baseline marked.
    Below it the differences, and the exposure in training.

    Grey lines far above all others leave the axes; their labels state their values.
    """
    first, *also = trained
    levels = [] if baseline is None else [(f"context truncated to {first}  {{}}", baseline)]
    curves = styled(curves)
    top = None
    highest = max((y for curve in curves if curve.color != FAINT for y in curve.y), default=0.0)
    lowest = min((y for curve in curves for y in curve.y), default=0.0)
    limit = highest + 0.5 * (highest - lowest)
    if any(max(curve.y) > limit for curve in curves):
        values = [y for curve in curves if max(curve.y) <= limit for y in curve.y]
        top = max([*values, *([] if baseline is None else [baseline])])
    return length_chart(
        curves,
        ReferenceLines(first, levels, top=top, also=also),
        text,
        NLL,
        below=panels_below(curves, differences, against, tolerance, exposure),
    )


def panels_below(
    curves: Sequence[Curve],
    differences: Sequence[Curve],
    heading: str,
    tolerance: float,
    exposure: Exposure | None,
) -> list[Panel]:
    """Panels of the differences, in the styles of the curves with their labels and without those
    that are drawn in grey, and of the exposure."""
    style = {curve.label: curve for curve in curves if curve.color != FAINT}
    shown = [
        replace(style[each.label], label="", x=each.x, y=each.y, low=each.low, high=each.high)
        for each in differences
        if len(each.x) and each.label in style
    ]
    panels = [difference_panel(shown, heading, tolerance)] if shown else []
    return panels if exposure is None else [*panels, exposure_panel(exposure)]


def by_position_figure(
    result: EvaluationResult, analysis: Analysis, exposure: Exposure | None
) -> Figure:
    l0 = result.subject.trained_length
    longest = result.plan.lengths[-1]
    curves = []
    gains = []
    baseline = Curve("", [], [])
    for method, buckets in analysis.buckets.items():
        # Position p sees p + 1 tokens; a bucket is drawn at its geometric center in tokens seen.
        x = [math.sqrt((bucket.low + 1) * bucket.high) for bucket in buckets]
        curves.append(Curve(name_of(method), x, [bucket.nll for bucket in buckets]))
        gains.append(difference_curve(name_of(method), x, [bucket.gain for bucket in buckets]))
        if not len(baseline.x):
            cut = [bucket.nll + bucket.gain.estimate for bucket in buckets]
            label = f"context truncated to {l0}"
            baseline = Curve(label, x, cut, width=1.1, dash=DASHED, order=2)
    text = FigureText(
        f"NLL by position in a window of {longest} tokens (factor for {longest})",
        f"{result.subject.name}: {analysis.n_targets:,} targets of {analysis.documents} "
        f"documents; different tokens at each position{dtype_note(result.settings.dtype)}",
        interval_note(result, gains),
    )
    marks = ReferenceLines(l0, ticks=[float(2**k) for k in range(longest.bit_length())])
    curves = styled(curves)
    heading = f"gain over the context truncated to {l0}, nats"
    return length_chart(
        [*curves, baseline],
        marks,
        text,
        NLL,
        x="tokens seen (log scale)",
        below=panels_below(curves, gains, heading, result.settings.tolerance, exposure),
    )


def interval_note(result: EvaluationResult, differences: Sequence[Curve], family: int = 1) -> str:
    """What the bars and the shaded band of differences are, if any interval is drawn."""
    if not any(np.greater(curve.high, curve.low).any() for curve in differences):
        return ""
    level = f"{100 * result.settings.confidence:g}% intervals over {result.unit_kind}s"
    together = f", simultaneous over all {family}" if family > 1 else ""
    return f"Bars: {level}{together}. Shaded: within the tolerance."


def styled(curves: Sequence[Curve]) -> list[Curve]:
    """Black for the checkpoint as trained, the palette in order for the others; if there are too
    many, only the best at the longest length have colors and the rest are thin grey lines."""
    others = [curve for curve in curves if curve.label != name_of(TRAINED)]
    if len(others) > len(COLOURS):
        others.sort(key=lambda curve: (-curve.x[-1], curve.y[-1]))
        others = others[: len(COLOURS) - 1]  # the last color is the grey of the remaining lines
    prominent = {curve.label for curve in others}
    styles = zip(COLOURS, MARKERS, strict=True)
    out = []
    for curve in curves:
        if curve.label == name_of(TRAINED):
            style = {"color": INK, "marker": "o"}
        elif curve.label in prominent:
            color, marker = next(styles)
            style = {"color": color, "marker": marker}
        else:
            out.append(replace(curve, color=FAINT, width=0.8, marker=".", size=3.5, order=2.5))
            continue
        out.append(replace(curve, width=1.7, order=4, **style))
    return out
