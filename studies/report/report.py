"""The report of a study from its results file: report.html, report.md, results.csv and figures.

The same results always produce the same bytes. No run, checkpoint or model is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from data.files import write_text
from studies.report import findings, tables
from studies.report.document import (
    TEXTS,
    Block,
    BulletList,
    CodeBlock,
    ReportDocument,
    ReportSection,
    counted,
    listed,
    note,
)
from studies.report.figures import FigureBuilder
from studies.results.compare import StudyComparison, derive
from studies.results.losses import read_losses
from studies.results.others import (
    ABOVE_CHANCE,
    ATTENTION,
    BY_POSITION,
    GENERATION,
    TASKS,
    read_other,
)
from studies.results.stored import StoredStudy, read_study, unfair_comparisons
from studies.results.table import ResultsTable, csv_text

DOWNLOADS = (
    ("report.md", "this report as Markdown"),
    ("results.csv", "all numbers"),
    ("results.json", "the results of all cells"),
)


def write_report(results: dict, folder: Path) -> list[Path]:
    """Write the report of a study's `results` into `folder`; returns the files, report.html first.

    Raises StudyError if `results` is not a valid results file, before anything is written.
    """
    study = read_study(results)
    keys = [(name, group) for name in study.evaluations for group in study.groups]
    losses = [read_losses(study, *key) for key in keys]
    comparisons = [derive(study, found) for found in losses if found is not None]
    others = [found for key in keys if (found := read_other(study, *key)) is not None]
    draw = FigureBuilder(study, folder / "figures")
    sections = []
    for n, comparison in enumerate(comparisons):
        sections += _losses(comparison, draw, several=len(comparisons) > 1, first=n == 0)
    sections += [section(other, draw) for other in others]
    sections += [
        _training(study, comparisons, draw),
        ReportSection("Missing results", [tables.failures(study), tables.excluded(comparisons)]),
        _provenance(study, comparisons),
        ReportSection("Methods", [BulletList(list(TEXTS["methods"].items()))]),
    ]
    document = ReportDocument(
        study.name,
        _subtitle(study, comparisons),
        _lead(study, comparisons),
        [one for one in sections if one.blocks],
        DOWNLOADS,
    )
    files = {
        "report.html": document.html(),
        "report.md": document.markdown(),
        "results.csv": csv_text(study, [*comparisons, *others]),
    }
    for name, text in files.items():
        write_text(folder / name, text)
    return [*(folder / name for name in files), *draw.files]


def _lead(study: StoredStudy, comparisons: Sequence[StudyComparison]) -> list[str]:
    lines = (
        findings.lead(comparisons[0]) if comparisons else ["No loss evaluation has finished yet."]
    )
    lines += [f"Warning: {text}" for text in unfair_comparisons(study.record.get("checks") or {})]
    if states := [cell.record["status"] for cell in study.unfinished]:
        counts = listed(
            [f"{states.count(one)} {one}" for one in ("failed", "pending") if one in states]
        )
        lines.append(f"Of {len(study.cells)} cells {counts}; reasons are under “Missing results”.")
    return lines


def _subtitle(study: StoredStudy, comparisons: Sequence[StudyComparison]) -> str:
    done = len(study.cells) - len(study.unfinished)
    schemes = len({variant.scheme for variant in study.variants})
    more = len(study.variants) - schemes
    parts = [counted(schemes, "scheme"), *([counted(more, "test-time variant")] if more else [])]
    parts.append(f"{done} of {counted(len(study.cells), 'cell')} done")
    if comparisons:
        losses = comparisons[0].losses
        parts.append(
            f"trained at {losses.trained_length:,} tokens, evaluated up to {losses.lengths[-1]:,}"
        )
        parts.append(counted(len(losses.units), losses.kind))
    return " · ".join(parts)


def _losses(
    table: StudyComparison, draw: FigureBuilder, several: bool, first: bool
) -> list[ReportSection]:
    """The sections about the losses of one evaluation."""
    losses = table.losses
    names = table.names
    tail = f" ({table.title})" if several else ""
    sentences = BulletList([(name, findings.sentence(name, table)) for name in names])
    blocks: list[Block] = [] if first else [*findings.lead(table)]
    blocks += [draw.by_length(table), tables.overview(table), sentences]
    blocks += [*draw.each_alone(table), tables.levels(table)]
    sections = [ReportSection(f"NLL by context length{tail}", blocks)]
    if any(table.beyond(name) for name in names):
        verdicts = [tables.verdicts(table), findings.power(table)]
        gains = [draw.gain(table), tables.gains(table), tables.steps(table)]
        sections.append(ReportSection(f"Verdicts{tail}", verdicts))
        sections.append(ReportSection(f"Use of longer context{tail}", gains))
    if table.select("difference"):
        differences = [draw.differences(table), tables.differences(table)]
        sections.append(ReportSection(f"Comparison with {table.baseline}{tail}", differences))
    seen = tables.seen_units(table)
    if seen.rows:
        kind = losses.kind
        total = len(losses.units)
        text = f"{int(losses.seen.sum())} of {total} {kind}s also occur in the training data."
        sections.append(ReportSection(f"Seen and unseen {kind}s{tail}", [text, seen]))
    return sections


def section(table: ResultsTable, draw: FigureBuilder) -> ReportSection:
    """The section about an evaluation other than loss by length; without blocks if it has no numbers."""
    text = note("no_intervals")
    task = table.facts.get("task", table.name)
    title, blocks = {
        TASKS: (f"Task: {task}", lambda: _task(table, draw)),
        ATTENTION: (
            "Attention beyond the trained length",
            lambda: [text, draw.attention(table), tables.attention(table)],
        ),
        GENERATION: (
            "Generated text beyond the trained length",
            lambda: [text, tables.generation(table)],
        ),
        BY_POSITION: ("NLL by position", lambda: [text, draw.by_position(table)]),
    }[table.facts["protocol"]]
    return ReportSection(f"{title} ({table.title})", blocks() if table.rows else [])


def _task(table: ResultsTable, draw: FigureBuilder) -> list:
    """Accuracies, and up to which length each variant is significantly above chance."""
    sentences = []
    for name in table.names:
        rows = table.select("accuracy", name)
        ends = dict.fromkeys((rows[0], rows[-1]))
        text = f"accuracy {listed([f'{tables.percent(row)} at {row.at:,}' for row in ends])}"
        first_not = next(
            (n for n, row in enumerate(rows) if row.verdict != ABOVE_CHANCE), len(rows)
        )
        if all(math.isnan(row.low) for row in rows):
            text += " (point estimates)."
        elif first_not:
            text += f"; above chance up to {rows[first_not - 1].at:,}."
        else:
            text += "; not shown to be above chance."
        sentences.append((name, text))
    return [
        BulletList(sentences),
        draw.accuracy(table),
        tables.accuracy(table),
        *draw.depths(table),
    ]


def _training(
    study: StoredStudy, comparisons: Sequence[StudyComparison], draw: FigureBuilder
) -> ReportSection:
    blocks: list[Block] = []
    for group in study.groups:
        table = next((one for one in comparisons if one.group == group), None)
        blocks += [draw.learned(table)] if table else []
        blocks.append(tables.costs(study, group, table))
    return ReportSection("Training", blocks)


def _provenance(study: StoredStudy, comparisons: Sequence[StudyComparison]) -> ReportSection:
    checks = study.record.get("checks") or {}
    commands = _commands(study)
    blocks: list = [tables.basis(table) for table in comparisons]
    if checks.get("data_order") and not unfair_comparisons(checks):
        blocks.append(note("same_batches"))
    blocks += ["Commands:", CodeBlock("\n".join(commands))] if commands else []
    return ReportSection("Provenance", [*blocks, tables.checkpoints(study)])


def _commands(study: StoredStudy) -> list[str]:
    """The commands with which cells were trained and evaluated."""
    settings = study.record.get("study") or {}
    lines = []
    if settings.get("grid"):
        lines.append(" ".join(["python train.py", *(settings.get("base") or []), "..."]))
    for axis, labels in (settings.get("grid") or {}).items():
        lines += [
            f"    {axis}={label}: {' '.join(own) or '(none)'}" for label, own in labels.items()
        ]
    for name, entry in (settings.get("evaluations") or {}).items():
        lines.append(
            " ".join(["python evaluate.py RUN", *(entry.get("overrides") or []), f"folder={name}"])
        )
        if entry.get("data"):
            lines.append(f"    data: {' '.join(entry['data'])}")
    return lines
