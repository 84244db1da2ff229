"""The tables of a study's report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from evaluation.statistics.seeds import SeedInterval
from studies.report.document import Cell, ReportTable, TableCell, counted, plain, signed, with_ends
from studies.results.compare import MeanNLL, SeenSplit, StudyComparison
from studies.results.stored import Group, StoredStudy, StudyVariant

NONE = TableCell("—", "faint")
MARK = {"held": "✓ held", "broken": "✗ broken", "inconclusive": "? inconclusive", "points only": "· point"}


def matrix(
    title: str, names: Iterable[str], lengths: Sequence[int], cell: Callable[[str, int], Cell], note: str
) -> ReportTable:
    """One row per name, one column per length."""
    rows = [[name, *(cell(name, length) for length in lengths)] for name in names]
    return ReportTable(title, ["scheme", *(f"{n:,}" for n in lengths)], rows, note)


def _by_length(
    title: str,
    comparison: StudyComparison,
    lengths: Sequence[int],
    cell: Callable[[MeanNLL], Cell],
    note: str,
) -> ReportTable:
    """One row per variant; a dash where a length was not measured."""
    found = {(line.variant.name, one.length): one for line in comparison.lines for one in line.measured}
    names = [line.variant.name for line in comparison.lines]
    return matrix(
        title, names, lengths, lambda name, n: cell(found[name, n]) if (name, n) in found else NONE, note
    )


def _tone(interval: SeedInterval, positive: str, negative: str) -> TableCell:
    """The interval, coloured by its sign if it excludes zero."""
    tone = positive if interval.low > 0 else negative if interval.high < 0 else ""
    return TableCell(with_ends(interval), tone)


def _gain(one: MeanNLL) -> Cell:
    return NONE if one.gain is None else _tone(one.gain, "better", "worse")


def overview(comparison: StudyComparison) -> ReportTable:
    """One row per variant: its starting point and what it reached."""
    losses = comparison.losses
    l0 = losses.trained_length
    unigram = None if losses.unigram is None else float(losses.unigram.mean())
    columns = ["scheme", "seeds", f"NLL at {l0:,}", "below unigram", "bits per byte", "held to", "broken at"]
    columns += ["longest length", "change at longest", "gain over truncation", "context reach"]
    rows: list[list[Cell]] = []
    for line in comparison.lines:
        base, last, at = line.trained.estimate, line.last, line.at(l0)
        reach = f"{line.reach:,}" if line.reach else TableCell("not reached", "faint")
        rows.append(
            [
                line.variant.name,
                str(line.trained.seeds[0]),
                plain(base),
                NONE if unigram is None else signed(unigram - base, 2),
                NONE if at is None or at.bits_per_byte is None else plain(at.bits_per_byte),
                TableCell(f"{line.held_to:,}", "held") if line.held_to else NONE,
                TableCell(f"{line.break_point:,}", "broken") if line.break_point else NONE,
                f"{last.length:,}" if last else NONE,
                with_ends(last.delta) if last and last.delta and last.verdict else NONE,
                _gain(last) if last and last.verdict else NONE,
                reach if line.claims else NONE,
            ]
        )
    return ReportTable(
        "Overview",
        columns,
        rows,
        f"NLL: nats per token as trained at {l0:,}, mean over {losses.kind}s and seeds. Below "
        "unigram: NLL of a "
        "unigram model minus that of the scheme; near zero, the scheme is undertrained. Change: NLL at the "
        f"longest length minus NLL as trained at {l0:,}, same targets, simultaneous over {comparison.family} "
        "comparisons. Context reach: the smallest length that no longer one improves on by "
        f"{comparison.tolerance:g} nats.",
    )


def levels(comparison: StudyComparison) -> ReportTable:
    """NLL of every variant at every length."""
    losses = comparison.losses

    def cell(one: MeanNLL) -> Cell:
        assert one.nll is not None
        spread = "" if math.isnan(one.nll.low) else f" ± {one.nll.half:.3f}"
        return f"{one.nll.estimate:.3f}{spread}"

    table = _by_length(
        "NLL at each length",
        comparison,
        losses.lengths,
        cell,
        f"Nats per token, mean over {losses.kind}s. ±: {100 * comparison.confidence:g}% "
        "individual intervals over "
        f"seeds and {losses.kind}s. Most of the spread is between {losses.kind}s and common to all rows, so "
        "differences are more precise than levels.",
    )
    if losses.unigram is None:
        return table
    level = TableCell(f"{losses.unigram.mean():.3f}", "faint")
    unigram = [TableCell("unigram model", "faint"), *[level for _ in losses.lengths]]
    return replace(table, rows=[*table.rows, unigram])


def verdicts(comparison: StudyComparison) -> ReportTable:
    """The verdict and the change at every length beyond the training length."""
    l0, tolerance = comparison.losses.trained_length, comparison.tolerance
    return _by_length(
        f"Change relative to the training length {l0:,}, and the verdict",
        comparison,
        _beyond(comparison),
        lambda one: TableCell(
            f"{MARK[one.verdict]} {with_ends(one.delta) if one.delta else ''}", one.verdict.split()[0]
        ),
        f"Broken: the lower end, simultaneous over {comparison.family} comparisons, is above "
        f"{tolerance:g} nats. "
        f"Held: the one-sided 97.5% upper bound is below {tolerance:g} nats here and at every "
        "shorter length. "
        "Otherwise inconclusive; not broken does not imply held.",
    )


def _beyond(comparison: StudyComparison) -> list[int]:
    return [n for n in comparison.losses.lengths if n > comparison.losses.trained_length]


def gains(comparison: StudyComparison) -> ReportTable:
    """Net gain over truncation at every length beyond the training length."""
    return _by_length(
        "Net gain over truncation",
        comparison,
        _beyond(comparison),
        _gain,
        f"NLL with the context truncated to {comparison.losses.trained_length:,} minus NLL "
        "with the full context; "
        f"positive if distant context helps. {100 * comparison.confidence:g}% individual intervals.",
    )


def doublings(comparison: StudyComparison) -> ReportTable | None:
    """The gain of each step to the next length."""
    found = {(line.variant.name, a, b): one for line in comparison.lines for a, b, one in line.doublings}
    if not found:
        return None
    steps = list(dict.fromkeys((a, b) for _, a, b in found))
    rows = [
        [name, *(with_ends(found[name, a, b]) if (name, a, b) in found else NONE for a, b in steps)]
        for name in dict.fromkeys(name for name, _, _ in found)
    ]
    return ReportTable(
        "Gain of each step to a longer context",
        ["scheme", *(f"{a:,} → {b:,}" for a, b in steps)],
        rows,
        "NLL at the shorter minus NLL at the longer length; positive if more context helps. "
        "Individual intervals.",
    )


def differences(comparison: StudyComparison) -> ReportTable:
    """Every variant against the baseline at the primary lengths."""
    found = {(one.variant, one.length): one.interval for one in comparison.differences}
    paired = sorted({one.variant for one in comparison.differences if one.paired})
    note = (
        f"NLL minus that of {comparison.baseline}; negative is better. Intervals over seeds and "
        f"{comparison.losses.kind}s, simultaneous over {comparison.difference_family} comparisons."
    )
    if paired:
        note += f" Paired by seed, same checkpoints as {comparison.baseline}: {', '.join(paired)}."
    return matrix(
        f"Difference from {comparison.baseline}",
        dict.fromkeys(one.variant for one in comparison.differences),
        comparison.primary,
        lambda name, n: _tone(found[name, n], "worse", "better") if (name, n) in found else NONE,
        note,
    )


def seen_units(comparison: StudyComparison, found: Sequence[SeenSplit]) -> ReportTable:
    """The units outside and inside the training data separately."""
    kind = comparison.losses.kind
    part = {"unseen": f"{kind}s not in the training data", "seen": f"{kind}s in the training data"}
    rows = [
        [
            one.variant,
            part[one.where],
            str(one.units),
            f"{one.targets:,}",
            f"{one.trained.estimate:.3f}",
            f"{one.length:,}",
            f"{one.nll.estimate:.3f}",
            with_ends(one.gain),
        ]
        for one in found
    ]
    columns = ["scheme", "part", f"{kind}s", "targets", f"NLL at {comparison.losses.trained_length:,}"]
    return ReportTable(
        f"{kind.capitalize()}s inside and outside the training data",
        [*columns, "longest length", "NLL at longest", "gain over truncation"],
        rows,
        "Intervals only for parts with at least 6 units and schemes with at least 3 seeds.",
        numbers=2,
    )


def scaled(value: float) -> str:
    """`1.23 T`: three digits and an SI prefix."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g} {prefix}"
    return f"{value:.3g}"


