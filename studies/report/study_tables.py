"""Tables about the cells of a study: training cost, provenance, missing results."""

from collections.abc import Sequence

import pandas as pd

from evaluation.reports.document import NONE, Cell, ReportTable, TableCell
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
    records = [
        {"scheme": cell.scheme}
        | {name: (cell.record.get(part) or {}).get(key) for name, (part, key, *_) in COSTS.items()}
        for cell in study.cells
        if cell.group == group and cell.record.get("training")
    ]
    means = pd.DataFrame(records, columns=["scheme", *COSTS]).groupby("scheme", sort=False).mean()
    rows: list[list[Cell]] = []
    for scheme, *numbers in means.itertuples():
        texts = [
            NONE if pd.isna(number) else form.format(number / unit)
            for number, (_, _, unit, form) in zip(numbers, COSTS.values(), strict=True)
        ]
        rows.append([scheme, *texts])
    machines = [(cell.record.get("timing") or {}).get("machine") for cell in study.cells]
    names = "; ".join(dict.fromkeys(_machine(machine) for machine in machines if machine))
    text = "Means over seeds." + (f" Speed and memory on: {names}." if names else "")
    title = ", ".join(["Training cost", *(label for _, label in group)])
    return ReportTable(title, ["scheme", *COSTS], rows, text)


def _machine(facts: dict) -> str:
    """`AMD EPYC, 1 thread` or `NVIDIA H200`."""
    if gpus := facts.get("gpus"):
        return ", ".join(map(str, gpus))
    processor = str(facts.get("processor", "unknown"))
    threads = facts.get("threads")
    return f"{processor}, {counted(threads, 'thread')}" if threads else processor


def cells(study: StoredStudy) -> ReportTable:
    """All cells: their checkpoints, or why they have none."""
    rows: list[list[Cell]] = []
    for cell in study.cells:
        run = cell.record.get("training") or {}
        status = cell.record["status"]
        tone = "" if status == "done" else "bad"
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
