"""The report of a study, from its results file alone: report.html, report.md, results.csv, figures.

A pure function of the results: the same results give the same bytes. No run, no checkpoint and no model is
needed, so that it can be rebuilt anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.files import write_text
from studies import html, markdown, tables, words
from studies.beside import section
from studies.compare import Comparison, derive, set_apart
from studies.document import Block, Bullets, Code, Document, Section, counted, listed
from studies.drawings import Draughtsman
from studies.others import Other, read_other
from studies.rows import csv_text
from studies.stored import Study, evaluations_of, read_losses, read_study

READING = (
    "NLL is the negative log-likelihood of a token in nats; perplexity is exp of its mean. Length is "
    "the number of "
    "input tokens. Every length scores the same target tokens, each with as much text before it as the "
    "length "
    "allows: what changes along a line is the context alone.",
    "The reference of a scheme is its own checkpoints as trained, at the trained length. A line that "
    "does not beat "
    "its own context cut to the trained length has used no longer context, however flat it is.",
    "Intervals take training seeds and units of text as samples: V = s²(seed means)/S + s²(unit "
    "means)/D, degrees "
    "of freedom by Welch and Satterthwaite. Families of intervals hold at once, by the t quantile at α/2m.",
    "A low loss at a long length does not show that far context is used: windows and decaying biases "
    "ignore it "
    "and hold. The gain over truncation and the retrieval tasks show use.",
)


def write_report(results: dict, folder: Path) -> list[Path]:
    """Write the report of a study's `results` into `folder`; returns the files, report.html first.

    Raises StudyError where `results` is not what a study writes, before anything is written.
    """
    study = read_study(results)
    names = evaluations_of(study)
    comparisons = [
        derive(study, losses)
        for name in names
        for group in study.groups
        if (losses := read_losses(study, name, group)) is not None
    ]
    others = [
        found
        for name in names
        for group in study.groups
        if (found := read_other(study, name, group)) is not None
    ]
    draw = Draughtsman(study, folder / "figures")
    document = compose(study, comparisons, others, draw)
    files = {
        "report.html": html.render(document),
        "report.md": markdown.render(document),
        "results.csv": csv_text(study, comparisons),
    }
    for name, text in files.items():
        write_text(folder / name, text)
    return [*(folder / name for name in files), *draw.files]


def compose(
    study: Study, comparisons: Sequence[Comparison], others: Sequence[Other], draw: Draughtsman
) -> Document:
    """The whole report in the order in which it is read."""
    first = comparisons[0] if comparisons else None
    lead = words.lead(first) if first else ["No evaluation of text has finished yet."]
    lead += unfair(study)
    unfinished = [cell for cell in study.cells if not cell.finished]
    if unfinished:
        states = {s: sum(c.record["status"] == s for c in unfinished) for s in ("failed", "pending")}
        told = listed([f"{n} {state}" for state, n in states.items() if n])
        lead.append(f"Of {len(study.cells)} cells {told}: see the end of this report for the reasons.")
    sections = []
    for n, comparison in enumerate(comparisons):
        sections += _evaluation(comparison, draw, several=len(comparisons) > 1, first=n == 0)
    sections += [section(found, draw) for found in others]
    sections += [_costs(study, comparisons, draw), _left_out(study, comparisons)]
    sections += [
        _basis(study, comparisons),
        Section("How to read this", [Bullets([("", line) for line in READING])]),
    ]
    return Document(
        title=study.name,
        subtitle=_subtitle(study, first),
        lead=lead,
        sections=[section for section in sections if section.blocks],
        downloads=[
            ("report.md", "the same as Markdown"),
            ("results.csv", "every number"),
            ("results.json", "all results, of which this page is made"),
        ],
    )


def unfair(study: Study) -> list[str]:
    """What the runner found that makes the cells no fair comparison."""
    checks = study.record.get("checks") or {}
    lines = [
        f"Beware: cells of seed {one['seed']} were not trained on the same text in the same order: "
        + "; ".join(", ".join(cells) for cells in one["orders"].values())
        + "."
        for one in checks.get("data_order") or []
        if not one["agree"]
    ]
    if checks.get("equal_tokens") is False:
        lines.append("Beware: the schemes were not trained on equally many tokens.")
    return lines


def _subtitle(study: Study, first: Comparison | None) -> str:
    done = sum(cell.finished for cell in study.cells)
    schemes = len({variant.scheme for variant in study.variants})
    parts = [counted(schemes, "scheme")]
    if len(study.variants) > schemes:
        parts.append(counted(len(study.variants) - schemes, "test-time variant"))
    parts.append(f"{done} of {counted(len(study.cells), 'training')} done")
    if first:
        losses = first.losses
        parts.append(f"trained at {losses.trained_length:,} tokens, read up to {losses.lengths[-1]:,}")
        parts.append(counted(len(losses.units), losses.kind))
    return " · ".join(parts)


def _evaluation(comparison: Comparison, draw: Draughtsman, several: bool, first: bool) -> list[Section]:
    """What one evaluation found, in sections."""
    losses = comparison.losses
    where = ", ".join(f"{axis} {label}" for axis, label in losses.group)
    tail = f" ({losses.name}{', ' + where if where else ''})" if several else ""
    each = [(line.variant.name, words.sentence(line, comparison)) for line in comparison.lines]
    opening: list[Block] = [] if first else [*words.lead(comparison)]
    sections = [Section(f"NLL against context length{tail}", opening)]
    sections[0].blocks += [
        *draw.by_length(comparison),
        tables.overview(comparison),
        Bullets(each),
        *draw.each_alone(comparison),
        tables.levels(comparison),
    ]
    if any(line.beyond for line in comparison.lines):
        section = Section(f"Held or broken{tail}", [tables.verdicts(comparison)])
        settle = words.power(comparison)
        section.blocks += [settle] if settle else []
        sections.append(section)
        section = Section(f"Use of longer context{tail}", [*draw.gain(comparison), tables.gains(comparison)])
        steps = tables.doublings(comparison)
        section.blocks += [steps] if steps else []
        sections.append(section)
    if comparison.differences:
        blocks = [*draw.differences(comparison), tables.differences(comparison)]
        sections.append(Section(f"Against {comparison.baseline}{tail}", blocks))
    parts = set_apart(comparison)
    if parts:
        kind = losses.kind
        text = (
            f"{int(losses.seen.sum())} of {len(losses.units)} {kind}s also occur in the training text. "
            "The numbers "
            f"above are over all; here each part stands by itself."
        )
        sections.append(Section(f"Known and unknown {kind}s{tail}", [text, tables.apart(comparison, parts)]))
    return sections


def _costs(study: Study, comparisons: Sequence[Comparison], draw: Draughtsman) -> Section:
    section = Section("What it cost, and whether it learned")
    for group in study.groups:
        comparison = next((c for c in comparisons if c.losses.group == group), None)
        if comparison:
            section.blocks += draw.learned(comparison)
        table = tables.costs(study, group, comparison)
        section.blocks += [table] if table.rows else []
    return section


def _left_out(study: Study, comparisons: Sequence[Comparison]) -> Section:
    found = [tables.failures(study), tables.absent(comparisons)]
    return Section("What is missing", [table for table in found if table is not None])


def _basis(study: Study, comparisons: Sequence[Comparison]) -> Section:
    out = Section("What this rests on")
    for comparison in comparisons:
        out.blocks.append(tables.basis(comparison, study))
    orders = (study.record.get("checks") or {}).get("data_order") or []
    if orders and not unfair(study):
        out.blocks.append(
            "All trainings of a seed saw the same text in the same order, step by step, and schemes "
            "were trained "
            "on equally many tokens: checked by the hashes in their metrics."
        )
    commands = words.commands(study)
    out.blocks += ["How it was trained and measured:", Code("\n".join(commands))] if commands else []
    table = tables.checkpoints(study)
    out.blocks += [table] if table.rows else []
    return out
