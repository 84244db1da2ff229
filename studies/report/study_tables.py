"""Tables about the cells of a study: training cost, provenance, missing results."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.reports.document import NONE, Cell, ReportTable, TableCell
from evaluation.reports.results_files import FACTS
from evaluation.reports.text import counted
from studies.results.loss_comparison import LossComparison
from studies.results.stored import Group, StoredStudy

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


def costs(study: StoredStudy, group: Group) -> ReportTable:
    """Training cost of each scheme, mean over its seeds."""
    rows = []
    for scheme in dict.fromkeys(variant.scheme for variant in study.variants):
        records = [
            cell.record
            for cell in study.cells
            if (cell.scheme, cell.group) == (scheme, group) and cell.record.get("training")
        ]
        if not records:
            continue
        row: list[Cell] = [scheme]
        for part, key, unit, form in COSTS.values():
            numbers = [(record.get(part) or {}).get(key) for record in records]
            numbers = [number for number in numbers if number is not None]
            mean = sum(numbers) / len(numbers) / unit if numbers else None
            row.append(NONE if mean is None else form.format(mean))
        rows.append(row)
    machines = [(cell.record.get("timing") or {}).get("machine") for cell in study.cells]
    names = "; ".join(dict.fromkeys(_machine(machine) for machine in machines if machine))
    text = "Means over seeds." + (f" Speed and memory on: {names}." if names else "")
    labels = ", ".join(label for _, label in group)
    title = f"Training cost, {labels}" if labels else "Training cost"
    return ReportTable(title, ["scheme", *COSTS], rows, text)


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
    facts = {key: str(losses.facts[key]) for key in FACTS if key in losses.facts}
    facts.pop("checkpoint_hash", None)  # of one cell
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
    note = "First 16 digits of each SHA-256; results.json has all digits."
    return ReportTable("Cells", columns, rows, note, numbers=6)


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
