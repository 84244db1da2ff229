"""results.json of a study, gathered from the run directories of its cells."""

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data.files import read_object, write_json
from model import Transformer
from run_directory.checkpoints import Checkpoint
from run_directory.metrics_file import read_metrics
from run_directory.run import MANIFEST
from run_directory.run_settings import RunSettings
from run_directory.stages import stages_of
from studies.results.stored import RESULTS, SCHEME
from studies.running.commands import TRAINING, evaluation_results, last_checkpoint
from studies.running.plan import PlannedCell
from studies.study_settings import StudySettings

TIMES = "times.jsonl"  # a line for each command that ran: its cell, part and seconds
VOLATILE = ("command", "finished", "timing")  # keys of evaluation results that differ between calls
# equal: the same batches
SAME_BATCHES = ("seed", "train_length", "batch_size", "tokens", "data_hash")


def gather(
    study: StudySettings,
    name: str,
    folder: Path,
    plans: Sequence[PlannedCell],
    errors: Mapping[str, str] | None = None,
) -> dict:
    """Write results.json from the run directories of all cells, and return it.

    Apart from `timing` it depends on the run directories only, and on `errors`: of the cells that
    ended in this call. A cell that did not run keeps its earlier error.
    """
    earlier = []
    if (folder / RESULTS).is_file():
        earlier = read_object(folder / RESULTS)["cells"]
    known = {cell["id"]: cell["error"] for cell in earlier} | dict(errors or {})
    timings = {cell["id"]: cell["timing"] for cell in earlier}
    for cell, lines in read_times(folder).items():
        timings[cell] = {f"{clock}_seconds": _sums(lines, clock) for clock in ("wall", "cpu")}
    entries = [_entry(plan, known.get(plan.id), timings.get(plan.id, {})) for plan in plans]
    results = {
        "format": 1,
        "name": name,
        "study": study.model_dump(mode="json"),
        "checks": {"data_order": data_order(entries), "equal_tokens": equal_tokens(entries)},
        "cells": entries,
    }
    write_json(folder / RESULTS, results)
    return results


def read_times(folder: Path) -> dict[str, list[dict]]:
    """The seconds of every command that ran, interrupted ones included, by cell."""
    times = defaultdict(list)
    if (folder / TIMES).is_file():
        for line in (folder / TIMES).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            times[record["cell"]].append(record)
    return times


def _entry(plan: PlannedCell, error: str | None, timing: dict[str, Any]) -> dict[str, Any]:
    """A cell as in results.json."""
    timing = {"wall_seconds": {}, "cpu_seconds": {}} | timing
    entry = {
        "id": plan.id,
        "axes": plan.cell.axes,
        "status": "failed" if error else "pending",
        "error": error,
        "training": None,
        "timing": timing,
        "evaluations": {},
    }
    checkpoint = last_checkpoint(plan)
    if checkpoint is None:
        return entry
    lines = read_metrics(plan.run / "metrics.jsonl")
    manifest = read_object(plan.run / MANIFEST)
    entry["training"] = _training(plan, checkpoint, manifest, lines)
    timing |= _timing(plan, manifest, lines)
    for evaluation in plan.evaluations:
        results = evaluation_results(plan, evaluation, checkpoint)
        if results is not None:
            kept = {key: value for key, value in results.items() if key not in VOLATILE}
            if "checkpoint" in kept:  # an absolute path
                kept["checkpoint"] = f"runs/{plan.id}"
            entry["evaluations"][evaluation.name] = kept
    if len(entry["evaluations"]) == len(plan.evaluations):
        entry |= {"status": "done", "error": None}
    return entry


def _sums(times: Sequence[dict], clock: str) -> dict[str, float]:
    """Seconds of each part: of all attempts of the training, of the last one of an evaluation."""
    sums: dict[str, float] = {}
    for line in times:
        part = line["part"]
        earlier = sums.get(part, 0.0) if part == TRAINING else 0.0
        sums[part] = round(earlier + line[clock], 2)
    return sums


def _training(
    plan: PlannedCell,
    checkpoint: Checkpoint,
    manifest: dict,
    lines: list[dict],
) -> dict:
    """Results of training, which do not depend on the machine."""
    settings = plan.settings
    steps = [line for line in lines if line["kind"] == "train"]
    tokens = settings.trained_tokens
    flops = flops_of(settings, manifest["vocab_size"])
    batches = [line.get("data") for line in steps]
    order = None
    if batches and all(batches):
        order = hashlib.sha256(json.dumps(batches).encode()).hexdigest()
    return {
        "run": f"runs/{plan.id}",
        "tokens": tokens,
        "steps": settings.steps,
        "parameters": manifest.get("parameters"),
        "flops_per_token": flops / tokens,
        "flops": flops,
        "loss": steps[-1]["loss"] if steps else None,
        "checkpoint_hash": checkpoint.hash,
        "data_hash": manifest.get("data_hash"),
        "data_order": order,  # of the batches of all steps
        "batch_size": settings.training.batch_size,
        "train_length": settings.train_length,
        "seed": settings.seed,
        "position": settings.model.positions_record(),
    }


def _timing(plan: PlannedCell, manifest: dict, lines: list[dict]) -> dict:
    """What depends on the machine."""
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    rate = statistics.median(rates) if rates else None
    attempts = manifest.get("attempts") or [{}]
    return {
        "seconds": plan.settings.trained_tokens / rate if rate else None,
        "tokens_per_second": rate,
        "peak_memory_bytes": max((line.get("peak_memory_bytes", 0) for line in lines), default=0)
        or None,
        "machine": attempts[-1].get("machine"),
        "attempts": len(attempts),
    }


def flops_of(settings: RunSettings, vocab_size: int) -> float:
    """Training FLOPs of the whole run, summed over its stages."""
    stages = stages_of(settings)
    ends = [*(stage.start for stage in stages[1:]), settings.steps]
    total = 0.0
    for stage, end in zip(stages, ends, strict=True):
        with torch.device("meta"):
            model = Transformer(
                stage.model, vocab_size, settings.train_length, settings.original_length
            )
        tokens = settings.tokens_after(end) - settings.tokens_after(stage.start)
        total += tokens * float(model.flops_per_token(stage.length))
    return total


def data_order(entries: Sequence[dict]) -> list[dict]:
    """For every (seed, length, batch size, tokens, data): whether all trained cells saw the same
    batches in the same order."""
    groups: dict[tuple, dict[str, list[str]]] = {}
    for entry in entries:
        training = entry["training"]
        if training is not None and training["data_order"] is not None:
            key = tuple(training[name] for name in SAME_BATCHES)
            orders = groups.setdefault(key, {})
            orders.setdefault(training["data_order"], []).append(entry["id"])
    return [
        {
            **dict(zip(SAME_BATCHES, key, strict=True)),
            "cells": sum(map(len, orders.values())),
            "agree": len(orders) == 1,
            "orders": orders,
        }
        for key, orders in groups.items()
    ]


def equal_tokens(entries: Sequence[dict]) -> bool:
    """Whether schemes that agree on all other axes were trained on the same number of tokens."""
    known: dict[frozenset, int] = {}
    for entry in entries:
        if entry["training"] is not None:
            tokens = entry["training"]["tokens"]
            others = frozenset(item for item in entry["axes"].items() if item[0] != SCHEME)
            if known.setdefault(others, tokens) != tokens:
                return False
    return True
