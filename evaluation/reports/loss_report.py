"""Report of the loss of text by length, of one run under several methods, of several runs, or of
the schemes of a study: their tables, sentences and figures are the same."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from evaluation.reports.charts import (
    LengthAxis,
    Styles,
    difference_panel,
    dots_panel,
    length_panel,
    styles_of,
    top_of_colored,
)
from evaluation.reports.document import NONE, Cell, ReportTable, TableCell, pivot
from evaluation.reports.evaluation_report import EvaluationReport, basis, caveats
from evaluation.reports.figures import FigureText, Panel, panels
from evaluation.reports.position_report import (
    position_figure,
    position_rows,
    position_tables,
    position_verdict,
)
from evaluation.reports.read_gain_report import (
    read_gain_record,
    read_gain_rows,
    read_gain_sentences,
    read_gain_table,
)
from evaluation.reports.reported_results import (
    ReportedResults,
    by_sign,
    method_variants,
    named,
    seed_counts,
)
from evaluation.reports.text import counted, dtype_note, interval_text, plain
from evaluation.results_table import ResultRow, ResultsTable
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE, name_of
from evaluation.statistics.analysis import Analysis, describe_scheme
from evaluation.statistics.intervals import unit_means
from evaluation.statistics.verdicts import (
    INCONCLUSIVE,
    POINTS_ONLY,
    UNDERTRAINED,
    is_undertrained,
)

TONES = {"held": "good", "broken": "bad"}
NUMBERS = ("nll", "bits_per_byte", "bfloat16_minus_float32")  # of a cell of results.json


@dataclass(kw_only=True)
class LossResults(ReportedResults):
    """The results of a loss evaluation. Metrics of the table, by length unless stated otherwise:

        nll, perplexity, bits_per_byte   of the evaluated text
        delta                            NLL(L) − NLL(as trained, L0), simultaneous over all
                                         verdicts, with the verdict
        gain                             −delta, with an individual interval
        gain_per_doubling                of the step of the grid that ends at L
        held_to, break_point             (all lengths) largest length held, smallest length broken
        context_reach, gain_shown_to     (all lengths) no longer context improves on the best up to
                                         it; longest length shown to improve on all shorter
        difference                       NLL minus that of the baseline
        repeated_nll, control_nll,       of tokens that repeat text at distances from `at` to before
        read_gain                        `until`, before and after it was replaced, and the change
        failure                          `note`: why there is no number

    Attributes:
        lengths: of the grid.
        unit_kind, units: the independent units of the intervals.
        family, difference_family: numbers of simultaneous verdicts and differences.
        truncated: NLL of the baseline with its context truncated to the trained length.
        unigram: NLL of a unigram model on the same targets.
        undertrained: variants of models hardly better than that.
        baseline: the variant that the others are compared with, at the lengths `primary`.
        per: what losses are per: token, or byte where tokenizers differ.
    """

    lengths: list[int]
    unit_kind: str
    units: int
    tolerance: float
    confidence: float
    family: int = 1
    difference_family: int = 1
    truncated: float | None = None
    unigram: float | None = None
    undertrained: Sequence[str] = ()
    baseline: str | None = None
    primary: Sequence[int] = ()
    also_trained: Sequence[int] = ()  # trained lengths of further runs
    per: str = "token"

    @property
    def against(self) -> str:
        """What differences are."""
        return f"NLL minus that of {self.baseline}"

    def beyond(self, name: str) -> list[ResultRow]:
        """Changes with their verdicts at the measured lengths beyond the trained length."""
        return [row for row in self.table.select("delta", name) if row.verdict]

    def claims(self, name: str) -> bool:
        """Whether the variant has enough seeds and units for verdicts."""
        return any(row.verdict != POINTS_ONLY for row in self.beyond(name))

    @property
    def sample(self) -> str:
        noun = "targets" if self.per == "token" else f"{self.per}s"
        targets = f"{self.facts['targets']:,} {noun} of {counted(self.units, self.unit_kind)}"
        documents = self.facts.get("documents")
        if documents and self.unit_kind != "document":
            targets += f" ({counted(documents, 'document')})"
        if self.seeds:
            targets += f", {seed_counts(self, 'seed')} per {self.noun}"
        return targets + dtype_note(self.facts.get("dtype", "float32"))

    @property
    def intervals(self) -> str:
        """What simultaneous intervals of gains are, or '' where none is reported."""
        if not any(map(self.claims, self.names)):
            return ""
        over = f"seeds and {self.unit_kind}s" if self.seeds else f"{self.unit_kind}s"
        note = f"{100 * self.confidence:g}% intervals over {over}"
        return note if self.family == 1 else f"{note}, simultaneous over {self.family}"


# Tables.


def overview(r: LossResults) -> ReportTable:
    """A row per variant: NLL at every length, the verdict, and the net gain at the longest."""
    is_judged = any(map(r.beyond, r.names))
    columns = [r.noun, "seeds"] if r.seeds else [r.noun]
    columns += [f"{length:,}" for length in r.lengths]
    notes = []
    if is_judged:
        columns += ["verdict", f"net gain at {r.lengths[-1]:,}"]
        cut = f"NLL with the context truncated to {r.trained_length:,}"
        interval = f"; {r.intervals}" if r.intervals else ""
        notes.append(f"Net gain: {cut} minus NLL{interval}.")
    rows: list[list[Cell]] = []
    for name in r.names:
        row: list[Cell] = [f"{name} †" if name in r.undertrained else name]
        if r.seeds:
            row.append(str(r.seeds[name]))
        for length in r.lengths:
            level = r.table.get(name, "nll", length)
            row.append(NONE if level is None else plain(level.value))
        if is_judged:
            gain = r.table.get(name, "delta", r.lengths[-1])
            row.append(verdict_cell(r, name))
            row.append(NONE if gain is None else interval_text(gain.negated))
        rows.append(row)
    if r.unigram is not None:
        notes.append(f"Unigram model: {r.unigram:.3f}.")
    if r.undertrained:
        notes.append(f"† Undertrained: less than {UNDERTRAINED:g} nats below a unigram model.")
    title = f"{r.title}: NLL in nats per {r.per} by context length, {r.sample}"
    return ReportTable(title, columns, rows, " ".join(notes))


def gains(r: LossResults) -> ReportTable:
    """The verdict and the net gain at the lengths between the trained and the longest length."""
    bound = f"{r.tolerance:g} nats"
    return pivot(
        "Net gain over truncation at shorter lengths",
        [row for name in r.names for row in r.beyond(name) if row.length < r.lengths[-1]],
        gain_cell,
        index={r.noun: lambda row: row.variant},
        note=f"Broken: the upper end is below −{bound}. Held: the one-sided 97.5% lower bound is "
        f"above −{bound} here and at every shorter length. Otherwise inconclusive.",
    )


def differences(r: LossResults) -> ReportTable:
    """Every variant against the baseline."""
    rows = r.table.select("difference")
    note = "Nats; negative is better."
    if any(math.isfinite(row.low) for row in rows):
        note += f" Intervals simultaneous over {r.difference_family} comparisons."
    if paired := sorted({row.variant for row in rows if row.note}):
        note += f" Paired by seed, same checkpoints as {r.baseline}: {', '.join(paired)}."
    index = {r.noun: lambda row: row.variant}
    return pivot(r.against, rows, difference_cell, index=index, note=note)


def gain_cell(row: ResultRow) -> Cell:
    """The net gain of a change, with its verdict."""
    word = f"{row.verdict} " if row.verdict != POINTS_ONLY else ""
    return TableCell(word + interval_text(row.negated), TONES.get(row.verdict, ""))


def difference_cell(row: ResultRow) -> TableCell:
    """Colored by its sign if the interval excludes zero."""
    tone = ""
    if row.low > 0:
        tone = "bad"
    elif row.high < 0:
        tone = "good"
    return TableCell(interval_text(row), tone)


def verdict_cell(r: LossResults, name: str) -> Cell:
    """`held to 512, broken at 2,048`."""
    if not r.beyond(name):
        return "flat by construction" if name == TRUNCATE else NONE
    if not r.claims(name):
        return POINTS_ONLY
    held, broken, text = outcome(r, name)
    tone = ""
    if broken < math.inf:
        tone = "bad"
    elif -held == r.lengths[-1]:
        tone = "good"
    return TableCell(text, tone)


# Sentences.


def outcome(r: LossResults, name: str) -> tuple[float, float, str]:
    """Minus the longest length held, the shortest length broken, and both in words: in the order of
    the best."""
    held = r.table.value(name, "held_to") or 0
    broken = r.table.value(name, "break_point") or math.inf
    words = [f"held to {held:,.0f}"] if held else []
    words += [f"broken at {broken:,.0f}"] if broken < math.inf else []
    return -held, broken, ", ".join(words) or INCONCLUSIVE


def verdict(r: LossResults) -> str:
    """Which variants held to which length: the answer in one sentence."""
    l0 = r.trained_length
    longest = r.lengths[-1]
    if longest <= l0:
        text = f"Only lengths up to the trained length {l0:,} were measured: no verdicts."
        return warning(r) + text
    outcomes: dict[tuple, list[str]] = {}
    for name in filter(r.claims, r.names):
        outcomes.setdefault(outcome(r, name), []).append(name)
    parts = [f"{named(r, outcomes[key])} {key[-1]}" for key in sorted(outcomes)]
    if not parts:
        parts = [f"no verdicts, too few {'training seeds or ' if r.seeds else ''}{r.unit_kind}s"]
    setup = f"Trained at {l0:,} tokens, evaluated up to {longest:,} ({longest / l0:.3g}×)"
    return f"{warning(r)}{setup}: {'; '.join(parts)}."


def warning(r: LossResults) -> str:
    """The start of the first line of a report that has undertrained models."""
    if not r.undertrained:
        return ""
    names = named(r, r.undertrained)
    return f"Undertrained (†): {names}; a model that has learned nothing holds at any length. "


def details(r: LossResults) -> list[str]:
    """Use of context, and differences from the baseline, in sentences without numbers of the
    tables."""
    lines = []
    longest = r.lengths[-1]
    changes = [row for row in r.table.select("delta") if row.length == longest]
    signs = by_sign(r, [row.negated for row in changes if row.verdict], "positive", "negative")
    if signs:
        none = "" if "positive" in signs else f"positive for no {r.noun}; "
        lines.append(f"Net gain over truncation at {longest:,}: {none}{signs}.")
    rows = r.table.select("difference")
    lengths = sorted({row.length for row in rows})
    for length in dict.fromkeys((*lengths[:1], *lengths[-1:])):
        here = [row for row in rows if row.length == length]
        if signs := by_sign(r, here, "higher (worse)", "lower (better)"):
            lines.append(f"{r.against} at {length:,}: {signs}.")
    reaches: dict[str, list[str]] = {}
    for row in r.table.select("context_reach"):
        reaches.setdefault(row.note, []).append(row.variant)
    if reaches:
        parts = [f"{text} ({named(r, names)})" for text, names in reaches.items()]
        lines.append(f"Context reach: {'; '.join(parts)}.")
    return lines + read_gain_sentences(r)


# Figures.


def styles(r: LossResults) -> Styles:
    """The variant that the others are compared with is black, as is a run as trained."""
    ink = r.baseline or name_of(TRAINED)
    names = [name for name in r.names if name != TRUNCATE]
    return styles_of(names, ink, r.table.select("nll"), r.undertrained)


def loss_figure(
    r: LossResults,
    text: FigureText,
    styles: Styles,
) -> Figure:
    """NLL by length, a line per variant, above the differences with their intervals."""
    axis = LengthAxis(r.lengths, sorted({r.trained_length, *r.also_trained}))
    rows = [row for row in r.table.select("nll", seed=None) if row.variant != TRUNCATE]
    levels = []
    if r.truncated is not None:
        of = f"{r.baseline} " if r.baseline and r.seeds else "context "
        levels.append((f"{of}truncated to {r.trained_length:,}  {{}}", r.truncated))
    top = top_of_colored(rows, styles)
    plain_rows = [row._replace(low=math.nan, high=math.nan) for row in rows]
    shown: list[Panel] = [
        length_panel(plain_rows, styles, axis, y=f"NLL, nats per {r.per}", levels=levels, top=top)
    ]
    if not r.seeds:  # a study has figures of its own
        heading = "net gain over truncation, nats"
        rows = [row.negated for row in r.table.select("delta") if row.verdict]
        if r.baseline:
            heading = f"{r.against}, nats"
            rows = r.table.select("difference")
        shown.append(difference_panel(rows, styles, axis, heading, r.tolerance))
    return panels(shown, text, x="context length, tokens (log scale)")


def gain_figure(r: LossResults, text: FigureText, styles: Styles) -> Figure:
    """Net gain over truncation by length; all lines begin at the trained length, where the gain as
    trained is 0."""
    rows = [row.negated for row in r.table.select("delta") if row.length >= r.trained_length]
    rows = [row for row in rows if r.beyond(row.variant)]
    axis = LengthAxis(sorted({row.length for row in rows}), [r.trained_length])
    panel = length_panel(
        rows,
        styles,
        axis,
        y="net gain, nats",
        levels=[("truncated to the trained length", 0.0)],
        band=r.tolerance,
    )
    return panels([panel], text, x="context length, tokens (log scale)")


def differences_figure(r: LossResults, text: FigureText, styles: Styles) -> Figure:
    """Differences from the baseline with intervals, sorted, at up to three primary lengths."""
    lengths = list(r.primary)
    if len(lengths) > 3:  # the table has all of them
        kept = {r.trained_length, lengths[len(lengths) // 2], lengths[-1]}
        lengths = [n for n in lengths if n in kept]
    rows = [row for row in r.table.select("difference") if row.length in lengths]
    shown = [
        dots_panel(
            sorted((row for row in rows if row.length == n), key=lambda row: row.value),
            styles,
            heading=f"at {n:,} tokens" + (", the trained length" if n == r.trained_length else ""),
            band=r.tolerance,
            shared=rows,
        )
        for n in lengths
    ]
    x = f"{r.against}, nats (linear within ±{r.tolerance:g}; negative: better)"
    return panels(shown, text, x=x)


def bars_note(rows: Iterable[ResultRow], intervals: str) -> str:
    """What the bars and the shaded band of differences are, if any interval is drawn."""
    drawn = any(row.high > row.low for row in rows)
    return f"Bars: {intervals}. Shaded: within the tolerance." if drawn else ""


# One run.


def loss_report(
    result: EvaluationResult,
    analysis: Analysis,
    name: str = "loss",
) -> EvaluationReport:
    r = loss_results(record_of(result, analysis), analysis.table, result.subject.name)
    r.table.extend(read_gain_rows(r.facts))
    r.table.extend(position_rows(r.facts))
    protocol = result.plan.protocol
    report = EvaluationReport(
        name=name,
        title=f"Loss of {r.title}",
        results=r,
        verdict=verdict(r),
        details=[*details(r), *reference(result, r), result.screening.sentence],
        caveats=caveats(r.units, r.unit_kind, {"": result}, analysis.notes),
        tables=[overview(r), read_gain_table(r)],
        more_tables=[gains(r)],
        draw=lambda: {"nll_by_length": loss_figure(r, text, styles(r))},
        more_records={"targets.json": result.plan.record},
    )
    same, at_each = ("the same ", " at every length") if protocol == "fixed-targets" else ("", "")
    subtitle = f"{r.title}: {same}{r.sample}{at_each} ({protocol})"
    gain_rows = [row for row in r.table.select("delta") if row.verdict]
    text = FigureText("Loss beyond the trained length", subtitle, bars_note(gain_rows, r.intervals))
    if analysis.buckets:
        report.tables = position_tables(r)
        report.more_tables = ()
        report.draw = lambda: {"nll_by_position": position_figure(r, styles(r))}
        report.verdict = warning(r) + position_verdict(r)
    return report


def loss_results(record: dict, table: ResultsTable, title: str) -> LossResults:
    """The results of one run, whose record (results.json) has the facts."""
    methods = list(record["methods"])
    if record["settings"].get("matrix"):  # best first at the longest length
        last = {cell["method"]: cell["nll"] or math.inf for cell in record["cells"]}
        last |= {TRAINED: -math.inf, TRUNCATE: -math.inf}
        methods.sort(key=lambda method: last.get(method, math.inf))
    unigram = record["unigram_nll"]
    truncated = record["truncated_nll"]
    return LossResults(
        title=title,
        variants=method_variants(methods),
        facts=record,
        table=table,
        lengths=record["lengths"],
        unit_kind=record["unit"],
        units=len(record["units"]["names"]),
        tolerance=record["tolerance"],
        confidence=record["confidence"],
        family=record["family"],
        truncated=truncated,
        unigram=unigram,
        undertrained=[*map(name_of, methods)] if is_undertrained(truncated, unigram) else [],
    )


def reference(result: EvaluationResult, r: LossResults) -> list[str]:
    """The loss as trained, what intervals describe, and the methods that do not apply."""
    lines = []
    trained = r.table.get(name_of(TRAINED), "perplexity", r.trained_length)
    bits = r.table.get(name_of(TRAINED), "bits_per_byte", r.trained_length)
    if trained:
        more = f", {bits.value:.3f} bits per byte" if bits else ""
        lines.append(f"As trained at {r.trained_length:,}: perplexity {trained.value:.2f}{more}.")
    documents = counted(r.facts["documents"], "document")
    lines.append(f"{documents}; intervals describe this checkpoint, not the positional scheme.")
    if result.left_out:
        reasons = [f"{label} ({reason})" for label, reason in result.left_out.items()]
        lines.append(f"Built-in methods that do not apply here: {', '.join(reasons)}.")
    return lines


def cell_of(result: EvaluationResult, table: ResultsTable, method: str, length: int) -> dict:
    """One method at one length in results.json: what a study reads, besides the scheme."""
    cell = (method, length)
    return {
        "method": method,
        "length": length,
        **{metric: table.value(name_of(method), metric, length) for metric in NUMBERS},
        "failure": result.absent.get(cell) or result.failed.get(cell),
        "scheme": describe_scheme(result, method, length),
        "exists": cell not in result.absent,
        "unit_nll": by_unit(result, result.nll.get(cell)),
    }


def by_unit(result: EvaluationResult, nll: np.ndarray | None) -> list[float] | None:
    """Mean NLL of each unit in the order of `units`."""
    return None if nll is None else unit_means(nll, result.unit).tolist()


def record_of(result: EvaluationResult, analysis: Analysis) -> dict:
    """The content of results.json."""
    ids, counts = np.unique(result.unit, return_counts=True)
    units = {
        "kind": result.unit_kind,
        "names": [result.unit_names[i] if result.unit_names else str(i) for i in ids],
        "targets": counts.tolist(),
    }
    return {
        **basis(result),
        "targets": len(result.document),
        "documents": len(np.unique(result.document)),
        "unit": result.unit_kind,
        "family": analysis.family,
        "tolerance": result.settings.tolerance,
        "bos": result.settings.bos,
        "targets_hash": result.plan.hash,
        "lengths": result.plan.lengths,
        "left_out": result.left_out,
        "contamination": result.screening.record,
        "units": units,
        "unigram_nll": analysis.unigram,
        "unigram_unit_nll": by_unit(result, result.unigram),
        "truncated_nll": analysis.truncated,
        "truncated_unit_nll": by_unit(result, result.truncated),
        "cells": [
            cell_of(result, analysis.table, method.label, length)
            for method in result.methods
            for length in result.plan.lengths
            if (method.label, length) in result.nll | result.absent | result.failed
        ],
        "by_position": analysis.buckets,
        "per_target_nll": result.files,
        **read_gain_record(result, analysis),
    }