COSTS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (  # column, part of the cell, key, format
    ("parameters", "training", "parameters", "{:,.0f}".format),
    ("tokens", "training", "tokens", "{:,.0f}".format),
    ("FLOPs per token", "training", "flops_per_token", scaled),
    ("training FLOPs", "training", "flops", scaled),
    ("last training loss", "training", "loss", "{:.3f}".format),
    ("tokens/s", "timing", "tokens_per_second", "{:,.0f}".format),
    ("seconds", "timing", "seconds", "{:,.0f}".format),
    ("peak memory, MiB", "timing", "peak_memory_bytes", lambda v: f"{v / 2**20:,.0f}"),
)


def costs(study: StoredStudy, group: Group, comparison: StudyComparison | None) -> ReportTable:
    """Training cost and result of each scheme, mean over its seeds."""
    rows: list[list[Cell]] = []
    first: dict[str, StudyVariant] = {}
    for variant in study.variants:
        first.setdefault(variant.scheme, variant)
    for scheme, variant in first.items():
        cells = [cell.record for cell in study.of(variant, group) if cell.record.get("training")]
        line = comparison.line(variant.name) if comparison else None
        row: list[Cell] = [scheme, plain(line.trained.estimate) if line else NONE]
        for _, part, key, write in COSTS:
            values = [c[part][key] for c in cells if (c.get(part) or {}).get(key) is not None]
            row.append(write(sum(values) / len(values)) if values else NONE)
        rows += [row] if cells else []
    found = [(cell.record.get("timing") or {}).get("machine") for cell in study.cells]
    machines = "; ".join(dict.fromkeys(_machine(one) for one in found if one))
    note = "Means over seeds." + (f" Speed and memory on: {machines}." if machines else "")
    nll = f"NLL at {comparison.losses.trained_length:,}" if comparison else "NLL"
    return ReportTable("Training cost", ["scheme", nll, *(c[0] for c in COSTS)], rows, note)


