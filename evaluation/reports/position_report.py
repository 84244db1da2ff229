"""NLL by position within long windows, and the gain over truncation on the same tokens.

Metrics: nll_at_positions, gain_at_positions; `at` and `until` are the positions of a bucket.
"""

import math
from collections.abc import Iterator

from matplotlib.figure import Figure

from evaluation.reports.charts import (
    LengthAxis,
    Styles,
    difference_panel,
    length_panel,
)
from evaluation.reports.document import ReportTable, pivot
from evaluation.reports.figures import FigureText, panels
from evaluation.reports.reported_results import ReportedResults, by_sign
from evaluation.reports.text import interval_text, plain
from evaluation.results_table import ResultRow, number
from evaluation.scoring.methods import name_of

TOLERANCE = 0.02  # nats; shaded in the figure


def position_rows(record: dict) -> Iterator[ResultRow]:
    for method, buckets in record["by_position"].items():
        for bucket in buckets:
            place = {"at": bucket["low"], "until": bucket["high"]}
            gain = bucket["gain"]
            ends = {end: number(gain.get(end)) for end in ("low", "high")}
            name = name_of(method)
            yield ResultRow(name, "nll_at_positions", bucket["nll"], **place)
            yield ResultRow(name, "gain_at_positions", gain["estimate"], **place, **ends)


def position_tables(r: ReportedResults) -> list[ReportTable]:
    """A row per bucket of positions, a column per variant."""

    def table(title: str, metric: str, write) -> ReportTable:
        rows = r.table.select(metric)
        return pivot(
            title,
            rows,
            write,
            index={"positions": positions},
            columns=lambda row: row.variant,
            headings={row.variant: row.variant for row in rows},
            note="Different tokens at each position: not comparable with fixed targets.",
        )

    over = f"Gain over the context truncated to {r.trained_length:,}"
    return [
        table(f"NLL by position, {r.subtitle}", "nll_at_positions", lambda row: plain(row.value)),
        table(over, "gain_at_positions", interval_text),
    ]


def position_verdict(r: ReportedResults) -> str:
    """The sign of the gain at the last positions."""
    rows = r.table.select("gain_at_positions")
    last = max(row.at for row in rows)
    signs = by_sign(r, [row for row in rows if row.at == last], "positive", "negative")
    return f"Gain over truncation from position {last:,} on: {signs or 'point estimates only'}."


def positions(row: ResultRow) -> str:
    """`256–511`."""
    last = row.until - 1
    return f"{row.at:,}" if row.at == last else f"{row.at:,}–{last:,}"


def tokens_seen(row: ResultRow) -> float:
    """Position p sees p + 1 tokens; a bucket is drawn at its geometric center in tokens seen."""
    return math.sqrt((row.at + 1) * row.until)


def position_figure(r: ReportedResults, styles: Styles) -> Figure:
    rows = r.table.select("nll_at_positions")
    longest = max(row.until for row in rows)
    ticks = [float(2**k) for k in range(longest.bit_length())]
    axis = LengthAxis(ticks, [r.trained_length], tokens_seen)
    heading = f"gain over the context truncated to {r.trained_length:,}, nats"
    text = FigureText(
        f"NLL by position in a window of {longest:,} tokens",
        r.subtitle,
        f"Different tokens at each position; methods use the factor for {longest:,}.",
    )
    below = difference_panel(r.table.select("gain_at_positions"), styles, axis, heading, TOLERANCE)
    shown = [length_panel(rows, styles, axis, y="NLL, nats per token"), below]
    return panels(shown, text, x="tokens seen (log scale)")
