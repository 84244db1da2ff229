"""The report of a study from its results file: report.html, report.md, results.csv and figures.

The same results always produce the same bytes. No run, checkpoint or model is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from matplotlib.figure import Figure

from data.files import write_text
from evaluation.reports.attention_report import attention_figure, attention_tables
from evaluation.reports.charts import Styles, styles_of
from evaluation.reports.document import (
    Block,
    BulletList,
    CodeBlock,
    ReportDocument,
    ReportFigure,
    ReportSection,
    slug,
)
from evaluation.reports.figures import FigureText, save
from evaluation.reports.generation_report import generation_tables
from evaluation.reports.item_report import exact_figure
from evaluation.reports.loss_report import (
    details,
    differences,
    differences_figure,
    gain_figure,
    gains,
    loss_figure,
    overview,
    parts_table,
    verdict,
)
from evaluation.reports.position_report import position_figure, position_tables
from evaluation.reports.read_gain_report import read_gain_tables
from evaluation.reports.reported_results import ReportedResults, seed_counts
from evaluation.reports.results_files import write_results
from evaluation.reports.task_report import accuracy_figure, task_tables
from evaluation.reports.text import counted, listed
from evaluation.statistics.intervals import FEW_BELOW
from evaluation.statistics.seeds import CLAIM_SEEDS
from studies.report import study_tables
from studies.results.loss_comparison import LossComparison, derive
from studies.results.losses import read_losses
from studies.results.other_evaluations import read_other
from studies.results.stored import Group, StoredStudy, read_study, unfair_comparisons

TITLES = {
    "tasks": "Task",
    "attention": "Attention beyond the trained length",
    "generation": "Generated text beyond the trained length",
    "by-position": "NLL by position",
}
DOWNLOADS = (
    ("report.md", "this report as Markdown"),
    ("results.csv", "all numbers"),
    ("results.json", "the results of all cells"),
)
METHODS = (
    ("NLL", "negative log-likelihood of a token in nats; perplexity is exp of its mean."),
    (
        "Length",
        "number of input tokens. Every length scores the same target tokens with as much preceding "
        "text as the length allows, so only the context changes along a line.",
    ),
    (
        "Net gain",
        "NLL of the same checkpoints as trained, with the context truncated to the trained length, "
        "minus NLL with the full context. A scheme without a net gain has not used longer context, "
        "however flat its curve.",
    ),
    (
        "Intervals",
        "seeds and units are random samples, V = s²(seed means)/S + s²(unit means)/D, with "
        "Welch-Satterthwaite degrees of freedom. Families of m intervals are simultaneous by the t "
        "quantile at α/2m. They do not extend to other model sizes or training budgets.",
    ),
    (
        "Context reach",
        "no longer context improves on the best one up to it by the tolerance; a gain is shown "
        "where a length is better than every shorter one.",
    ),
    (
        "Use of context",
        "a low loss at a long length does not show that distant context is used, because windows "
        "and decaying biases ignore it and hold. The net gain and retrieval tasks do show it.",
    ),
)


class StudyFigures:
    """Saves figures into a directory and lists their files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: list[Path] = []
        self.first = ""

    def add(self, r: ReportedResults, stem: str, figure: Figure, caption: str) -> ReportFigure:
        """Save a figure; the names of those of the first evaluation have no prefix."""
        self.first = self.first or r.title
        if r.title != self.first:
            stem = f"{slug(r.title).replace('-', '_')}_{stem}"
        png = save(figure, self.folder, stem)
        self.files += [png, png.with_suffix(".svg")]
        alt = f"Chart: {caption} {r.title}. results.csv has its numbers."
        return ReportFigure(png, caption, alt, f"{self.folder.name}/{png.name}")