def _machine(about: dict[str, Any]) -> str:
    """`AMD EPYC, 1 thread` or `NVIDIA H200`."""
    gpus, threads = about.get("gpus") or [], about.get("threads")
    if gpus:
        return ", ".join(str(one) for one in gpus)
    return str(about.get("processor", "unknown")) + (f", {counted(threads, 'thread')}" if threads else "")


def basis(comparison: StudyComparison) -> ReportTable:
    """The data and settings of an evaluation."""
    losses, facts = comparison.losses, comparison.losses.facts
    documents = facts.get("documents")
    of = f" from {documents} documents" if documents and losses.kind != "document" else ""
    seeds = [f"{name}: {', '.join(by_seed)}" for name, by_seed in losses.reference.items()]
    more = f" and {len(losses.units) - 24} more (see results.json)" if len(losses.units) > 24 else ""
    rows = {
        "protocol": facts.get("protocol"),
        "lengths, tokens": ", ".join(f"{n:,}" for n in losses.lengths),
        "training length": f"{losses.trained_length:,}",
        "targets": f"{int(losses.targets.sum()):,}",
        "units": f"{len(losses.units)} {losses.kind}s{of}",
        "names of the units": ", ".join(losses.units[:24]) + more,
        "BOS policy": facts.get("bos"),
        "corpus": facts.get("corpus", ""),
        "corpus hash": facts.get("corpus_hash", ""),
        "tokenizer hash": facts.get("tokenizer_hash", ""),
        "targets hash": facts.get("targets_hash", ""),
        "dtype": facts.get("dtype"),
        "evaluation seed": facts.get("seed"),
        "training seeds": "; ".join(seeds),
        "tolerance": f"{comparison.tolerance:g} nats",
        "confidence level": f"{100 * comparison.confidence:g}%",
        "families": f"verdicts: {comparison.family}; differences: {comparison.difference_family}",
    }
    return ReportTable(
        f"Data and settings of {losses.name}",
        ["", ""],
        [[k, str(v)] for k, v in rows.items() if v != ""],
        numbers=2,
    )


def checkpoints(study: StoredStudy) -> ReportTable:
    """The training runs of the report."""
    runs = [(cell.id, cell.record["training"]) for cell in study.cells if cell.record.get("training")]
    hashes = ("checkpoint_hash", "data_hash")
    rows = [
        [
            name,
            str(run.get("steps", "")),
            *(str(run.get(key) or "")[:16] for key in hashes),
            run.get("run") or "",
        ]
        for name, run in runs
    ]
    note = "First 16 digits of each SHA-256; see results.json for all digits."
    return ReportTable("Checkpoints", ["cell", "steps", "checkpoint", "data", "run"], rows, note, numbers=5)


def failures(study: StoredStudy) -> ReportTable:
    """Cells without results."""
    rows = [
        [cell.id, TableCell(cell.record["status"], "broken"), str(cell.record.get("error") or "not run yet")]
        for cell in study.cells
        if not cell.finished
    ]
    return ReportTable("Cells without results", ["cell", "status", "reason"], rows, numbers=3)


def excluded(comparisons: Sequence[StudyComparison]) -> ReportTable:
    """Lengths that could not be evaluated, and results that are not comparable."""
    rows: list[list[str]] = []
    for losses in (comparison.losses for comparison in comparisons):
        reasons: dict[tuple[str, str], list[int]] = {}
        for (name, length), reason in losses.missing.items():
            reasons.setdefault((name, reason), []).append(length)
        rows += [
            [losses.name, name, ", ".join(f"{n:,}" for n in sorted(lengths)), reason]
            for (name, reason), lengths in reasons.items()
        ]
        rows += [[losses.name, cell, "all", reason] for cell, reason in losses.excluded.items()]
    return ReportTable("Excluded results", ["evaluation", "scheme", "lengths", "reason"], rows, numbers=4)
