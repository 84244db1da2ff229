"""results.json: the results of all cells, and whether their comparison is fair."""

from collections.abc import Sequence
from pathlib import Path

from studies.errors import StudyError
from studies.running.plan import PlannedCell
from studies.running.records import pending
from studies.settings import SCHEME, StudySettings
from training.files import read_json, write_json

RESULTS = "results.json"


def gather(study: StudySettings, name: str, folder: Path, plans: Sequence[PlannedCell]) -> dict:
    """Write results.json from the files of the cells, and return it. Apart from `timing` it depends on the
    training runs only."""
    entries = []
    for plan in plans:
        file = folder / "cells" / f"{plan.cell.id}.json"
        entries.append(read_json(file)["entry"] if file.is_file() else pending(plan))
    results = {
        "format": 1,
        "name": name,
        "study": study.model_dump(mode="json"),
        "checks": {"data_order": data_order(entries), "equal_tokens": equal_tokens(entries)},
        "cells": entries,
    }
    write_json(folder / RESULTS, results)
    return results


def read_results(folder: Path) -> dict:
    """results.json of a study. Raises StudyError if it does not exist."""
    if not (folder / RESULTS).is_file():
        raise StudyError(f"{folder / RESULTS} does not exist; run the study first")
    return read_json(folder / RESULTS)


def data_order(entries: Sequence[dict]) -> list[dict]:
    """For every (seed, length, batch size, tokens, data): whether all trained cells saw the same batches in
    the same order."""
    keys = ("seed", "train_length", "batch_size", "tokens", "data_hash")
    groups: dict[tuple, dict[str, list[str]]] = {}
    for entry in entries:
        if (training := entry["training"]) is not None and training["data_order"] is not None:
            orders = groups.setdefault(tuple(training[key] for key in keys), {})
            orders.setdefault(training["data_order"], []).append(entry["id"])
    return [
        dict(zip(keys, key, strict=True))
        | {"cells": sum(map(len, orders.values())), "agree": len(orders) == 1, "orders": orders}
        for key, orders in groups.items()
    ]


def equal_tokens(entries: Sequence[dict]) -> bool:
    """Whether schemes that agree on all other axes were trained on the same number of tokens."""
    groups: dict[tuple, set[int]] = {}
    for entry in entries:
        if entry["training"] is not None:
            where = tuple(sorted((k, v) for k, v in entry["axes"].items() if k != SCHEME))
            groups.setdefault(where, set()).add(entry["training"]["tokens"])
    return all(len(tokens) == 1 for tokens in groups.values())


def unfair_comparisons(checks: dict) -> list[str]:
    """Warnings about cells that cannot be compared fairly, one sentence each."""
    lines = []
    for group in checks.get("data_order") or []:
        if not group["agree"]:
            cells = "; ".join(", ".join(names) for names in group["orders"].values())
            lines.append(f"Cells of seed {group['seed']} were trained on different batches: {cells}.")
    if checks.get("equal_tokens") is False:
        lines.append("The schemes were trained on different numbers of tokens.")
    return lines
