"""Tables about the cells of a study: training cost, provenance, missing results."""

from collections.abc import Sequence

import pandas as pd

from evaluation.reports.document import NONE, Cell, ReportTable, TableCell
from studies.results.loss_comparison import LossComparison
from studies.results.stored import Group, StoredStudy

MIB = 2**20
COSTS = {  # key in a cell's record: column, format
    "parameters": ("parameters", ",.0f"),
    "tokens": ("tokens", ",.0f"),
    "flops_per_token": ("FLOPs per token", ".3g"),
    "flops": ("training FLOPs", ".3g"),
    "loss": ("last training loss", ".3f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "seconds": ("seconds", ",.0f"),
    "peak_memory_bytes": ("peak memory, MiB", ",.0f"),
}


def costs(study: StoredStudy, group: Group) -> ReportTable:
    """Training cost of each scheme, mean over its seeds."""
    records = []
    machines = {}
    for cell in study.cells:
        training = cell.record.get("training")
        if training and cell.group == group:
            facts = training | cell.record["timing"]
            numbers = {key: facts.get(key) for key in COSTS}
            records.append({"scheme": cell.scheme, **numbers})
            machine = facts.get("machine", {})
            names = machine.get("gpus") or [machine.get("processor", "unknown")]
            machines |= dict.fromkeys(names)
    table = pd.DataFrame(records, columns=["scheme", *COSTS])
    table = table.set_index("scheme").astype(float)
    table["peak_memory_bytes"] /= MIB
    means = table.groupby(level=0, sort=False).mean()
    rows: list[list[Cell]] = []
    for scheme, own in means.iterrows():
        row: list[Cell] = [str(scheme)]
        for key, (_, form) in COSTS.items():
            row.append(NONE if pd.isna(own[key]) else format(own[key], form))
        rows.append(row)
    columns = ["scheme", *(column for column, _ in COSTS.values())]
    note = f"Means over seeds. Speed and memory on: {', '.join(machines)}."
    title = ", ".join(["Training cost", *(label for _, label in group)])
    return ReportTable(title, columns, rows, note)


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
    for table in tables:
        losses = table.losses
        for (name, length), reason in losses.missing.items():
            lengths.setdefault((losses.name, name, reason), []).append(f"{length:,}")
        for cell, reason in losses.excluded.items():
            lengths[losses.name, cell, reason] = ["all"]
    columns = ["evaluation", "scheme", "reason", "lengths"]
    rows: list[list[Cell]] = [[*key, ", ".join(own)] for key, own in lengths.items()]
    return ReportTable("Missing results", columns, rows, numbers=3)
