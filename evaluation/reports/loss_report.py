"""Loss of text by length or by position, for one run under several methods, for several runs, or
for the schemes of a study. Tables, sentences and figures of all three are the same views of the
table of results."""

import math
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from errors import EvaluationError
from evaluation.methods import TRAINED, TRUNCATE, name_of
from evaluation.reports.document import (
    NONE,
    Cell,
    ReportTable,
    TableCell,
    counted,
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
from evaluation.reports.loss_results import LossResults, loss_results
from evaluation.reports.loss_results_json import comparison_record, position_rows, record_of
from evaluation.reports.report import EvaluationReport, ReportedResults, caveats
from evaluation.scoring.text_loss import LossMeasurement
from evaluation.statistics.loss_verdicts import INCONCLUSIVE, POINTS_ONLY, PRECISION, UNDERTRAINED
from evaluation.statistics.results_table import ResultRow, results_table, select_one
from evaluation.statistics.stored_results import StoredResults

TONES = {"held": "good", "broken": "bad"}
CONTEXT = "context length, tokens (log scale)"


def loss_styles(r: LossResults, names: Sequence[str] = ()) -> Styles:
    """Styles of the variants. The baseline, or else the run as trained, is black."""
    names = [name for name in names or r.names if name != TRUNCATE]
    ink = r.baseline or name_of(TRAINED)
    return styles_of(names, ink, r.rows("nll"), r.undertrained)


# Tables.


def overview(r: LossResults) -> ReportTable:
    """A row per variant: NLL at every length, the verdict, and the net gain at the longest
    length."""
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
            level = r.value("nll", name, length)
            row.append(NONE if level is None else plain(level))
        if is_judged:
            gain = select_one(r.table, "delta", name, r.lengths[-1])
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

    rows = r.rows("difference")
    note = "Nats; negative is better."
    if any(math.isfinite(row.low) for row in rows):
        note += f" Intervals simultaneous over {r.difference_family} comparisons."
    if paired := sorted({row.variant for row in rows if row.note}):
        note += f" Paired by seed, same checkpoints as {r.baseline}: {', '.join(paired)}."
    return pivot(r.against, rows, write, index={r.noun: lambda row: row.variant}, note=note)


def read_gain_table(r: ReportedResults) -> ReportTable:
    """The read gain of repeated text by distance and length."""
    rows = r.rows("read_gain")
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
            r.rows(metric),
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
    if not r.has_verdicts(name):
        return POINTS_ONLY
    held, broken, text = outcome(r, name)
    tone = "bad" if broken < math.inf else "good" if -held == r.lengths[-1] else ""
    return TableCell(text, tone)


# Sentences.


def outcome(r: LossResults, name: str) -> tuple[float, float, str]:
    """A sort key, best first: (−longest length held, shortest length broken, both in words)."""
    held = r.value("held_to", name) or 0
    broken = r.value("break_point", name) or math.inf
    words = [f"held to {held:,.0f}"] if held else []
    words += [f"broken at {broken:,.0f}"] if broken < math.inf else []
    return -held, broken, ", ".join(words) or INCONCLUSIVE


def verdict(r: LossResults) -> str:
    """One sentence that states which variants held to which length."""
    l0 = r.trained_length
    longest = r.lengths[-1]
    if longest <= l0:
        text = f"Only lengths up to the trained length {l0:,} were measured: no verdicts."
        return warning(r) + text
    outcomes: dict[tuple, list[str]] = {}
    for name in filter(r.has_verdicts, r.names):
        outcomes.setdefault(outcome(r, name), []).append(name)
    parts = [f"{r.named(outcomes[key])} {key[-1]}" for key in sorted(outcomes)]
    if not parts:
        few = f", too few {'training seeds or ' if r.seeds else ''}{r.unit_kind}s"
        parts = [f"no verdicts{few if any(map(r.beyond, r.names)) else ''}"]
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
    rows = r.rows("gain_at_positions")
    last = max(row.bounds[0] for row in rows)
    signs = r.by_sign([row for row in rows if row.at == last], "positive", "negative")
    return f"Gain over truncation from position {last:,} on: {signs or 'point estimates only'}."


def details(r: LossResults) -> list[str]:
    """Sentences on use of context, differences from the baseline and read gains, without the
    numbers of the tables."""
    lines = []
    longest = r.lengths[-1]
    changes = [row for row in r.rows("delta") if row.length == longest]
    signs = r.by_sign([row.negated for row in changes if row.verdict], "positive", "negative")
    if signs:
        none = "" if "positive" in signs else f"positive for no {r.noun}; "
        lines.append(f"Net gain over truncation at {longest:,}: {none}{signs}.")
    rows = r.rows("difference")
    lengths = sorted({row.inputs for row in rows})
    for length in dict.fromkeys((*lengths[:1], *lengths[-1:])):
        here = [row for row in rows if row.length == length]
        if signs := r.by_sign(here, "higher (worse)", "lower (better)"):
            lines.append(f"{r.against} at {length:,}: {signs}.")
    reaches: dict[str, list[str]] = {}
    for row in r.rows("context_reach"):
        reaches.setdefault(row.note, []).append(row.variant)
    if reaches:
        parts = [f"{text} ({r.named(names)})" for text, names in reaches.items()]
        lines.append(f"Context reach: {'; '.join(parts)}.")
    if rows := r.rows("read_gain"):
        farthest: dict[str, float] = {}
        for row in rows:
            if row.low > 0:
                farthest[row.variant] = max(row.bounds[1] - 1, farthest.get(row.variant, 0))
        parts = [f"{name} up to {distance:,}" for name, distance in farthest.items()]
        lines.append(f"Read gains are shown for {listed(parts) or 'no distance'} tokens.")
    return lines


def imprecision(r: LossResults) -> list[str]:
    """A sentence that names the variants without verdicts because of rounding errors."""
    if not r.imprecise:
        return []
    return [
        f"No verdicts because of rounding errors of bfloat16 or float16 above "
        f"{PRECISION * r.tolerance:.4f} nats: {listed(r.imprecise)}. Evaluate with dtype=float32."
    ]


# Figures.


def loss_figure(r: LossResults, text: FigureText, styles: Styles) -> Figure:
    """NLL by length, a line per variant, above the differences with their intervals."""
    axis = LengthAxis(r.lengths, sorted({r.trained_length, *r.also_trained}))
    rows = [row for row in r.rows("nll", seed=None) if row.variant != TRUNCATE]
    levels = []
    if r.truncated_nll is not None:
        of = f"{r.baseline} " if r.baseline and r.seeds else "context "
        levels.append((f"{of}truncated to {r.trained_length:,}  {{}}", r.truncated_nll))
    top = top_of_colored(rows, styles)
    plain_rows = [row._replace(low=math.nan, high=math.nan) for row in rows]
    shown: list[Panel | None] = [
        length_panel(plain_rows, styles, axis, y=f"NLL, nats per {r.per}", levels=levels, top=top)
    ]
    if not r.seeds:  # a study has figures of its own
        heading = "net gain over truncation, nats"
        rows = [row.negated for row in r.rows("delta") if row.verdict]
        if r.baseline:
            heading = f"{r.against}, nats"
            rows = r.rows("difference")
        shown.append(difference_panel(rows, styles, axis, heading, r.tolerance))
    return panels(shown, text, x=CONTEXT)


def position_figure(r: ReportedResults, styles: Styles) -> Figure:
    """NLL by position, above the gain over truncation."""
    rows = r.rows("nll_at_positions")
    longest = int(max(row.bounds[1] for row in rows))
    ticks = [float(2**k) for k in range(longest.bit_length())]
    axis = LengthAxis(ticks, [r.trained_length], tokens_seen)
    text = FigureText(
        f"NLL by position in a window of {longest:,} tokens",
        r.subtitle,
        f"Different tokens at each position; methods use the factor for {longest:,}.",
    )
    heading = f"gain over the context truncated to {r.trained_length:,}, nats"
    gain_rows = r.rows("gain_at_positions")
    shown = [
        length_panel(rows, styles, axis, y="NLL, nats per token"),
        difference_panel(gain_rows, styles, axis, heading, r.record.get("tolerance", 0.02)),
    ]
    return panels(shown, text, x="tokens seen (log scale)")


def tokens_seen(row: ResultRow) -> float:
    """Position p sees p + 1 tokens; a bucket is drawn at its geometric center in tokens seen."""
    first, end = row.bounds
    return math.sqrt((first + 1) * end)


def gain_figure(r: LossResults, text: FigureText, styles: Styles) -> Figure:
    """Net gain over truncation by length; all lines begin at the trained length, where the gain as
    trained is 0."""
    rows = [row.negated for row in r.rows("delta") if row.inputs >= r.trained_length]
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
    rows = [row for row in r.rows("difference") if row.length in lengths]
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
    """The meaning of the bars and the shaded band of differences, if any interval is drawn."""
    drawn = any(row.high > row.low for row in rows)
    return f"Bars: {intervals}. Shaded: within the tolerance." if drawn else ""


# Reports.


def loss_report(
    runs: Mapping[str, LossMeasurement], name: str = "loss", facts: dict | None = None
) -> EvaluationReport:
    """The report of one run under its methods, or of several runs, by name, on the same targets.

    Args:
        name: name of the results folder.
        facts: (corpus, command, date) for results.json.

    Raises EvaluationError if no cell of one run has a finite mean, or if runs were not scored on
    the same targets.
    """
    r = results_of(runs, facts or {})
    first = next(iter(runs.values()))
    is_one = len(runs) == 1
    report = EvaluationReport(
        name=name,
        title=f"Loss of {r.title if is_one else listed(list(runs))}",
        results=r,
        caveats=caveats(r.units, r.unit_kind, {"": first} if is_one else runs, imprecision(r)),
        more_records={"targets.json": first.plan.record},
    )
    if is_one:
        describe_run(report, r, first)
    else:
        describe_comparison(report, r, runs)
    return report


def results_of(runs: Mapping[str, LossMeasurement], facts: dict) -> LossResults:
    """The numbers of one run, or of several."""
    first_name, *others = runs
    first = runs[first_name]
    if not others and first.failed and not first.nll:
        raise EvaluationError(
            f"{first.subject.name}: no cell of step {first.subject.step} could be measured, under "
            f"any method at any length ({next(iter(first.failed.values()))}); evaluate another "
            "checkpoint"
        )
    records = {run: record_of(measurement) for run, measurement in runs.items()}
    variants = {}
    results = []
    for run, measurement in runs.items():
        if any(records[run][key] != records[first_name][key] for key in ("targets_hash", "units")):
            raise EvaluationError(
                f"{run} and {first_name} have different targets; evaluate both with equal settings"
            )
        for method in measurement.methods:
            variant = name_of(method.label)
            columns = {"method": method.label}
            if others:
                variant = run if method.label == TRAINED else f"{run}, {method.label}"
                columns = {"run": measurement.subject.name, **columns}
            variants[variant] = columns
            results.append(StoredResults(variant, method.label, "", records[run]))
    record = (comparison_record(runs) if others else records[first_name]) | facts
    r = loss_results(
        results,
        variants,
        title=f"{len(runs)} runs" if others else first.subject.name,
        noun="run" if others else "method",
        record=record,
        baseline=first_name if others else None,
        tolerance=first.settings.tolerance,
        confidence=first.settings.confidence,
        also_trained=[run.subject.trained_length for run in runs.values()],
        per="token" if first.plan.span_bytes is None else "byte",
    )
    record["family"] = r.difference_family if others else r.family
    if not others:
        r.truncated_nll = first.truncated_mean
        r.unigram = first.unigram_mean
        more = results_table(position_rows(record))
        r.table = pd.concat([r.table, more], ignore_index=True)
    return r


def describe_run(report: EvaluationReport, r: LossResults, measurement: LossMeasurement) -> None:
    """Add the tables, sentences and figure of one run."""
    if measurement.settings.matrix:  # best at the longest length first
        r.variants = dict(sorted(r.variants.items(), key=lambda item: _last_nll(r, *item)))
    report.details = [*details(r), *reference(measurement, r), measurement.screening.sentence]
    if r.record["by_position"]:
        report.tables = position_tables(r)
        report.draw = lambda: {"nll_by_position": position_figure(r, loss_styles(r))}
        report.verdict = warning(r) + position_verdict(r)
        return
    changes = [row for row in r.rows("delta") if row.verdict]
    text = FigureText(
        "Loss beyond the trained length",
        f"{r.title}: {r.sample} ({r.record['protocol']})",
        bars_note(changes, r.intervals),
    )
    report.draw = lambda: {"nll_by_length": loss_figure(r, text, loss_styles(r))}
    report.tables = [overview(r), read_gain_table(r)]
    report.more_tables = [gains(r)]
    report.verdict = verdict(r)


def describe_comparison(
    report: EvaluationReport, r: LossResults, runs: Mapping[str, LossMeasurement]
) -> None:
    """Add the tables, sentences and figure of several runs."""
    over = f"{100 * r.confidence:g}% intervals over {r.unit_kind}s, simultaneous over all"
    text = FigureText(
        "Loss of several runs by context length",
        f"The same {r.sample} at every length ({r.record['protocol']})",
        bars_note(r.rows("difference"), f"{over} {r.difference_family}"),
    )
    report.draw = lambda: {"nll_by_length": loss_figure(r, text, loss_styles(r))}
    report.tables = [overview(r), differences(r)]
    *sentences, last = details(r) or [f"{r.against}: point estimates only."]
    report.verdict = warning(r) + last
    report.details = [
        *sentences,
        *(
            f"{run}: {each.subject.name}, step {each.subject.step}, trained at "
            f"{each.subject.trained_length:,}."
            for run, each in runs.items()
        ),
        "Differences describe these checkpoints, not a training method.",
        next(iter(runs.values())).screening.sentence,
    ]


def _last_nll(r: LossResults, name: str, columns: Mapping[str, str]) -> float:
    """Sort key: NLL at the longest length, baselines first."""
    if columns["method"] in (TRAINED, TRUNCATE):
        return -math.inf
    return r.value("nll", name, r.lengths[-1]) or math.inf


def reference(measurement: LossMeasurement, r: LossResults) -> list[str]:
    """Sentences on the loss as trained, the meaning of intervals, and the methods that do not
    apply."""
    lines = []
    trained = r.value("perplexity", name_of(TRAINED), r.trained_length)
    bits = r.value("bits_per_byte", name_of(TRAINED), r.trained_length)
    if trained:
        more = f", {bits:.3f} bits per byte" if bits else ""
        lines.append(f"As trained at {r.trained_length:,}: perplexity {trained:.2f}{more}.")
    documents = counted(r.record["documents"], "document")
    lines.append(f"{documents}; intervals describe this checkpoint, not the positional scheme.")
    if measurement.left_out:
        reasons = [f"{label} ({reason})" for label, reason in measurement.left_out.items()]
        lines.append(f"Built-in methods that do not apply here: {', '.join(reasons)}.")
    return lines
