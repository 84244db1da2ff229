"""The report of a study from its results file: report.html, report.md, results.csv and figures.

The same results always produce the same bytes. Reads no run, checkpoint or model.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pandas as pd
import yaml
from matplotlib.figure import Figure

from data.preparation.summary import FEW_BELOW
from evaluation.reports.diagnostic_report import (
    attention_figure,
    attention_tables,
    generation_tables,
)
from evaluation.reports.document import (
    NONE,
    Cell,
    ReportTable,
    TableCell,
    counted,
    listed,
    plain_text,
    slug,
)
from evaluation.reports.figures import FigureText, Styles, styles_of
from evaluation.reports.loss_report import (
    details,
    differences,
    differences_figure,
    gain_figure,
    gains,
    imprecision,
    loss_figure,
    loss_styles,
    overview,
    position_figure,
    position_tables,
    read_gain_table,
    verdict,
)
from evaluation.reports.loss_results import LossResults
from evaluation.reports.report import (
    Block,
    Chart,
    ReportedResults,
    write_pages,
    write_results,
    write_table,
)
from evaluation.reports.task_report import accuracy_figure, task_tables
from evaluation.statistics.intervals import LEAST_SEEDS
from studies.study_results_reader import Group, StoredStudy, read_study
from studies.study_results_table import read_losses, read_other
from studies.study_settings import TrendSettings
from studies.trend import (
    effect_rows,
    rows_of_study,
    trend_figure,
    trend_findings,
    trend_table,
    trends_of,
    with_stored_rows,
)

MIB = 2**20
COSTS = {  # key in a cell's record: column, format
    "parameters": ("parameters", ",.0f"),
    "tokens": ("tokens", ",.0f"),
    "flops_per_token": ("FLOPs per token", ".3g"),
    "flops": ("training FLOPs", ".3g"),
    "loss": ("last training loss", ".3f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "seconds": ("seconds", ",.0f"),
    "peak_memory_bytes": ("peak memory, MiB", ",.0f"),
}


def costs(study: StoredStudy, group: Group) -> ReportTable:
    """Training cost of each scheme, mean over its seeds."""
    records = [
        {"scheme": cell.scheme, **cell.record["training"], **cell.record["timing"]}
        for cell in study.cells
        if cell.record["training"] and cell.group == group
    ]
    table = pd.DataFrame(records, columns=["scheme", "machine", *COSTS])
    means = table.set_index("scheme")[[*COSTS]].astype(float)
    means["peak_memory_bytes"] /= MIB
    means = means.groupby(level=0, sort=False).agg("mean")
    rows: list[list[Cell]] = []
    for scheme, *values in means.itertuples():
        texts = [
            NONE if math.isnan(value) else format(value, form)
            for value, (_, form) in zip(values, COSTS.values(), strict=True)
        ]
        rows.append([str(scheme), *texts])
    machines = [
        name
        for machine in table.machine.dropna()
        for name in machine.get("gpus") or [machine.get("processor", "unknown")]
    ]
    columns = ["scheme", *(column for column, _ in COSTS.values())]
    note = f"Means over seeds. Speed and memory on: {', '.join(dict.fromkeys(machines))}."
    title = ", ".join(["Training cost", *(label for _, label in group)])
    return ReportTable(title, columns, rows, note)


def cells(study: StoredStudy) -> ReportTable:
    """All cells, with their checkpoints or the reason why they have none."""
    rows: list[list[Cell]] = []
    for cell in study.cells:
        run = cell.record["training"] or {}
        status = cell.record["status"]
        row: list[Cell] = [
            cell.id,
            TableCell(status, "" if status == "done" else "bad"),
            cell.record["error"] or "",
            f"{run['steps']:,}" if run else NONE,
            run.get("checkpoint_hash", "")[:16],
            run.get("data_hash", "")[:16],
        ]
        rows.append(row)
    columns = ["cell", "status", "error", "steps", "checkpoint", "data"]
    note = "First 16 digits of each SHA-256; results.json has all digits."
    return ReportTable("Cells", columns, rows, note, numbers=6)


def excluded(losses: Sequence[LossResults]) -> ReportTable:
    """Lengths that could not be evaluated and results that are not comparable."""
    rows: list[list[Cell]] = [
        [r.study_columns["evaluation"], *key, lengths]
        for r in losses
        for key, lengths in r.missing.items()
    ]
    columns = ["evaluation", "scheme", "reason", "lengths"]
    return ReportTable("Missing results", columns, rows, numbers=3)


OTHERS = {  # by protocol: title, figure, tables
    "tasks": ("Task", accuracy_figure, task_tables),
    "attention": ("Attention beyond the trained length", attention_figure, attention_tables),
    "generation": ("Generated text beyond the trained length", None, generation_tables),
    "by-position": ("NLL by position", position_figure, position_tables),
}
DOWNLOADS = {
    "report.md": "this report as Markdown",
    "results.csv": "all numbers",
    "results.json": "the results of all cells",
}
METHODS = {
    "NLL": "negative log-likelihood of a token in nats; perplexity is exp of its mean.",
    "Length": (
        "number of input tokens. Every length scores the same target tokens with as much preceding "
        "text as the length allows, so only the context changes along a line."
    ),
    "Net gain": (
        "NLL of the same checkpoints as trained, with the context truncated to the trained length, "
        "minus NLL with the full context. A scheme without a net gain has not used longer context, "
        "however flat its curve."
    ),
    "Intervals": (
        "seeds and units are random samples, V = s²(seed means)/S + s²(unit means)/D, with "
        "Welch-Satterthwaite degrees of freedom. Families of m intervals are simultaneous by the t "
        "quantile at α/2m. They do not extend to other model sizes or training budgets."
    ),
    "Context reach": (
        "the smallest length L such that every longer context is shown to gain less than the "
        "tolerance over the best one up to L; a gain is shown where a length is better than every "
        "shorter one."
    ),
    "Use of context": (
        "a low loss at a long length does not show that distant context is used, because windows "
        "and decaying biases ignore it and hold. The net gain and retrieval tasks do show it."
    ),
}
Sections = dict[str, list[Block]]


def write_report(results: dict, folder: Path) -> tuple[ReportTable | None, list[str]]:
    """Write the report of a study's `results` into `folder`; returns its first table and its
    findings.

    Raises StudyError if `results` is not a valid results file, before anything is written.
    """
    study = read_study(results)
    losses = []
    others = []
    for name, group in product(study.evaluations, study.groups):
        if stored := read_losses(study, name, group):
            losses.append(stored)
        elif other := read_other(study, name, group):
            others.append(other)
    names = [variant.name for variant in study.variants]
    lead = []
    first_table = None
    sections: Sections = {}
    if settings := study.settings.get("trend"):
        trend = TrendSettings.model_validate(settings)
        rows = _effects(trend, study, folder)
        if trends_of(trend, rows):
            lead = trend_findings(trend, rows)
            first_table = trend_table(trend, rows)
            sections["Effects by size"] = [_trend_chart(trend, rows), first_table]
    for r in losses:
        if not lead:
            lead = findings(r)
            first_table = overview(r)
        else:
            sections[f"Findings ({r.title})"] = [plain_text(line) for line in findings(r)]
        sections |= _loss_sections(r, loss_styles(r, names), is_first=r is losses[0])
    for other in others:
        is_first = not losses and other is others[0]
        sections |= _other_section(other, styles_of(names, study.baseline), is_first)
    sections["Training"] = [costs(study, group) for group in study.groups]
    sections["Missing results"] = [excluded(losses)]
    sections["Provenance"] = _provenance(study)
    sections["Methods"] = ["\n".join(f"- **{name}**: {text}" for name, text in METHODS.items())]
    lead = lead or ["No loss evaluation has finished yet."]
    lead += [f"Warning: {text}" for text in study.unfair]
    extent = _extent(study, losses)
    write_pages(folder, study.name, [*lead, extent], sections, DOWNLOADS)
    write_results(folder / "results.csv", [*losses, *others], study=study.name)
    return first_table, lead


def _chart(r: ReportedResults, name: str, figure: Figure, caption: str, is_first: bool) -> Chart:
    """A figure of an evaluation; the names of the first evaluation's figures have no prefix."""
    prefix = "" if is_first else f"{slug(r.title).replace('-', '_')}_"
    alt = f"Chart: {caption} {r.title}. results.csv has its numbers."
    return Chart(f"figures/{prefix}{name}", figure, caption, alt)


