"""Loss of text by length or by position: of one run under several methods, of several runs, or of
the schemes of a study. Their tables, sentences and figures are the same views of the table of
results."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure

from errors import EvaluationError
from evaluation.reports.document import (
    NONE,
    Cell,
    ReportTable,
    TableCell,
    counted,
    dtype_note,
    interval_text,
    listed,
    pivot,
    plain,
)
from evaluation.reports.figures import (
    FigureText,
    LengthAxis,
    Panel,
    Styles,
    difference_panel,
    dots_panel,
    length_panel,
    panels,
    styles_of,
    top_of_colored,
)
from evaluation.reports.report import (
    EvaluationReport,
    ReportedResults,
    basis,
    caveats,
    melted,
    method_variants,
)
from evaluation.results_table import ResultRow, ResultsTable, number
from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRAINED, TRUNCATE, name_of
from evaluation.statistics.intervals import unit_counts, unit_means
from evaluation.statistics.loss_table import (
    INCONCLUSIVE,
    POINTS_ONLY,
    UNDERTRAINED,
    Analysis,
    VerdictRules,
    add_levels,
    is_undertrained,
    losses_of,
)

TONES = {"held": "good", "broken": "bad"}
NUMBERS = ("nll", "bits_per_byte", "bfloat16_minus_float32")  # of a cell of results.json
CONTEXT = "context length, tokens (log scale)"


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
        nll_at_positions,                (one length) of the positions from `at` to before `until`,
        gain_at_positions                and their gain over truncation
        failure                          `note`: why there is no number

    Of a study also nll_as_trained (at L0) and unigram_nll, and nll and nll_as_trained of each seed.

    Attributes:
        lengths: of the grid.
        unit_kind, units: the independent units of the intervals.
        family, difference_family: numbers of simultaneous verdicts and differences.
        truncated: NLL of the baseline with its context truncated to the trained length.
        unigram: NLL of a unigram model on the same targets.
        undertrained: variants of models hardly better than that.
        imprecise: variants whose bfloat16 is too far from float32 for verdicts.
        baseline: the variant that the others are compared with, at the lengths `primary`.
        per: what losses are per: token, or byte where tokenizers differ.
        missing: (variant or cell of a study, reason) and the lengths without comparable numbers.
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
    imprecise: Sequence[str] = ()
    baseline: str | None = None
    primary: Sequence[int] = ()
    also_trained: Sequence[int] = ()  # trained lengths of further runs
    per: str = "token"
    missing: dict[tuple[str, str], str] = field(default_factory=dict)

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
            targets += f", {self.seed_counts('seed')} per {self.noun}"
        return targets + dtype_note(self.facts.get("dtype", "float32"))

    @property
    def intervals(self) -> str:
        """What simultaneous intervals of gains are, or '' where none is reported."""
        if not any(map(self.claims, self.names)):
            return ""
        over = f"seeds and {self.unit_kind}s" if self.seeds else f"{self.unit_kind}s"
        note = f"{100 * self.confidence:g}% intervals over {over}"
        return note if self.family == 1 else f"{note}, simultaneous over {self.family}"


def loss_styles(r: LossResults, names: Sequence[str] = ()) -> Styles:
    """The variant that the others are compared with is black, as is a run as trained."""
    names = [name for name in names or r.names if name != TRUNCATE]
    ink = r.baseline or name_of(TRAINED)
    return styles_of(names, ink, r.table.select("nll"), r.undertrained)


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
            level = r.table.value(name, "nll", length)
            row.append(NONE if level is None else plain(level))
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

    def write(row: ResultRow) -> Cell:
        word = f"{row.verdict} " if row.verdict != POINTS_ONLY else ""
        return TableCell(word + interval_text(row.negated), TONES.get(row.verdict, ""))

    bound = f"{r.tolerance:g} nats"
    return pivot(
        "Net gain over truncation at shorter lengths",
        [row for name in r.names for row in r.beyond(name) if row.inputs < r.lengths[-1]],
        write,
        index={r.noun: lambda row: row.variant},
        note=f"Broken: the upper end is below −{bound}. Held: the one-sided 97.5% lower bound is "
        f"above −{bound} here and at every shorter length. Otherwise inconclusive.",
    )


def differences(r: LossResults) -> ReportTable:
    """Every variant against the baseline, colored by sign if the interval excludes zero."""

    def write(row: ResultRow) -> Cell:
        tone = "bad" if row.low > 0 else "good" if row.high < 0 else ""
        return TableCell(interval_text(row), tone)

    rows = r.table.select("difference")
    note = "Nats; negative is better."
    if any(math.isfinite(row.low) for row in rows):
        note += f" Intervals simultaneous over {r.difference_family} comparisons."
    if paired := sorted({row.variant for row in rows if row.note}):
        note += f" Paired by seed, same checkpoints as {r.baseline}: {', '.join(paired)}."
    return pivot(r.against, rows, write, index={r.noun: lambda row: row.variant}, note=note)


def read_gain_table(r: ReportedResults) -> ReportTable:
    """What is read of repeated text, by distance and length."""
    rows = r.table.select("read_gain")
    rows.sort(key=lambda row: (r.names.index(row.variant), row.at))
    return pivot(
        "Read gain by distance and length",
        rows,
        interval_text,
        index={r.noun: lambda row: row.variant, "distance": positions},
        note="Nats: NLL after the earlier text was replaced minus NLL; individual intervals.",
    )


def position_tables(r: ReportedResults) -> list[ReportTable]:
    """A row per bucket of positions, a column per variant."""
    views = {
        f"NLL by position, {r.subtitle}": ("nll_at_positions", lambda row: plain(row.value)),
        f"Gain over the context truncated to {r.trained_length:,}": (
            "gain_at_positions",
            interval_text,
        ),
    }
    return [
        pivot(
            title,
            r.table.select(metric),
            write,
            index={"positions": positions},
            columns=lambda row: row.variant,
            headings={name: name for name in r.names},
            note="Different tokens at each position: not comparable with fixed targets.",
        )
        for title, (metric, write) in views.items()
    ]


def positions(row: ResultRow) -> str:
    """`256–511`."""
    first, end = row.bounds
    last = end - 1
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def verdict_cell(r: LossResults, name: str) -> Cell:
    """`held to 512, broken at 2,048`."""
    if not r.beyond(name):
        return "flat by construction" if name == TRUNCATE else NONE
    if not r.claims(name):
        return POINTS_ONLY
    held, broken, text = outcome(r, name)
    tone = "bad" if broken < math.inf else "good" if -held == r.lengths[-1] else ""
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
    parts = [f"{r.named(outcomes[key])} {key[-1]}" for key in sorted(outcomes)]
    if not parts:
        parts = [f"no verdicts, too few {'training seeds or ' if r.seeds else ''}{r.unit_kind}s"]
    setup = f"Trained at {l0:,} tokens, evaluated up to {longest:,} ({longest / l0:.3g}×)"
    return f"{warning(r)}{setup}: {'; '.join(parts)}."


def warning(r: LossResults) -> str:
    """The start of the first line of a report that has undertrained models."""
    if not r.undertrained:
        return ""
    names = r.named(r.undertrained)
    return f"Undertrained (†): {names}; a model that has learned nothing holds at any length. "


def position_verdict(r: ReportedResults) -> str:
    """The sign of the gain at the last positions."""
    rows = r.table.select("gain_at_positions")
    last = max(row.bounds[0] for row in rows)
    signs = r.by_sign([row for row in rows if row.at == last], "positive", "negative")
    return f"Gain over truncation from position {last:,} on: {signs or 'point estimates only'}."


def details(r: LossResults) -> list[str]:
    """Use of context, differences from the baseline and what is read, in sentences without numbers
    of the tables."""
    lines = []
    longest = r.lengths[-1]
    changes = [row for row in r.table.select("delta") if row.length == longest]
    signs = r.by_sign([row.negated for row in changes if row.verdict], "positive", "negative")
    if signs:
        none = "" if "positive" in signs else f"positive for no {r.noun}; "
        lines.append(f"Net gain over truncation at {longest:,}: {none}{signs}.")
    rows = r.table.select("difference")
    lengths = sorted({row.inputs for row in rows})
    for length in dict.fromkeys((*lengths[:1], *lengths[-1:])):
        here = [row for row in rows if row.length == length]
        if signs := r.by_sign(here, "higher (worse)", "lower (better)"):
            lines.append(f"{r.against} at {length:,}: {signs}.")
    reaches: dict[str, list[str]] = {}
    for row in r.table.select("context_reach"):
        reaches.setdefault(row.note, []).append(row.variant)
    if reaches:
        parts = [f"{text} ({r.named(names)})" for text, names in reaches.items()]
        lines.append(f"Context reach: {'; '.join(parts)}.")
    if rows := r.table.select("read_gain"):
        farthest: dict[str, float] = {}
        for row in rows:
            if row.low > 0:
                farthest[row.variant] = max(row.bounds[1] - 1, farthest.get(row.variant, 0))
        parts = [f"{name} up to {distance:,}" for name, distance in farthest.items()]
        lines.append(f"Read gains are shown for {listed(parts) or 'no distance'} tokens.")
    return lines


# Figures.


def loss_figure(r: LossResults, text: FigureText, styles: Styles) -> Figure:
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
    return panels(shown, text, x=CONTEXT)


def position_figure(r: ReportedResults, styles: Styles) -> Figure:
    """NLL by position, above the gain over truncation."""
    rows = r.table.select("nll_at_positions")
    longest = int(max(row.bounds[1] for row in rows))
    ticks = [float(2**k) for k in range(longest.bit_length())]
    axis = LengthAxis(ticks, [r.trained_length], tokens_seen)
    text = FigureText(
        f"NLL by position in a window of {longest:,} tokens",
        r.subtitle,
        f"Different tokens at each position; methods use the factor for {longest:,}.",
    )
    heading = f"gain over the context truncated to {r.trained_length:,}, nats"
    gain_rows = r.table.select("gain_at_positions")
    shown = [
        length_panel(rows, styles, axis, y="NLL, nats per token"),
        difference_panel(gain_rows, styles, axis, heading, r.facts.get("tolerance", 0.02)),
    ]
    return panels(shown, text, x="tokens seen (log scale)")


def tokens_seen(row: ResultRow) -> float:
    """Position p sees p + 1 tokens; a bucket is drawn at its geometric center in tokens seen."""
    first, end = row.bounds
    return math.sqrt((first + 1) * end)


def gain_figure(r: LossResults, text: FigureText, styles: Styles) -> Figure:
    """Net gain over truncation by length; all lines begin at the trained length, where the gain as
    trained is 0."""
    rows = [row.negated for row in r.table.select("delta") if row.inputs >= r.trained_length]
    rows = [row for row in rows if r.beyond(row.variant)]
    axis = LengthAxis(sorted({row.inputs for row in rows}), [r.trained_length])
    levels = [("truncated to the trained length", 0.0)]
    y = "net gain, nats"
    panel = length_panel(rows, styles, axis, y=y, levels=levels, band=r.tolerance)
    return panels([panel], text, x=CONTEXT)


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
    result: EvaluationResult, analysis: Analysis, name: str = "loss"
) -> EvaluationReport:
    r = loss_results(record_of(result, analysis), analysis.table, result.subject.name)
    report = EvaluationReport(
        name=name,
        title=f"Loss of {r.title}",
        results=r,
        verdict=verdict(r),
        details=[*details(r), *reference(result, r), result.screening.sentence],
        caveats=caveats(r.units, r.unit_kind, {"": result}, analysis.notes),
        tables=[overview(r), read_gain_table(r)],
        more_tables=[gains(r)],
        draw=lambda: {"nll_by_length": loss_figure(r, text, loss_styles(r))},
        more_records={"targets.json": result.plan.record},
    )
    protocol = result.plan.protocol
    same, at_each = ("the same ", " at every length") if protocol == "fixed-targets" else ("", "")
    subtitle = f"{r.title}: {same}{r.sample}{at_each} ({protocol})"
    gain_rows = [row for row in r.table.select("delta") if row.verdict]
    text = FigureText("Loss beyond the trained length", subtitle, bars_note(gain_rows, r.intervals))
    if analysis.buckets:
        report.tables = position_tables(r)
        report.more_tables = ()
        report.draw = lambda: {"nll_by_position": position_figure(r, loss_styles(r))}
        report.verdict = warning(r) + position_verdict(r)
    return report


def loss_results(record: dict, table: ResultsTable, title: str) -> LossResults:
    """The results of one run, whose record (results.json) has the facts; its repeated text and
    positions are added to the table."""
    methods = list(record["methods"])
    if record["settings"].get("matrix"):  # best first at the longest length
        last = {cell["method"]: cell["nll"] or math.inf for cell in record["cells"]}
        last |= {TRAINED: -math.inf, TRUNCATE: -math.inf}
        methods.sort(key=lambda method: last.get(method, math.inf))
    table.extend(read_gain_rows(record))
    table.extend(position_rows(record))
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
    trained = r.table.value(name_of(TRAINED), "perplexity", r.trained_length)
    bits = r.table.value(name_of(TRAINED), "bits_per_byte", r.trained_length)
    if trained:
        more = f", {bits:.3f} bits per byte" if bits else ""
        lines.append(f"As trained at {r.trained_length:,}: perplexity {trained:.2f}{more}.")
    documents = counted(r.facts["documents"], "document")
    lines.append(f"{documents}; intervals describe this checkpoint, not the positional scheme.")
    if result.left_out:
        reasons = [f"{label} ({reason})" for label, reason in result.left_out.items()]
        lines.append(f"Built-in methods that do not apply here: {', '.join(reasons)}.")
    return lines


def record_of(result: EvaluationResult, analysis: Analysis) -> dict:
    """The content of results.json."""
    ids, counts = np.unique(result.unit, return_counts=True)
    units = {
        "kind": result.unit_kind,
        "names": [result.unit_names[i] if result.unit_names else str(i) for i in ids],
        "targets": counts.tolist(),
    }

    def by_unit(nll: np.ndarray | None) -> list[float] | None:
        """Mean NLL of each unit in the order of `units`."""
        return None if nll is None else unit_means(nll, result.unit).tolist()

    cells = []
    for method in result.methods:
        notes = losses_of(result, method.label).notes
        for length in result.plan.lengths:
            cell = (method.label, length)
            name = name_of(method.label)
            if cell in result.nll | result.absent | result.failed:
                cells.append({
                    "method": method.label,
                    "length": length,
                    **{metric: analysis.table.value(name, metric, length) for metric in NUMBERS},
                    "failure": result.absent.get(cell) or result.failed.get(cell),
                    "scheme": notes.get(length),
                    "exists": cell not in result.absent,
                    "unit_nll": by_unit(result.nll.get(cell)),
                })  # fmt: skip
    record = {
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
        "unigram_unit_nll": by_unit(result.unigram),
        "truncated_nll": analysis.truncated,
        "truncated_unit_nll": by_unit(result.truncated),
        "cells": cells,
        "by_position": analysis.buckets,
        "per_target_nll": result.files,
    }
    if repeats := result.plan.repeats:
        cells = analysis.read_gains
        record["repeated"] = {"hash": repeats.hash, "ngram": repeats.ngram, "cells": cells}
    return record


def position_rows(record: dict) -> Iterator[ResultRow]:
    """The rows of the table of `by_position` in a record."""
    for method, buckets in record["by_position"].items():
        for bucket in buckets:
            name = name_of(method)
            at = bucket["low"]
            until = bucket["high"]
            yield ResultRow(name, "nll_at_positions", bucket["nll"], at=at, until=until)
            gain = bucket["gain"]
            yield ResultRow(
                variant=name,
                metric="gain_at_positions",
                value=gain["estimate"],
                at=at,
                until=until,
                low=number(gain.get("low")),
                high=number(gain.get("high")),
            )


def read_gain_rows(record: dict) -> Iterator[ResultRow]:
    """The rows of the table of repeated text in a record."""
    for cell in record.get("repeated", {}).get("cells", ()):
        place = {"at": cell["distance_low"], "until": cell["distance_high"]}
        cell = {**cell, "repeated_nll": cell["nll"]}
        for row in melted([cell], ("repeated_nll", "control_nll", "read_gain")):
            is_read = row.metric != "read_gain" or cell["readable"]
            if is_read and cell["method"] != TRUNCATE:
                note = f"{cell['targets']} targets"
                yield row._replace(note=note, units=len(cell["units"]), **place)


# Several runs.


def comparison_report(
    names: Sequence[str], results: Sequence[EvaluationResult], name: str, facts: dict
) -> EvaluationReport:
    """Every run under each of its methods on the same targets. Differences from the first run are
    paired by target; their intervals are over units and simultaneous over all differences.

    Args:
        names: of the runs.
        facts: (corpus, command, date) for results.json.

    Raises:
        EvaluationError: two runs were not scored on the same targets.
    """
    first = results[0]
    runs = dict(zip(names, results, strict=True))
    for run, other in runs.items():
        if other.plan.hash != first.plan.hash or not np.array_equal(other.document, first.document):
            raise EvaluationError(
                f"{run} and {names[0]} have different targets; evaluate both with equal settings"
            )
    variants = {}
    losses = {}
    undertrained = []
    for run, result in runs.items():
        for method in result.methods:
            label = run if method.label == TRAINED else f"{run}, {method.label}"
            variants[label] = {"run": result.subject.name, "method": method.label}
            losses[label] = losses_of(result, method.label)
            means = [None if x is None else x.mean() for x in (result.truncated, result.unigram)]
            if is_undertrained(*means):
                undertrained.append(label)
    baseline, *_ = losses.values()
    pairs = [  # truncation to the trained length changes nothing there: it is the same array
        (label, length)
        for label, own in losses.items()
        for length in first.plan.lengths
        if length in own.nll and length in baseline.nll
        if own.nll[length] is not baseline.nll[length]
    ]
    record = {
        **facts,
        **first.facts,
        "protocol": first.plan.protocol,
        "trained_length": first.subject.trained_length,
        "dtype": first.settings.dtype,
        "targets_hash": first.plan.hash,
        "targets": len(first.document),
        "family": max(1, len(pairs)),
        "runs": [
            {
                "run": run.subject.name,
                "step": run.subject.step,
                "checkpoint_hash": run.subject.checkpoint_hash,
                "train_length": run.subject.trained_length,
            }
            for run in results
        ],
    }
    r = LossResults(
        title=f"{len(runs)} runs",
        variants=variants,
        noun="run",
        facts=record,
        lengths=first.plan.lengths,
        unit_kind=first.unit_kind,
        units=len(np.unique(first.unit)),
        tolerance=first.settings.tolerance,
        confidence=first.settings.confidence,
        difference_family=record["family"],
        undertrained=undertrained,
        baseline=names[0],
        per="token" if first.plan.span_bytes is None else "byte",
        also_trained=[run.subject.trained_length for run in results],
    )
    alpha = 1 - r.confidence
    rules = VerdictRules(r.trained_length, r.tolerance, unit_counts(first.unit), alpha)
    for label, own in losses.items():
        add_levels(r.table, label, own, rules)
    for label, length in pairs:
        change = losses[label].by_unit(losses[label].nll[length] - baseline.nll[length])
        difference = rules.interval(change, alpha=alpha, family=r.difference_family)
        r.table.add(label, "difference", difference, length)
    over = f"{100 * r.confidence:g}% intervals over {r.unit_kind}s, simultaneous over all"
    text = FigureText(
        "Loss of several runs by context length",
        f"The same {r.sample} at every length ({first.plan.protocol})",
        bars_note(r.table.select("difference"), f"{over} {r.difference_family}"),
    )
    *sentences, last = details(r) or [f"{r.against}: point estimates only."]
    return EvaluationReport(
        name=name,
        title=f"Loss of {listed(list(names))}",
        results=r,
        verdict=warning(r) + last,
        details=[
            *sentences,
            *(
                f"{run}: {each.subject.name}, step {each.subject.step}, trained at "
                f"{each.subject.trained_length:,}."
                for run, each in runs.items()
            ),
            "Differences describe these checkpoints, not a training method.",
            first.screening.sentence,
        ],
        caveats=caveats(r.units, r.unit_kind, runs),
        tables=[overview(r), differences(r)],
        draw=lambda: {"nll_by_length": loss_figure(r, text, loss_styles(r))},
        more_records={"targets.json": first.plan.record},
    )
