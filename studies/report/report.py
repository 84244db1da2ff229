"""The report of a study from its results file: report.html, report.md, results.csv and figures.

The same results always produce the same bytes. No run, checkpoint or model is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.files import write_text
from studies.report import findings, tables
from studies.report.document import (
    BulletList,
    CodeBlock,
    ReportDocument,
    ReportSection,
    ReportTable,
    counted,
    listed,
)
from studies.report.figure_builder import FigureBuilder
from studies.report.render import render_html, render_markdown
from studies.report.sections import section
from studies.results.compare import StudyComparison, derive, split_by_seen
from studies.results.gather import unfair_comparisons
from studies.results.others import read_other
from studies.results.rows import csv_text
from studies.results.stored import StoredStudy, evaluations_of, read_losses, read_study

METHODS = (
    ("NLL", "negative log-likelihood of a token in nats; perplexity is exp of its mean."),
    (
        "Length",
        "number of input tokens. Every length scores the same target tokens with as much "
        "preceding text as the "
        "length allows, so only the context changes along a line.",
    ),
    (
        "Reference",
        "the same checkpoints as trained, at the training length. A scheme that does not improve on its own "
        "context truncated to the training length has not used longer context, however flat its curve.",
    ),
    (
        "Intervals",
        "seeds and units are random samples: V = s²(seed means)/S + s²(unit means)/D, with "
        "Welch-Satterthwaite "
        "degrees of freedom. Families of m intervals are simultaneous by the t quantile at α/2m.",
    ),
    (
        "Use of context",
        "a low loss at a long length does not show that distant context is used: windows and decaying biases "
        "ignore it and hold. The net gain over truncation and retrieval tasks do show it.",
    ),
)
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
    keys = [(name, group) for name in evaluations_of(study) for group in study.groups]
    losses = [read_losses(study, *key) for key in keys]
    comparisons = [derive(study, found) for found in losses if found is not None]
    draw = FigureBuilder(study, folder / "figures")
    sections = []
    for n, comparison in enumerate(comparisons):
        sections += _evaluation(comparison, draw, several=len(comparisons) > 1, first=n == 0)
    others = [read_other(study, *key) for key in keys]
    sections += [section(found, draw) for found in others if found is not None]
    sections += [
        _training(study, comparisons, draw),
        _section("Missing results", tables.failures(study), tables.excluded(comparisons)),
        _provenance(study, comparisons),
        _section("Methods", BulletList(METHODS)),
    ]
    document = ReportDocument(
        title=study.name,
        subtitle=_subtitle(study, comparisons),
        lead=_lead(study, comparisons),
        sections=[one for one in sections if one.blocks],
        downloads=DOWNLOADS,
    )
    files = {
        "report.html": render_html(document),
        "report.md": render_markdown(document),
        "results.csv": csv_text(study, comparisons),
    }
    for name, text in files.items():
        write_text(folder / name, text)
    return [*(folder / name for name in files), *draw.files]


def _section(title: str, *blocks) -> ReportSection:
    """A section without its empty blocks."""
    return ReportSection(title, [b for b in blocks if (b.rows if isinstance(b, ReportTable) else b)])


def _lead(study: StoredStudy, comparisons: Sequence[StudyComparison]) -> list[str]:
    lines = findings.lead(comparisons[0]) if comparisons else ["No loss evaluation has finished yet."]
    lines += [f"Warning: {text}" for text in unfair_comparisons(study.record.get("checks") or {})]
    states = [cell.record["status"] for cell in study.cells if not cell.finished]
    if states:
        counts = listed([f"{states.count(one)} {one}" for one in ("failed", "pending") if one in states])
        lines.append(f"Of {len(study.cells)} cells {counts}; reasons are under “Missing results”.")
    return lines


def _subtitle(study: StoredStudy, comparisons: Sequence[StudyComparison]) -> str:
    done = sum(cell.finished for cell in study.cells)
    schemes = len({variant.scheme for variant in study.variants})
    parts = [counted(schemes, "scheme")]
    if len(study.variants) > schemes:
        parts.append(counted(len(study.variants) - schemes, "test-time variant"))
    parts.append(f"{done} of {counted(len(study.cells), 'cell')} done")
    if comparisons:
        losses = comparisons[0].losses
        parts.append(f"trained at {losses.trained_length:,} tokens, evaluated up to {losses.lengths[-1]:,}")
        parts.append(counted(len(losses.units), losses.kind))
    return " · ".join(parts)


def _evaluation(
    comparison: StudyComparison, draw: FigureBuilder, several: bool, first: bool
) -> list[ReportSection]:
    """The sections about the losses of one evaluation."""
    losses = comparison.losses
    name = ", ".join([losses.name, *(f"{axis} {label}" for axis, label in losses.group)])
    tail = f" ({name})" if several else ""
    sentences = [(line.variant.name, findings.sentence(line, comparison)) for line in comparison.lines]
    sections = [
        _section(
            f"NLL by context length{tail}",
            *([] if first else findings.lead(comparison)),
            *draw.by_length(comparison),
            tables.overview(comparison),
            BulletList(sentences),
            *draw.each_alone(comparison),
            tables.levels(comparison),
        )
    ]
    if any(line.beyond for line in comparison.lines):
        verdicts = tables.verdicts(comparison), findings.power(comparison)
        gains = *draw.gain(comparison), tables.gains(comparison), tables.doublings(comparison)
        sections += [_section(f"Verdicts{tail}", *verdicts), _section(f"Use of longer context{tail}", *gains)]
    if comparison.differences:
        differences = *draw.differences(comparison), tables.differences(comparison)
        sections.append(_section(f"Comparison with {comparison.baseline}{tail}", *differences))
    if parts := split_by_seen(comparison):
        kind, total = losses.kind, len(losses.units)
        text = f"{int(losses.seen.sum())} of {total} {kind}s also occur in the training data."
        title = f"Seen and unseen {kind}s{tail}"
        sections.append(_section(title, text, tables.seen_units(comparison, parts)))
    return sections


def _training(
    study: StoredStudy, comparisons: Sequence[StudyComparison], draw: FigureBuilder
) -> ReportSection:
    blocks = []
    for group in study.groups:
        comparison = next((c for c in comparisons if c.losses.group == group), None)
        blocks += draw.learned(comparison) if comparison else []
        blocks.append(tables.costs(study, group, comparison))
    return _section("Training", *blocks)


def _provenance(study: StoredStudy, comparisons: Sequence[StudyComparison]) -> ReportSection:
    checks, commands = study.record.get("checks") or {}, findings.commands(study)
    blocks = [tables.basis(comparison) for comparison in comparisons]
    if checks.get("data_order") and not unfair_comparisons(checks):
        text = "All cells of a seed were trained on the same batches in the same order"
        blocks.append(f"{text}, and all schemes on the same number of tokens (checked by hashes).")
    blocks += ["Commands:", CodeBlock("\n".join(commands))] if commands else []
    return _section("Provenance", *blocks, tables.checkpoints(study))
