"""What is known of a cell: how far it is, and its entry in the study's results.

Each cell has a file of its own, cells/<cell>.json, written by whoever works on it. `finished` in it says
which evaluations are done, of which checkpoint, under which settings; `entry` goes into results.json.
"""

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from data.files import sha256_of, write_json
from evaluation.exposure_strip import shares, thinned
from evaluation.targets import content_hash
from model import Transformer
from studies.plan import CellPlan, Evaluation
from training.checkpoint import Checkpoint, find_checkpoint
from training.errors import TrainingError
from training.exposure import exposure_of
from training.files import read_json
from training.log import read_metrics
from training.run import MANIFEST, is_run
from training.settings import RunSettings
from training.stages import stages_of

FREE = {"folder", "device", "batch", "memory"}  # settings of evaluations that do not decide what is measured
VOLATILE = ("command", "finished", "timing")  # of an evaluation's results: when, where and how it was called


def trained(plan: CellPlan) -> Checkpoint | None:
    """The good checkpoint of the cell's last step; None where training is not finished."""
    if not is_run(plan.run):
        return None
    try:
        return find_checkpoint(plan.run, step=plan.settings.steps)
    except TrainingError:  # not there yet, or damaged: train.py knows what to do
        return None


def results_of(plan: CellPlan, name: str) -> Path:
    return plan.run / "evaluation" / name / "results.json"


class CellFile:
    """cells/<cell>.json."""

    def __init__(self, folder: Path, plan: CellPlan):
        self.plan = plan
        self.file = folder / "cells" / f"{plan.cell.id}.json"
        known = read_json(self.file) if self.file.is_file() else {}
        self.finished: dict[str, dict] = known.get("finished", {})
        self.seconds: dict[str, float] = known.get("seconds", {})
        self._current: set[str] = set()  # evaluations known to be done under the settings of now

    def evaluated(self, evaluation: Evaluation, words: list[str], checkpoint: Checkpoint) -> bool:
        """Whether this evaluation is done: of this checkpoint, under these settings, its results intact."""
        known, results = self.finished.get(evaluation.name), results_of(self.plan, evaluation.name)
        if known is None or known["identity"] != _identity(evaluation, words, checkpoint):
            return False
        if not results.is_file() or sha256_of(results) != known["results"]:
            return False
        self._current.add(evaluation.name)
        return True

    def note(self, evaluation: Evaluation, words: list[str], checkpoint: Checkpoint) -> None:
        """This evaluation has just been done."""
        self._current.add(evaluation.name)
        self.finished[evaluation.name] = {
            "identity": _identity(evaluation, words, checkpoint),
            "results": sha256_of(results_of(self.plan, evaluation.name)),
        }

    def save(self, status: str, error: str | None, checkpoint: Checkpoint | None) -> None:
        """Write down where the cell stands, with its entry for results.json."""
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


def pending(plan: CellPlan) -> dict[str, Any]:
    """The entry of a cell that nobody has worked on."""
    return {
        "id": plan.cell.id,
        "axes": plan.cell.axes,
        "status": "pending",
        "error": None,
        "training": None,
        "timing": {},
        "evaluations": {},
    }


def _identity(evaluation: Evaluation, words: list[str], checkpoint: Checkpoint) -> str:
    settings = evaluation.settings.asked(FREE & set(type(evaluation.settings).model_fields))
    return content_hash({"settings": settings, "words": words, "checkpoint": checkpoint.hash})


def _evaluation(plan: CellPlan, name: str) -> dict:
    found = {key: value for key, value in read_json(results_of(plan, name)).items() if key not in VOLATILE}
    if "checkpoint" in found:  # the run's place on this machine
        found["checkpoint"] = f"runs/{plan.cell.id}"
    return found


def _training(plan: CellPlan, checkpoint: Checkpoint) -> tuple[dict, dict]:
    """(what was trained, how fast and on what): only the second depends on the machine's mood."""
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
    """Which positions and distances were trained, as shares of the training tokens, thinned to 12 points an
    octave; None where it cannot be known any more."""
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
    """Training FLOPs of the whole run; its stages may differ."""
    stages, total = stages_of(settings), 0.0
    for stage, end in zip(stages, [*(s.start for s in stages[1:]), settings.steps], strict=True):
        with torch.device("meta"):
            model = Transformer(stage.model, vocab_size, settings.train_length, settings.original_length)
        tokens = settings.tokens_after(end) - settings.tokens_after(stage.start)
        total += tokens * float(model.flops_per_token(stage.length))
    return total


def _order_of(steps: list[dict]) -> str | None:
    """One hash of the text of all steps in their order; None where a step's is not known."""
    hashes = [line.get("data") for line in steps]
    if not hashes or not all(hashes):
        return None
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
