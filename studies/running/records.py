"""The state of each cell, stored in cells/<cell>.json, and its entry in results.json.

`finished` maps each completed evaluation to hashes of its checkpoint, settings and results; `entry` is copied
into results.json.
"""

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from data.files import sha256_of, write_json
from evaluation.reports.exposure_strip import shares, thinned
from evaluation.scoring.targets import content_hash
from model import Transformer
from studies.running.plan import PlannedCell, PlannedEvaluation
from training.checkpoint.storage import Checkpoint, find_checkpoint
from training.config.settings import RunSettings
from training.errors import TrainingError
from training.exposure import exposure_of
from training.files import read_json
from training.logging.metrics_file import read_metrics
from training.run.directory import MANIFEST, is_run
from training.stages import stages_of

FREE = {"folder", "device", "batch", "memory"}  # evaluation settings that do not change the results
VOLATILE = ("command", "finished", "timing")  # keys of evaluation results that differ between calls


def trained(plan: PlannedCell) -> Checkpoint | None:
    """The intact checkpoint of the cell's last step; None if training has not finished."""
    if not is_run(plan.run):
        return None
    try:
        return find_checkpoint(plan.run, step=plan.settings.steps)
    except TrainingError:  # missing or damaged; train.py resumes from an earlier one
        return None


def results_of(plan: PlannedCell, name: str) -> Path:
    return plan.run / "evaluation" / name / "results.json"


class CellRecord:
    """The file cells/<cell>.json."""

    def __init__(self, folder: Path, plan: PlannedCell):
        self.plan = plan
        self.file = folder / "cells" / f"{plan.cell.id}.json"
        known = read_json(self.file) if self.file.is_file() else {}
        self.finished: dict[str, dict] = known.get("finished", {})
        self.seconds: dict[str, float] = known.get("seconds", {})
        self._current: set[str] = set()  # evaluations done under the current settings

    def evaluated(self, evaluation: PlannedEvaluation, extra: list[str], checkpoint: Checkpoint) -> bool:
        """Whether intact results of this checkpoint under these settings exist. `extra`: arguments of
        evaluate.py besides the evaluation's own."""
        known, results = self.finished.get(evaluation.name), results_of(self.plan, evaluation.name)
        if known is None or known["identity"] != _identity(evaluation, extra, checkpoint):
            return False
        if not results.is_file() or sha256_of(results) != known["results"]:
            return False
        self._current.add(evaluation.name)
        return True

    def mark_evaluated(self, evaluation: PlannedEvaluation, extra: list[str], checkpoint: Checkpoint) -> None:
        self._current.add(evaluation.name)
        self.finished[evaluation.name] = {
            "identity": _identity(evaluation, extra, checkpoint),
            "results": sha256_of(results_of(self.plan, evaluation.name)),
        }

    def save(self, status: str, error: str | None, checkpoint: Checkpoint | None) -> None:
        """Write the state of the cell and its entry for results.json."""
        entry = self._entry(status, error, checkpoint)
        write_json(
            self.file, {"format": 1, "finished": self.finished, "seconds": self.seconds, "entry": entry}
        )

    def _entry(self, status: str, error: str | None, checkpoint: Checkpoint | None) -> dict:
        plan = self.plan
        entry = pending(plan) | {"status": status, "error": error}
        if checkpoint is None:
            return entry
        entry["training"], entry["timing"] = _training(plan, checkpoint)
        entry["timing"]["wall_seconds"] = self.seconds
        for evaluation in plan.evaluations:
            if evaluation.name in self._current:
                entry["evaluations"][evaluation.name] = _evaluation(plan, evaluation.name)
        return entry


def pending(plan: PlannedCell) -> dict[str, Any]:
    """The entry of a cell that has not been started."""
    return {
        "id": plan.cell.id,
        "axes": plan.cell.axes,
        "status": "pending",
        "error": None,
        "training": None,
        "timing": {},
        "evaluations": {},
    }


def _identity(evaluation: PlannedEvaluation, extra: list[str], checkpoint: Checkpoint) -> str:
    settings = evaluation.settings.asked(FREE & set(type(evaluation.settings).model_fields))
    return content_hash({"settings": settings, "extra": extra, "checkpoint": checkpoint.hash})


def _evaluation(plan: PlannedCell, name: str) -> dict:
    found = {key: value for key, value in read_json(results_of(plan, name)).items() if key not in VOLATILE}
    if "checkpoint" in found:  # an absolute path
        found["checkpoint"] = f"runs/{plan.cell.id}"
    return found


def _training(plan: PlannedCell, checkpoint: Checkpoint) -> tuple[dict, dict]:
    """(results of training, timing): only the second depends on the machine."""
    settings, about = plan.settings, read_json(plan.run / MANIFEST)
    lines = read_metrics(plan.run / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "train"]
    tokens = settings.trained_tokens
    flops = flops_of(settings, about["vocab_size"])
    training = {
        "run": f"runs/{plan.cell.id}",
        "tokens": tokens,
        "steps": settings.steps,
        "parameters": about.get("parameters"),
        "flops_per_token": flops / tokens,
        "flops": flops,
        "loss": steps[-1]["loss"] if steps else None,
        "checkpoint_hash": checkpoint.hash,
        "data_hash": about.get("data_hash"),
        "data_order": _order_of(steps),
        "batch_size": settings.training.batch_size,
        "train_length": settings.train_length,
        "seed": settings.seed,
        "position": settings.model.position.model_dump(mode="json"),
        "exposure": _exposure(plan.run, checkpoint.step),
    }
    rates = [line["tokens_per_second"] for line in steps if line.get("tokens_per_second")]
    rate = statistics.median(rates) if rates else None
    memory = [line["peak_memory_bytes"] for line in lines if "peak_memory_bytes" in line]
    attempts = about.get("attempts") or [{}]
    timing = {
        "seconds": tokens / rate if rate else None,
        "tokens_per_second": rate,
        "peak_memory_bytes": max(memory, default=None),
        "machine": attempts[-1].get("machine"),
        "commit": attempts[-1].get("commit"),
        "attempts": len(attempts),
    }
    return training, timing


def _exposure(run: Path, step: int) -> dict | None:
    """Positions and distances seen in training, as shares of the training tokens, thinned to 12 points per
    octave; None if unknown."""
    found = exposure_of(run, step)
    if found is None:
        return None
    entry: dict[str, Any] = {"tokens": found.tokens, "steps": found.steps, "counted": found.counted}
    for name, counts, first in (
        ("positions", found.positions, found.first),
        ("distances", found.distances, 0),
    ):
        context, share = thinned(*shares(counts, found.tokens, first))
        entry[name] = {"context": context.tolist(), "share": share.tolist()}
    return entry


def flops_of(settings: RunSettings, vocab_size: int) -> float:
    """Training FLOPs of the whole run, summed over its stages."""
    stages, total = stages_of(settings), 0.0
    for stage, end in zip(stages, [*(s.start for s in stages[1:]), settings.steps], strict=True):
        with torch.device("meta"):
            model = Transformer(stage.model, vocab_size, settings.train_length, settings.original_length)
        tokens = settings.tokens_after(end) - settings.tokens_after(stage.start)
        total += tokens * float(model.flops_per_token(stage.length))
    return total


def _order_of(steps: list[dict]) -> str | None:
    """One hash of the batches of all steps in order; None if a step has no hash."""
    hashes = [line.get("data") for line in steps]
    if not hashes or not all(hashes):
        return None
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
