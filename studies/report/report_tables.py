"""The tables of a study's report: views of the results table and of the training runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from evaluation.reports.document import NONE, Cell, ReportTable, TableCell
from evaluation.reports.text import counted, percent, plain, signed
from studies.report.notes import note
from studies.results.loss_comparison import SEEN, UNSEEN, LossComparison
from studies.results.other_evaluations import ABOVE_CHANCE
from studies.results.stored import Group, StoredStudy
from studies.results.table import ResultsTable, StudyResult

MARK = {
    "held": "✓ held",
    "broken": "✗ broken",
    "inconclusive": "? inconclusive",
    "points only": "· point",
}
MIB = 2**20
COSTS = {  # column: part of a cell's record, key, unit, format
    "parameters": ("training", "parameters", 1, "{:,.0f}"),
    "tokens": ("training", "tokens", 1, "{:,.0f}"),
    "FLOPs per token": ("training", "flops_per_token", 1, "{:.3g}"),
    "training FLOPs": ("training", "flops", 1, "{:.3g}"),
    "last training loss": ("training", "loss", 1, "{:.3f}"),
    "tokens/s": ("timing", "tokens_per_second", 1, "{:,.0f}"),
    "seconds": ("timing", "seconds", 1, "{:,.0f}"),
    "peak memory, MiB": ("timing", "peak_memory_bytes", MIB, "{:,.0f}"),
}


def _matrix(
    title: str,
    table: ResultsTable,
    columns: Mapping[str, tuple],
    write: Callable[[StudyResult], Cell],
    note: str,
) -> ReportTable:
    """A row per variant; a dash where there is no number, no table where there is none at all.

    Args:
        columns: heading -> metric, length and `where` of the results table.
    """
    rows = []
    for name in table.names:
        results = [table.get(name, *place) for place in columns.values()]
        if any(result is not None for result in results):
            rows.append([name, *(NONE if row is None else write(row) for row in results)])
    return ReportTable(title, ["scheme", *columns], rows, note)


def _at(metric: str, lengths: Iterable[int]) -> dict[str, tuple]:
    """A column for each length."""
    return {f"{length:,}": (metric, length) for length in lengths}


def _toned(
    row: StudyResult,
    positive: str = "better",
    negative: str = "worse",
) -> TableCell:
    """The interval, colored by its sign if it excludes zero."""
    if row.low > 0:
        return TableCell(row.text, positive)
    return TableCell(row.text, negative if row.high < 0 else "")


def overview(table: LossComparison) -> ReportTable:
    """One row per variant: its starting point and what it reached."""
    l0 = table.trained_length
    unigram = table.losses.unigram
    rows = []
    for name in table.names:
        nll = table.value(name, "nll_as_trained", l0) or 0.0
        longest = table.longest(name)
        bits = table.value(name, "bits_per_byte", l0)
        reach = table.get(name, "context_reach")
        held = table.value(name, "held_to")
        broken = table.value(name, "break_point")
        gain = table.get(name, "gain", longest) if table.beyond(name) else None
        row = {
            "scheme": name,
            "seeds": str(table.seed_count(name)),
            f"NLL at {l0:,}": plain(nll),
            "below unigram": NONE if unigram is None else signed(unigram - nll, 2),
            "bits per byte": NONE if bits is None else plain(bits),
            "held to": TableCell(f"{held:,.0f}", "held") if held else NONE,
            "broken at": TableCell(f"{broken:,.0f}", "broken") if broken else NONE,
            "longest length": f"{longest:,}" if longest else NONE,
            "gain over truncation": _toned(gain) if gain else NONE,
            "context reach": NONE if reach is None else reach.note,
        }
        rows.append(row)
    columns = list(rows[0]) if rows else []
    cells = [list(row.values()) for row in rows]
    return ReportTable("Overview", columns, cells, note("overview", table))


def levels(table: LossComparison) -> ReportTable:
    """NLL of every variant at every length."""
    losses = table.losses

    def write(row: StudyResult) -> str:
        return plain(row.value) if math.isnan(row.low) else f"{row.value:.3f} ± {row.half:.3f}"

    columns = _at("nll", losses.lengths)
    matrix = _matrix(
        "NLL at each length",
        table,
        columns,
        write,
        note("levels", table),
    )
    if losses.unigram is not None:
        numbers = [f"{losses.unigram:.3f}"] * len(columns)
        matrix.rows.append([TableCell(text, "faint") for text in ("unigram model", *numbers)])
    return matrix


def verdicts(table: LossComparison) -> ReportTable:
    """The verdict and the change at every length beyond the trained length."""

    def write(row: StudyResult) -> TableCell:
        return TableCell(f"{MARK[row.verdict]} {row.text}", row.verdict.split()[0])

    title = f"Change relative to the trained length {table.trained_length:,}, and the verdict"
    columns = _at("delta", table.losses.longer)
    return _matrix(title, table, columns, write, note("verdicts", table))


def differences(table: LossComparison) -> ReportTable:
    """Every variant against the baseline at the primary lengths."""
    text = note("differences", table)
    if paired := sorted({row.variant for row in table.select("difference") if row.note}):
        text += f" Paired by seed, same checkpoints as {table.baseline}: {', '.join(paired)}."

    def write(row: StudyResult) -> TableCell:
        return _toned(row, "worse", "better")

    columns = _at("difference", table.primary)
    return _matrix(
        f"Difference from {table.baseline}",
        table,
        columns,
        write,
        text,
    )


def seen_units(table: LossComparison) -> ReportTable:
    """The gain on the units outside and inside the training data separately."""
    longest = table.losses.lengths[-1]
    seen = int(table.losses.seen.sum())
    kind = table.losses.kind
    columns = {
        f"{counted(len(table.losses.units) - seen, kind)} outside": ("gain", longest, UNSEEN),
        f"{counted(seen, kind)} inside": ("gain", longest, SEEN),
    }
    title = f"Gain over truncation at {longest:,}, outside and inside the training data"
    return _matrix(title, table, columns, attrgetter("text"), note("seen"))


def accuracy(table: ResultsTable) -> ReportTable:
    """Accuracy of a task at every length."""

    def write(row: StudyResult) -> TableCell:
        text = percent(row.value, max(row.low, 0.0), min(row.high, 1.0))
        return TableCell(text, "held" if row.verdict == ABOVE_CHANCE else "")

    columns = _at("accuracy", sorted({row.length for row in table.select("accuracy")}))
    text = f"Chance: {table.facts['chance']:.0%}; shaded: significantly above."
    return _matrix("Accuracy by length", table, columns, write, text)


def accuracy_by_depth(table: ResultsTable) -> ReportTable:
    """Accuracy by length and depth of the answer: a row per variant and length."""
    shares: dict[tuple, dict[float, float]] = {}
    for row in table.select("accuracy_at_depth", where=None):
        shares.setdefault((row.variant, row.length), {})[row.where[0]] = row.value
    depths = sorted({depth for own in shares.values() for depth in own})
    rows = [
        [name, f"{length:,}", *(f"{own[d]:.0%}" if d in own else NONE for d in depths)]
        for (name, length), own in shares.items()
    ]
    columns = ["scheme", "length", *(f"depth {depth:.2g}" for depth in depths)]
    return ReportTable(
        "Accuracy by depth of the answer",
        columns,
        rows,
        note("depth"),
    )


def measures(table: ResultsTable, headings: Mapping[str, str]) -> ReportTable:
    """The first and last value of each measure by length or position; a row per variant and source
    of text.

    Args:
        headings: of the measures.
    """
    by_source: dict[tuple, dict[str, list[StudyResult]]] = {}
    for row in table.rows.values():
        if row.metric in headings:
            of_metric = by_source.setdefault((row.variant, *row.where[:1]), {})
            of_metric.setdefault(row.metric, []).append(row)
    rows = []
    for source, of_metric in by_source.items():
        cells = []
        for metric in headings:
            ends = sorted(of_metric.get(metric, []), key=lambda row: (row.length, *row.where))
            numbers = [f"{row.value:.3g}" for row in (ends[0], ends[-1])] if ends else ["—"]
            cells.append(" → ".join(numbers))
        rows.append([", ".join(source), *cells])
    title = "First → last length or range of positions"
    return ReportTable(
        title,
        ["scheme", *headings.values()],
        rows,
        note("no_intervals"),
    )


def costs(
    study: StoredStudy,
    group: Group,
    table: LossComparison | None,
) -> ReportTable:
    """Training cost and result of each scheme, mean over its seeds."""
    rows = []
    variants = {variant.scheme: variant for variant in reversed(study.variants)}
    for scheme in dict.fromkeys(variant.scheme for variant in study.variants):
        variant = variants[scheme]
        records = [cell.record for cell in study.of(variant, group) if cell.record.get("training")]
        if not records:
            continue
        nll = None
        if table is not None:
            nll = table.value(
                variant.name,
                "nll_as_trained",
                table.trained_length,
            )
        row: list[Cell] = [scheme, NONE if nll is None else plain(nll)]
        for part, key, unit, form in COSTS.values():
            numbers = [(record.get(part) or {}).get(key) for record in records]
            numbers = [number for number in numbers if number is not None]
            mean = sum(numbers) / len(numbers) / unit if numbers else None
            row.append(NONE if mean is None else form.format(mean))
        rows.append(row)
    machines = [(cell.record.get("timing") or {}).get("machine") for cell in study.cells]
    names = "; ".join(dict.fromkeys(_machine(machine) for machine in machines if machine))
    text = "Means over seeds." + (f" Speed and memory on: {names}." if names else "")
    heading = f"NLL at {table.trained_length:,}" if table else "NLL"
    return ReportTable("Training cost", ["scheme", heading, *COSTS], rows, text)


def _machine(facts: dict) -> str:
    """`AMD EPYC, 1 thread` or `NVIDIA H200`."""
    if gpus := facts.get("gpus"):
        return ", ".join(map(str, gpus))
    processor = str(facts.get("processor", "unknown"))
    threads = facts.get("threads")
    return f"{processor}, {counted(threads, 'thread')}" if threads else processor


def basis(table: LossComparison) -> ReportTable:
    """The data and settings of an evaluation."""
    losses = table.losses
    seeds = [f"{name}: {', '.join(by_seed)}" for name, by_seed in losses.reference.items()]
    facts = {k: str(v) for k, v in losses.facts.items() if isinstance(v, str | int | float)}
    rows = facts | {
        "lengths": ", ".join(f"{n:,}" for n in losses.lengths),
        f"{losses.kind}s": ", ".join(losses.units),
        "training seeds": "; ".join(seeds),
        "families": f"verdicts: {table.family}; differences: {table.difference_family}",
    }
    cells: list[list[Cell]] = [[key, value] for key, value in rows.items()]
    return ReportTable(
        f"Data and settings of {losses.name}",
        ["", ""],
        cells,
        numbers=2,
    )


def cells(study: StoredStudy) -> ReportTable:
    """All cells: their checkpoints, or why they have none."""
    rows: list[list[Cell]] = []
    for cell in study.cells:
        run = cell.record.get("training") or {}
        status = cell.record["status"]
        tone = "" if status == "done" else "broken"
        hashes = [str(run.get(key) or "")[:16] for key in ("checkpoint_hash", "data_hash")]
        rows.append([
            cell.id,
            TableCell(status, tone),
            cell.record.get("error") or "",
            f"{run['steps']:,}" if run else NONE,
            *hashes,
        ])  # fmt: skip
    columns = ["cell", "status", "error", "steps", "checkpoint", "data"]
    return ReportTable("Cells", columns, rows, note("hashes"), numbers=6)


def excluded(tables: Sequence[LossComparison]) -> ReportTable:
    """Lengths that could not be evaluated, and results that are not comparable."""
    rows: list[list[Cell]] = []
    for losses in (table.losses for table in tables):
        lengths: dict[tuple[str, str], list[str]] = {}
        for (name, length), reason in losses.missing.items():
            lengths.setdefault((name, reason), []).append(f"{length:,}")
        for (name, reason), own in lengths.items():
            rows.append([losses.name, name, ", ".join(own), reason])
        for cell, reason in losses.excluded.items():
            rows.append([losses.name, cell, "all", reason])
    columns = ["evaluation", "scheme", "lengths", "reason"]
    return ReportTable("Missing results", columns, rows, numbers=4)