def findings(r: LossResults) -> list[str]:
    """The findings of a loss evaluation and their limitations, the most important first."""
    lines = [verdict(r), *details(r), *imprecision(r)]
    few = [f"{name} ({counted(s, 'seed')})" for name, s in r.seeds.items() if s < LEAST_SEEDS]
    if few:
        lines.append(
            f"Point estimates only, with fewer than {LEAST_SEEDS} training seeds: {listed(few)}. "
            "They describe these checkpoints, not the schemes."
        )
    if r.units < FEW_BELOW:
        lines.append(f"Few {r.unit_kind}s ({r.units}): interpret intervals with care.")
    return lines


def _extent(study: StoredStudy, losses: Sequence[LossResults]) -> str:
    """The size of a study: `10 schemes · cells: 20 done, 1 failed · 2 training seeds per scheme · 9
    authors`."""
    states = Counter(cell.record["status"] for cell in study.cells)
    schemes = len({variant.scheme for variant in study.variants})
    parts = [counted(schemes, "scheme")]
    parts.append(f"cells: {', '.join(f'{count} {state}' for state, count in states.items())}")
    if losses:
        parts.append(f"{losses[0].seed_counts('training seed')} per scheme")
        parts.append(counted(losses[0].units, losses[0].unit_kind))
    return f"{' · '.join(parts)}."


