"""The report of a study from its results file: report.html, report.md, results.csv and figures.

The same results always produce the same bytes. No run, checkpoint or model is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from data.files import write_text
from evaluation.reports.document import Block, BulletList, CodeBlock, ReportDocument, ReportSection
from evaluation.reports.results_table import write_table
from evaluation.reports.text import counted, listed
from studies.report import findings
from studies.report import report_tables as tables
from studies.report.notes import TEXTS, note
from studies.report.study_figures import ATTENTION_MEASURES, StudyFigures
from studies.results.loss_comparison import LossComparison, derive
from studies.results.losses import read_losses
from studies.results.other_evaluations import (
    ATTENTION,
    BY_POSITION,
    GENERATION,
    TASKS,
    read_other,
)
from studies.results.stored import StoredStudy, read_study, unfair_comparisons
from studies.results.table import ResultsTable, csv_records

TITLES = {
    TASKS: "Task: ",
    ATTENTION: "Attention beyond the trained length",
    GENERATION: "Generated text beyond the trained length",
    BY_POSITION: "NLL by position",
}
GENERATION_MEASURES = {"repeated_4": "repeated 4-grams", "nll": "NLL under the model"}
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
    comparisons = []
    others = []
    for name in study.evaluations:
        for group in study.groups:
            losses = read_losses(study, name, group)
            if losses is not None:
                comparisons.append(derive(study, losses))
            elif (other := read_other(study, name, group)) is not None:
                others.append(other)
    figures = StudyFigures(study, folder / "figures")
    sections = []
    for table in comparisons:
        suffix = f" ({table.title})" if len(comparisons) > 1 else ""
        blocks = [] if table is comparisons[0] else findings.lead(table)
        sections += _loss_sections(table, figures, suffix, blocks)
    sections += [other_section(other, figures) for other in others if other.rows]
    sections += [
        _training(study, comparisons),
        ReportSection("Missing results", [tables.excluded(comparisons)]),
        _provenance(study, comparisons),
        ReportSection("Methods", [BulletList(list(TEXTS["methods"].items()))]),
    ]
    document = ReportDocument(
        title=study.name,
        subtitle=_subtitle(study, comparisons),
        lead=_lead(study, comparisons),
        sections=[section for section in sections if section.blocks],
        downloads=DOWNLOADS,
    )
    files = [folder / name for name in ("report.html", "report.md", "results.csv")]
    write_text(files[0], document.html())
    write_text(files[1], document.markdown())
    write_table(files[2], csv_records(study, [*comparisons, *others]))
    return [*files, *figures.files]


def _lead(study: StoredStudy, comparisons: Sequence[LossComparison]) -> list[str]:
    lines = ["No loss evaluation has finished yet."]
    if comparisons:
        lines = findings.lead(comparisons[0])
    lines += [f"Warning: {text}" for text in unfair_comparisons(study.record.get("checks") or {})]
    states = [cell.record["status"] for cell in study.unfinished]
    if states:
        counts = [f"{states.count(s)} {s}" for s in ("failed", "pending") if s in states]
        lines.append(
            f"Of {len(study.cells)} cells {listed(counts)}; reasons are under “Provenance”."
        )
    return lines


def _subtitle(study: StoredStudy, comparisons: Sequence[LossComparison]) -> str:
    done = len(study.cells) - len(study.unfinished)
    schemes = len({variant.scheme for variant in study.variants})
    parts = [counted(schemes, "scheme")]
    if len(study.variants) > schemes:
        parts.append(counted(len(study.variants) - schemes, "test-time variant"))
    parts.append(f"{done} of {counted(len(study.cells), 'cell')} done")
    if comparisons:
        losses = comparisons[0].losses
        parts.append(
            f"trained at {losses.trained_length:,} tokens, evaluated up to {losses.lengths[-1]:,}"
        )
        parts.append(counted(len(losses.units), losses.kind))
    return " · ".join(parts)


def _loss_sections(
    table: LossComparison, figures: StudyFigures, suffix: str, blocks: list[Block]
) -> list[ReportSection]:
    """The sections about the losses of one evaluation; the first begins with `blocks`."""
    losses = table.losses
    blocks += [figures.by_length(table), tables.overview(table), tables.levels(table)]
    sections = [ReportSection(f"NLL by context length{suffix}", blocks)]
    if any(table.beyond(name) for name in table.names):
        sections.append(ReportSection(f"Verdicts{suffix}", [tables.verdicts(table)]))
        sections.append(ReportSection(f"Use of longer context{suffix}", [figures.gain(table)]))
    if table.select("difference"):
        title = f"Comparison with {table.baseline}{suffix}"
        sections.append(
            ReportSection(title, [figures.differences(table), tables.differences(table)])
        )
    seen = tables.seen_units(table)
    sections.append(ReportSection(f"Seen and unseen {losses.kind}s{suffix}", [seen]))
    return sections


def other_section(table: ResultsTable, figures: StudyFigures) -> ReportSection:
    """The section about an evaluation other than loss by length."""
    protocol = table.facts["protocol"]
    title = TITLES[protocol]
    if protocol == TASKS:
        title += str(table.facts.get("task", table.name))
        blocks = [
            figures.accuracy(table),
            tables.accuracy(table),
            tables.accuracy_by_depth(table),
        ]
    elif protocol == ATTENTION:
        blocks = [figures.attention(table), tables.measures(table, ATTENTION_MEASURES)]
    elif protocol == GENERATION:
        blocks = [tables.measures(table, GENERATION_MEASURES)]
    else:
        blocks = [figures.by_position(table)]
    return ReportSection(f"{title} ({table.title})", blocks)


def _training(study: StoredStudy, comparisons: Sequence[LossComparison]) -> ReportSection:
    blocks = []
    for group in study.groups:
        table = next((table for table in comparisons if table.group == group), None)
        blocks.append(tables.costs(study, group, table))
    return ReportSection("Training", blocks)


def _provenance(study: StoredStudy, comparisons: Sequence[LossComparison]) -> ReportSection:
    checks = study.record.get("checks") or {}
    settings = study.record.get("study") or {}
    blocks: list[Block] = [tables.basis(table) for table in comparisons]
    if checks.get("data_order") and not unfair_comparisons(checks):
        blocks.append(note("same_batches"))
    blocks.append(CodeBlock(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)))
    blocks.append(tables.cells(study))
    return ReportSection("Provenance", blocks)
