"""Tables about the cells of a study: training cost, provenance, missing results."""

from collections.abc import Sequence

import pandas as pd

from evaluation.reports.document import NONE, Cell, ReportTable, TableCell
from studies.results.loss_comparison import LossComparison
from studies.results.stored import Group, StoredStudy

MIB = 2**20
COSTS = {  # column: key in a cell's record, unit, format
    "parameters": ("parameters", 1, "{:,.0f}"),
    "tokens": ("tokens", 1, "{:,.0f}"),
    "FLOPs per token": ("flops_per_token", 1, "{:.3g}"),
    "training FLOPs": ("flops", 1, "{:.3g}"),
    "last training loss": ("loss", 1, "{:.3f}"),
    "tokens/s": ("tokens_per_second", 1, "{:,.0f}"),
    "seconds": ("seconds", 1, "{:,.0f}"),
    "peak memory, MiB": ("peak_memory_bytes", MIB, "{:,.0f}"),
}


def costs(study: StoredStudy, group: Group) -> ReportTable:
    """Training cost of each scheme, mean over its seeds."""
    records = []
    machines = {}
    for cell in study.cells:
        training = cell.record.get("training")
        if training and cell.group == group:
            facts = training | cell.record["timing"]
            numbers = {name: facts.get(key) for name, (key, *_) in COSTS.items()}
            records.append({"scheme": cell.scheme, **numbers})
            machine = facts.get("machine", {})
            machines |= dict.fromkeys(machine.get("gpus") or [machine.get("processor", "unknown")])
    means = pd.DataFrame(records, columns=["scheme", *COSTS]).groupby("scheme", sort=False).mean()
    rows: list[list[Cell]] = []
    for scheme, *numbers in means.itertuples():
        texts = [
            NONE if pd.isna(number) else form.format(number / unit)
            for number, (_, unit, form) in zip(numbers, COSTS.values(), strict=True)
        ]
        rows.append([scheme, *texts])
    note = f"Means over seeds. Speed and memory on: {', '.join(machines)}."
    title = ", ".join(["Training cost", *(label for _, label in group)])
    return ReportTable(title, ["scheme", *COSTS], rows, note)


def cells(study: StoredStudy) -> ReportTable:
    """All cells: their checkpoints, or why they have none."""
    rows: list[list[Cell]] = []
    for cell in study.cells:
        run = cell.record.get("training") or {}
        status = cell.record["status"]
        row: list[Cell] = [
            cell.id,
            TableCell(status, "" if status == "done" else "bad"),
            cell.record.get("error") or "",
            f"{run['steps']:,}" if run else NONE,
            run.get("checkpoint_hash", "")[:16],
            run.get("data_hash", "")[:16],
        ]
        rows.append(row)
    columns = ["cell", "status", "error", "steps", "checkpoint", "data"]
    note = "First 16 digits of each SHA-256; results.json has all digits."
    return ReportTable("Cells", columns, rows, note, numbers=6)


def excluded(tables: Sequence[LossComparison]) -> ReportTable:
    """Lengths that could not be evaluated, and results that are not comparable."""
    lengths: dict[tuple[str, ...], list[str]] = {}
    for losses in (table.losses for table in tables):
        for (name, length), reason in losses.missing.items():
            lengths.setdefault((losses.name, name, reason), []).append(f"{length:,}")
        for cell, reason in losses.excluded.items():
            lengths[losses.name, cell, reason] = ["all"]
    columns = ["evaluation", "scheme", "reason", "lengths"]
    rows: list[list[Cell]] = [[*key, ", ".join(own)] for key, own in lengths.items()]
    return ReportTable("Missing results", columns, rows, numbers=3)