def write_report(results: dict, folder: Path) -> list[Path]:
    """Write the report of a study's `results` into `folder`; returns the files, report.html first.

    Raises StudyError if `results` is not a valid results file, before anything is written.
    """
    study = read_study(results)
    comparisons = []
    others = []
    groups = {}
    for name in study.evaluations:
        for group in study.groups:
            losses = read_losses(study, name, group)
            other = read_other(study, name, group)
            if losses is not None:
                comparisons.append(derive(study, losses))
                groups[comparisons[-1].title] = (name, group)
            elif other is not None:
                others.append(other)
                groups[other.title] = (name, group)
    figures = StudyFigures(folder / "figures")
    names = [variant.name for variant in study.variants]
    sections = []
    for n, r in enumerate(comparisons):
        rows = r.table.select("nll")
        styles = styles_of(names, study.baseline, rows, r.undertrained)
        suffix = f" ({r.title})" if len(comparisons) > 1 else ""
        sections += _loss_sections(r, figures, styles, suffix, findings(r) if n else [])
    styles = styles_of(names, study.baseline)
    sections += [other_section(other, figures, styles) for other in others if other.table.rows]
    sections += [
        ReportSection("Training", [study_tables.costs(study, group) for group in study.groups]),
        ReportSection("Missing results", [study_tables.excluded(comparisons)]),
        _provenance(study, comparisons),
        ReportSection("Methods", [BulletList(METHODS)]),
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
    _write_table(files[2], study, [*comparisons, *others], groups)
    return [*files, *figures.files]


def _write_table(
    file: Path,
    study: StoredStudy,
    tables: Sequence[ReportedResults],
    groups: Mapping[str, tuple[str, Group]],
) -> None:
    axes = dict.fromkeys(axis for _, group in groups.values() for axis, _ in group)
    variants = {v.name: {"scheme": v.scheme, "method": v.method} for v in study.variants}
    parts = []
    for r in tables:
        evaluation, group = groups[r.title]
        place = {"study": study.name, "evaluation": evaluation, **axes, **dict(group)}
        parts.append((place, variants, r.table, {**r.facts, "checkpoint_hash": None}))
    write_results(file, parts)


def _lead(study: StoredStudy, comparisons: Sequence[LossComparison]) -> list[str]:
    lines = ["No loss evaluation has finished yet."]
    if comparisons:
        lines = findings(comparisons[0])
    lines += [f"Warning: {text}" for text in unfair_comparisons(study.record.get("checks") or {})]
    states = [cell.record["status"] for cell in study.unfinished]
    if states:
        counts = [f"{states.count(s)} {s}" for s in ("failed", "pending") if s in states]
        lines.append(
            f"Of {len(study.cells)} cells {listed(counts)}; reasons are under “Provenance”."
        )
    return lines


def findings(r: LossComparison) -> list[str]:
    """The findings of a loss evaluation and what limits them, the most important first."""
    lines = [verdict(r), *details(r)]
    if r.undertrained:
        lines.insert(
            1,
            f"Warning: undertrained: {listed(r.undertrained)}. Their verdicts say nothing about "
            "the schemes.",
        )
    rounding = [name for name in r.names if not r.is_precise(name)]
    if rounding:
        errors = [f"{name} ({r.losses.rounding[name]:.4f} nats)" for name in rounding]
        lines.append(
            f"No verdicts because of bfloat16 rounding error: {listed(errors)}; the limit is "
            f"{r.tolerance / 10:.4f}. Evaluate with dtype=float32."
        )
    few = [f"{n} ({counted(s, 'seed')})" for n, s in r.seeds.items() if s < CLAIM_SEEDS]
    if few:
        lines.append(
            f"Point estimates only, with fewer than {CLAIM_SEEDS} training seeds: {listed(few)}. "
            "They describe these checkpoints, not the schemes."
        )
    if r.units < FEW_BELOW:
        lines.append(f"Few {r.unit_kind}s ({r.units}): interpret intervals with care.")
    return lines


def _subtitle(study: StoredStudy, comparisons: Sequence[LossComparison]) -> str:
    done = len(study.cells) - len(study.unfinished)
    schemes = len({variant.scheme for variant in study.variants})
    parts = [counted(schemes, "scheme")]
    if len(study.variants) > schemes:
        parts.append(counted(len(study.variants) - schemes, "test-time variant"))
    parts.append(f"{done} of {counted(len(study.cells), 'cell')} done")
    if comparisons:
        parts.append(f"{seed_counts(comparisons[0], 'training seed')} per scheme")
        parts.append(counted(comparisons[0].units, comparisons[0].unit_kind))
    return " · ".join(parts)


def _loss_sections(
    r: LossComparison, figures: StudyFigures, styles: Styles, suffix: str, blocks: list
) -> list[ReportSection]:
    """The sections about the losses of one evaluation; the first begins with `blocks`."""

    def figure(stem: str, title: str, note: str, make, caption: str) -> ReportFigure:
        text = FigureText(title, f"{r.title}: {r.sample}", note)
        return figures.add(r, stem, make(r, text, styles), f"{title}. {note} {caption}".strip())

    has_seeds = any(seeds > 1 for seeds in r.seeds.values())
    by_length = figure(
        "nll_by_length",
        "NLL by context length",
        "Thin: single seeds." if has_seeds else "",
        loss_figure,
        "The same targets are scored at every length.",
    )
    first = [*blocks, by_length, overview(r), *read_gain_tables(r)]
    sections = [ReportSection(f"NLL by context length{suffix}", first)]
    bars = f"Bars: {r.intervals}. " if r.intervals else ""
    if any(map(r.beyond, r.names)):
        gain = figure(
            "net_gain",
            "Net gain over truncation",
            f"{bars}Shaded: ±{r.tolerance:g} nats.",
            gain_figure,
            "Positive: distant context helps.",
        )
        sections.append(ReportSection(f"Use of longer context{suffix}", [gain, gains(r)]))
    if r.table.select("difference"):
        difference = figure(
            "difference",
            f"Difference from {r.baseline}",
            f"Hollow: point estimate. Shaded: ±{r.tolerance:g} nats.",
            differences_figure,
            "",
        )
        section = ReportSection(
            f"Comparison with {r.baseline}{suffix}", [difference, differences(r)]
        )
        sections.append(section)
    sections.append(ReportSection(f"Seen and unseen {r.unit_kind}s{suffix}", [parts_table(r)]))
    return sections


def other_section(r: ReportedResults, figures: StudyFigures, styles: Styles) -> ReportSection:
    """The section about an evaluation other than loss by length."""
    protocol = r.facts["protocol"]
    title = TITLES[protocol]
    blocks: list[Block] = []
    if protocol == "tasks":
        title += f": {r.facts.get('task', r.title)}"
        caption = "Accuracy by length, mean over seeds."
        figure = accuracy_figure if r.table.select("accuracy") else exact_figure
        blocks.append(figures.add(r, "accuracy", figure(r, styles), caption))
        blocks += task_tables(r)
    elif protocol == "attention":
        caption = "Attention by context length: means over layers, heads, queries and seeds."
        blocks.append(figures.add(r, "attention", attention_figure(r, styles), caption))
        blocks += attention_tables(r)
    elif protocol == "generation":
        blocks += generation_tables(r)
    else:
        caption = "NLL by position and gain over truncation, means over seeds."
        blocks.append(figures.add(r, "by_position", position_figure(r, styles), caption))
        blocks += position_tables(r)
    return ReportSection(f"{title} ({r.title})", blocks)


def _provenance(study: StoredStudy, comparisons: Sequence[LossComparison]) -> ReportSection:
    checks = study.record.get("checks") or {}
    settings = study.record.get("study") or {}
    blocks: list[Block | str] = [study_tables.basis(r) for r in comparisons]
    if checks.get("data_order") and not unfair_comparisons(checks):
        blocks.append(
            "All cells of a seed were trained on the same batches in the same order, and all "
            "schemes on the same number of tokens (checked by hashes)."
        )
    blocks.append(CodeBlock(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)))
    blocks.append(study_tables.cells(study))
    return ReportSection("Provenance", blocks)
