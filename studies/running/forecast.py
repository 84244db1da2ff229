"""--dry-run: the cells of a study, what is left to do, and the estimated time."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evaluation import EvaluationSettings, EvaluationText
from evaluation.scoring.plan import make_plan
from model import Transformer, find_device
from studies.report.document import counted
from studies.running.plan import PlannedCell, PlannedEvaluation
from studies.running.records import CellRecord, flops_of, trained
from studies.running.texts import StudyTexts
from training.checkpoint.storage import steps_of
from training.files import read_json
from training.logging.console import Console, duration
from training.logging.metrics_file import read_metrics
from training.run.checks import make_model, reach_of
from training.run.directory import MANIFEST, is_run
from training.run.hardware import USUAL_SHARE, peak_flops


@dataclass
class _Row:
    plan: PlannedCell
    parameters: int
    flops: float  # of the whole training
    left: float  # FLOPs of unfinished training and loss evaluations
    state: str
    unknown: bool  # some unfinished evaluations have no cost estimate


def print_forecast(
    plans: Sequence[PlannedCell], texts: StudyTexts, folder: Path, jobs: int, console: Console
) -> None:
    """Print a table of all cells and one line about the remaining work."""
    rows = [_row(plan, texts, folder) for plan in plans]
    console.table(
        f"{counted(len(plans), 'cell')} in {folder}",
        ["#", "cell", "parameters", "tokens", "train length", "training FLOPs", "state"],
        [
            [
                row.plan.cell.index,
                row.plan.cell.id,
                f"{row.parameters:,}",
                f"{row.plan.settings.trained_tokens:,}",
                row.plan.settings.train_length,
                f"{row.flops:.3g}",
                row.state,
            ]
            for row in rows
        ],
    )
    print(_remaining(rows, jobs))


def _remaining(rows: Sequence[_Row], jobs: int) -> str:
    left, n_left = sum(row.left for row in rows), sum(row.state != "done" for row in rows)
    if not n_left:
        return "everything is done"
    rate, source = _rate([row.plan for row in rows])
    text = f"{n_left} of {counted(len(rows), 'cell')} left: {left:.3g} FLOPs"
    if left:
        text += f", about {duration(left / rate / jobs)} at {rate / 1e9:.3g} GFLOP/s per job"
        text += f" with {counted(jobs, 'job')} ({source})"
    if any(row.unknown for row in rows):
        text += "; not included: evaluations other than losses, or on corpora that are not prepared yet"
    return text


def _rate(plans: Sequence[PlannedCell]) -> tuple[float, str]:
    """(FLOP/s of one job, where it comes from): measured on trained cells, else a share of the peak."""
    found = []
    for plan in plans:
        metrics = plan.run / "metrics.jsonl"
        if metrics.is_file():
            speeds = [s for line in read_metrics(metrics, "train") if (s := line.get("tokens_per_second"))]
            each = flops_of(plan.settings, _vocabulary(plan, None)) / plan.settings.trained_tokens
            found += [statistics.median(speeds) * each] if speeds else []
    if found:
        return statistics.median(found), "measured on its cells"
    device = find_device("auto")
    return peak_flops(device) * USUAL_SHARE, f"{USUAL_SHARE:.0%} of peak; small models reach less"


def _row(plan: PlannedCell, texts: StudyTexts, folder: Path) -> _Row:
    own = texts.of_run(plan)
    vocabulary = _vocabulary(plan, own)
    with torch.device("meta"):
        model = make_model(plan.settings, vocabulary)
    flops, checkpoint, record = flops_of(plan.settings, vocabulary), trained(plan), CellRecord(folder, plan)
    left, unknown, missing = 0.0, False, []
    if checkpoint is None:
        done = max(steps_of(plan.run), default=0)
        left += flops * (1 - plan.settings.tokens_after(done) / plan.settings.trained_tokens)
        missing.append(f"training from step {done:,}" if done else "training")
    for evaluation in plan.evaluations:
        extra = texts.arguments(plan, evaluation)
        if checkpoint is not None and record.evaluated(evaluation, extra, checkpoint):
            continue
        missing.append(evaluation.name)
        cost = _cost(plan, evaluation, texts, model)
        left += cost or 0.0
        unknown |= cost is None
    state = f"left: {', '.join(missing)}" if missing else "done"
    return _Row(plan, model.parameter_count(), flops, left, state, unknown)


def _vocabulary(plan: PlannedCell, prepared: Any) -> int:
    if is_run(plan.run):
        return read_json(plan.run / MANIFEST)["vocab_size"]
    if prepared is not None:
        return prepared.tokenizer.vocab_size
    return getattr(plan.settings.data.tokenizer, "vocab_size", 258)


def _cost(
    plan: PlannedCell, evaluation: PlannedEvaluation, texts: StudyTexts, model: Transformer
) -> float | None:
    """FLOPs of a loss evaluation; None for other evaluations and corpora that are not prepared."""
    settings, prepared = evaluation.settings, texts.of_evaluation(plan, evaluation)
    if not isinstance(settings, EvaluationSettings) or prepared is None:
        return None
    store = prepared.valid if settings.split == "valid" else prepared.train
    text = EvaluationText(store, settings.bos, prepared.tokenizer.bos_id)
    length = plan.settings.train_length
    windows = make_plan(settings, text, store.hash, prepared.tokenizer.hash, length).windows
    labels = set(settings.methods) - {"truncate"} | {"trained"}
    limit = reach_of(plan.settings)
    each = sum(
        w.n_inputs * model.flops_per_token(n) / 3 for n, w in windows.items() if limit is None or n <= limit
    )
    return each * len(labels)
