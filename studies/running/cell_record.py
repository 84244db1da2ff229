"""The state of each cell, stored in cells/<cell>.json, and results.json, which gathers them.

In cells/<cell>.json `finished` maps each completed evaluation to hashes of its checkpoint, settings
and results; `entry` is copied into results.json.
"""

import hashlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from data.files import canonical_hash, read_object, sha256_of, write_json
from errors import TrainingError
from model import Transformer
from run_directory.checkpoints import Checkpoint, find_checkpoint
from run_directory.metrics_file import read_metrics
from run_directory.run import MANIFEST, is_run
from run_directory.run_settings import RunSettings
from run_directory.stages import stages_of
from studies.grid import GridCell
from studies.results.stored import RESULTS, SCHEME
from studies.running.plan import PlannedCell, PlannedEvaluation
from studies.study_settings import StudySettings

# evaluation settings that do not change the results
FREE = {"folder", "device", "batch", "context", "memory"}
TRAINING = "training"  # the part of a cell besides its evaluations, among the times
VOLATILE = ("command", "finished", "timing")  # keys of evaluation results that differ between calls
# equal: the same batches
SAME_BATCHES = ("seed", "train_length", "batch_size", "tokens", "data_hash")


def last_checkpoint(plan: PlannedCell) -> Checkpoint | None:
    """The intact checkpoint of the cell's last step; None if training has not finished."""
    if not is_run(plan.run):
        return None
    try:
        return find_checkpoint(plan.run, step=plan.settings.steps)
    except TrainingError:  # missing or damaged
        return None


class CellRecord:
    """The file cells/<cell>.json."""

    def __init__(self, folder: Path, plan: PlannedCell):
        self.plan = plan
        self.file = _file(folder, plan.cell)
        known = read_object(self.file) if self.file.is_file() else {}
        self.finished: dict[str, dict] = known.get("finished", {})
        self.entry: dict[str, Any] = known.get("entry", pending_entry(plan.cell))
        timing = self.entry["timing"]
        self.seconds: dict[str, float] = timing.get("wall_seconds", {})  # of each part
        self.cpu_seconds: dict[str, float] = timing.get("cpu_seconds", {})
        self._current: set[str] = set()  # evaluations done under the current settings

    def _results(self, evaluation: PlannedEvaluation) -> Path:
        folder = evaluation.settings.folder
        assert folder is not None  # the plan sets it
        return self.plan.run / "evaluation" / folder / "results.json"

    def is_evaluated(self, evaluation: PlannedEvaluation, identity: str) -> bool:
        """Whether intact results of an evaluation with this `identity_of` exist."""
        name = evaluation.name
        results = self._results(evaluation)
        if not results.is_file():
            return False
        is_same = self.finished.get(name) == _finished(identity, results)
        if is_same:
            self._current.add(name)
        return is_same

    def mark_evaluated(self, evaluation: PlannedEvaluation, identity: str) -> None:
        self._current.add(evaluation.name)
        self.finished[evaluation.name] = _finished(identity, self._results(evaluation))

    def add_time(self, name: str, wall: float, cpu: float) -> None:
        """Add the time of an attempt of the training or of an evaluation."""
        for seconds, spent in ((self.seconds, wall), (self.cpu_seconds, cpu)):
            earlier = seconds.get(name, 0.0) if name == TRAINING else 0.0
            seconds[name] = round(earlier + spent, 2)

    def save(
        self,
        status: str,
        error: str | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Write the state of the cell and its entry for results.json."""
        entry = pending_entry(self.plan.cell) | {"status": status, "error": error}
        entry["timing"] = {"wall_seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        if checkpoint is not None:
            lines = read_metrics(self.plan.run / "metrics.jsonl")
            manifest = read_object(self.plan.run / MANIFEST)
            entry["training"] = _training(self.plan, checkpoint, manifest, lines)
            entry["timing"] |= _timing(self.plan, manifest, lines)
            for evaluation in self.plan.evaluations:
                if evaluation.name in self._current:
                    entry["evaluations"][evaluation.name] = self._evaluation(evaluation)
        write_json(self.file, {"format": 1, "finished": self.finished, "entry": entry})

    def _evaluation(self, evaluation: PlannedEvaluation) -> dict:
        results = read_object(self._results(evaluation))
        results = {key: value for key, value in results.items() if key not in VOLATILE}
        if "checkpoint" in results:  # an absolute path
            results["checkpoint"] = f"runs/{self.plan.id}"
        return results


def _file(folder: Path, cell: GridCell) -> Path:
    return folder / "cells" / f"{cell.id}.json"


def pending_entry(cell: GridCell) -> dict[str, Any]:
    """The entry of a cell that has not been started."""
    return {
        "id": cell.id,
        "axes": cell.axes,
        "status": "pending",
        "error": None,
        "training": None,
        "timing": {},
        "evaluations": {},
    }


def _finished(identity: str, results: Path) -> dict[str, str]:
    return {"identity": identity, "results": sha256_of(results)}


def identity_of(evaluation: PlannedEvaluation, extra: list[str], checkpoint: Checkpoint) -> str:
    """Of what determines the results of an evaluation. `extra`: arguments of evaluate.py besides
    the evaluation's own."""
    settings = evaluation.settings.asked(FREE & set(type(evaluation.settings).model_fields))
    return canonical_hash({"settings": settings, "extra": extra, "checkpoint": checkpoint.hash})


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


def gather(
    study: StudySettings,
    name: str,
    folder: Path,
    cells: Sequence[GridCell],
) -> dict:
    """Write results.json from the files of the cells, and return it. Apart from `timing` it depends
    on the training runs only."""
    entries = []
    for cell in cells:
        file = _file(folder, cell)
        entries.append(read_object(file)["entry"] if file.is_file() else pending_entry(cell))
    results = {
        "format": 1,
        "name": name,
        "study": study.model_dump(mode="json"),
        "checks": {"data_order": data_order(entries), "equal_tokens": equal_tokens(entries)},
        "cells": entries,
    }
    write_json(folder / RESULTS, results)
    return results


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
