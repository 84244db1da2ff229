"""results.json of a study, gathered from the run directories of its cells."""

import hashlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from data.files import read_object, write_json
from run_directory.checkpoints import Checkpoint
from run_directory.metrics_file import read_metrics
from run_directory.position_overrides import meta_model
from run_directory.run import MANIFEST
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import flops_of
from studies.cell_pool import errors_of, read_times
from studies.planned_cells import PlannedCell
from studies.study_results_reader import RESULTS
from studies.study_settings import StudySettings

VOLATILE = ("command", "finished", "timing")  # keys of evaluation results that differ between calls


def gather(study: StudySettings, name: str, folder: Path, cells: Sequence[PlannedCell]) -> dict:
    """Write results.json from the run directories of all cells, and return it.

    Except for `timing`, the content depends only on the run directories and on the errors of
    unfinished cells.
    """
    times = read_times(folder)
    errors = errors_of(times)
    results = {
        "format": 1,
        "name": name,
        "study": study.model_dump(mode="json"),
        "cells": [
            entry_of(cell, errors.get(cell.id), times.loc[times.cell == cell.id]) for cell in cells
        ],
    }
    write_json(folder / RESULTS, results)
    return results


def entry_of(cell: PlannedCell, error: str | None, times: pd.DataFrame) -> dict[str, Any]:
    """The entry of a cell in results.json."""
    sums = times.groupby("part", sort=False)[["wall", "cpu"]].agg("sum").round(2)
    timing: dict[str, Any] = {
        f"{clock}_seconds": seconds for clock, seconds in sums.to_dict().items()
    }
    entry = {
        "id": cell.id,
        "axes": cell.axes,
        "status": "failed" if error else "pending",
        "error": error,
        "training": None,
        "timing": timing,
        "evaluations": {},
    }
    checkpoint = cell.last_checkpoint()
    if checkpoint is None:
        return entry
    lines = read_metrics(cell.run / "metrics.jsonl")
    manifest = read_object(cell.run / MANIFEST)
    entry["training"] = _training(cell, checkpoint, manifest, lines)
    timing |= _timing(cell, manifest, lines)
    for evaluation in cell.evaluations:
        results = cell.results(evaluation, checkpoint)
        if results is not None:
            kept = {key: value for key, value in results.items() if key not in VOLATILE}
            if "checkpoint" in kept:  # contains an absolute path
                kept["checkpoint"] = f"runs/{cell.id}"
            entry["evaluations"][evaluation.name] = kept
    if len(entry["evaluations"]) == len(cell.evaluations):
        entry |= {"status": "done", "error": None}
    return entry


def _training(
    cell: PlannedCell, checkpoint: Checkpoint, manifest: dict, lines: list[dict]
) -> dict[str, Any]:
    """The results of training, which do not depend on the machine."""
    settings = cell.settings
    steps = [line for line in lines if line["kind"] == "train"]
    tokens = settings.trained_tokens
    flops = flops_of(settings, manifest["vocab_size"])
    batches = [line.get("data") for line in steps]
    order = None
    if batches and all(batches):
        order = hashlib.sha256(json.dumps(batches).encode()).hexdigest()
    return {
        "run": f"runs/{cell.id}",
        "tokens": tokens,
        "steps": settings.steps,
        "parameters": manifest.get("parameters"),
        "layer_parameters": layer_parameters(settings, manifest["vocab_size"]),
        "flops_per_token": flops / tokens,
        "flops": flops,
        "loss": steps[-1]["loss"] if steps else None,
        "checkpoint_hash": checkpoint.hash,
        "data_hash": manifest.get("data_hash"),
        "data_order": order,  # hash of the batches of all steps
        "batch_size": settings.training.batch_size,
        "train_length": settings.train_length,
        "seed": settings.seed,
        "position": settings.model.positions_record(),
    }


def _timing(cell: PlannedCell, manifest: dict, lines: list[dict]) -> dict[str, Any]:
    """The entries that depend on the machine."""
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    rate = statistics.median(rates) if rates else None
    attempts = manifest.get("attempts") or [{}]
    memory = max((line.get("peak_memory_bytes", 0) for line in lines), default=0)
    return {
        "seconds": cell.settings.trained_tokens / rate if rate else None,
        "tokens_per_second": rate,
        "peak_memory_bytes": memory or None,
        "machine": attempts[-1].get("machine"),
        "attempts": len(attempts),
    }


def layer_parameters(settings: RunSettings, vocab_size: int) -> int:
    """Parameters without the embedding, the head and the last norm."""
    layers = meta_model(settings, vocab_size).layers
    return sum(weight.numel() for block in layers for weight in block.parameters())
