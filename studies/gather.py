"""The study's one results file, put together from its cells."""

from collections.abc import Sequence
from pathlib import Path

from studies.errors import StudyError
from studies.plan import CellPlan
from studies.records import pending
from studies.settings import SCHEME, StudySettings
from training.files import read_json, write_json

RESULTS = "results.json"


def gather(study: StudySettings, name: str, folder: Path, plans: Sequence[CellPlan]) -> dict:
    """Write results.json from the cells' files, and return it: the same for the same trainings, outside
    `timing`."""
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
    """What `gather` wrote. Raises StudyError where there is nothing."""
    if not (folder / RESULTS).is_file():
        raise StudyError(f"{folder / RESULTS} does not exist: run the study first")
    return read_json(folder / RESULTS)


def data_order(entries: Sequence[dict]) -> list[dict]:
    """For every (seed, length, batch size, tokens, data): whether all its finished cells saw the same text at
    every step."""
    keys = ("seed", "train_length", "batch_size", "tokens", "data_hash")
    groups: dict[tuple, dict[str, list[str]]] = {}
    for entry in entries:
        if (trained := entry["training"]) is not None and trained["data_order"] is not None:
            orders = groups.setdefault(tuple(trained[key] for key in keys), {})
            orders.setdefault(trained["data_order"], []).append(entry["id"])
    return [
        {
            **dict(zip(keys, key, strict=True)),
            "cells": sum(map(len, orders.values())),
            "agree": len(orders) == 1,
            "orders": orders,
        }
        for key, orders in groups.items()
    ]


def equal_tokens(entries: Sequence[dict]) -> bool:
    """Whether schemes that are compared, all other axes equal, were trained on equally many tokens."""
    groups: dict[tuple, set[int]] = {}
    for entry in entries:
        if entry["training"] is not None:
            where = tuple(sorted((k, v) for k, v in entry["axes"].items() if k != SCHEME))
            groups.setdefault(where, set()).add(entry["training"]["tokens"])
    return all(len(tokens) == 1 for tokens in groups.values())


def disagreements(results: dict) -> list[str]:
    """What makes the cells no fair comparison, in sentences."""
    lines = []
    for group in results["checks"]["data_order"]:
        if not group["agree"]:
            cells = "; ".join(", ".join(names) for names in group["orders"].values())
            lines.append(
                f"cells of seed {group['seed']} were not trained on the same text in the same order: {cells}"
            )
    if not results["checks"]["equal_tokens"]:
        lines.append("schemes were not trained on equally many tokens: compare with care")
    return lines