def _loss_sections(r: LossResults, styles: Styles, is_first: bool) -> Sections:
    """The sections about the losses of one evaluation."""

    def chart(name: str, title: str, note: str, draw: Callable) -> Chart:
        figure = draw(r, FigureText(title, f"{r.title}: {r.sample}", note), styles)
        return _chart(r, name, figure, f"{title}. {note}".strip(), is_first)

    band = f"Shaded: ±{r.tolerance:g} nats."
    bars = f"Bars: {r.intervals}. " if r.intervals else ""
    thin = "Thin: single seeds." if max(r.seeds.values(), default=0) > 1 else ""
    by_length = chart("nll_by_length", "NLL by context length", thin, loss_figure)
    sections: Sections = {
        f"NLL by context length ({r.title})": [by_length, overview(r), read_gain_table(r)]
    }
    if any(map(r.beyond, r.names)):
        gain = chart("net_gain", "Net gain over truncation", bars + band, gain_figure)
        sections[f"Use of longer context ({r.title})"] = [gain, gains(r)]
    if r.rows("difference"):
        title = f"Difference from {r.baseline}"
        note = f"Hollow: point estimate. {band}"
        difference = chart("difference", title, note, differences_figure)
        sections[f"{title} ({r.title})"] = [difference, differences(r)]
    return sections


def _effects(trend: TrendSettings, study: StoredStudy, folder: Path) -> pd.DataFrame:
    """The rows of the effects. Updates effects.csv and keeps its rows of cells that were measured
    elsewhere."""
    file = folder / "effects.csv"
    records = [cell.record for cell in study.cells]
    rows = with_stored_rows(effect_rows(trend, records), file)
    write_table(file, rows)
    return rows_of_study(trend, records, rows)


def _trend_chart(trend: TrendSettings, rows: pd.DataFrame) -> Chart:
    title = "Effects by size"
    caption = f"{title}. Line: fit; shaded: its interval, and ±δ."
    return Chart("figures/trend", trend_figure(trend, rows), caption, f"Chart: {title}.")


def _other_section(r: ReportedResults, styles: Styles, is_first: bool) -> Sections:
    """The section about an evaluation other than loss by length."""
    protocol = r.record["protocol"]
    title, draw, tables = OTHERS[protocol]
    blocks: list[Block] = list(tables(r))
    if draw is not None:
        name = protocol.replace("-", "_")
        caption = f"{title}, means over seeds."
        blocks.insert(0, _chart(r, name, draw(r, styles), caption, is_first))
    return {f"{title} ({r.title})": blocks}


def _provenance(study: StoredStudy) -> list[Block]:
    text = yaml.safe_dump(study.settings, sort_keys=False, allow_unicode=True)
    blocks = [f"```\n{text}\n```", cells(study)]
    trained = [cell.record["training"] for cell in study.cells if cell.record["training"]]
    if any(training.get("data_order") for training in trained) and not study.unfair:
        blocks.append(
            "All cells of a seed were trained on the same batches in the same order, and all "
            "schemes on the same number of tokens (checked by hashes)."
        )
    return blocks
