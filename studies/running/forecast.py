"""--dry-run: the cells of a study, what is left to do, and the estimated time."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from data import PreparedData
from data.files import read_object
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.scoring.plan import make_plan
from evaluation.scoring.text import EvaluationText
from evaluation.settings import EvaluationSettings
from model import Transformer, find_device
from studies.report.document import counted
from studies.running.plan import PlannedCell, PlannedEvaluation
from studies.running.records import CellRecord, flops_of, trained
from studies.running.texts import StudyTexts
from training.checkpoint.storage import steps_of
from training.logging.console import Console, duration
from training.logging.metrics_file import read_metrics
from training.run.checks import input_limit, make_model
from training.run.directory import MANIFEST, is_run
from training.run.hardware import USUAL_SHARE, peak_flops

COLUMNS = ["#", "cell", "parameters", "tokens", "train length", "training FLOPs", "state"]


def print_forecast(
    plans: Sequence[PlannedCell], texts: StudyTexts, folder: Path, jobs: int, console: Console
) -> None:
    """Print a table of all cells and one line about the remaining work."""
    rows = []
    left = 0.0
    n_left = 0
    is_partial = False
    for plan in plans:
        size, flops, missing = _forecast(plan, texts, folder)
        numbers = [
            f"{size:,}",
            f"{plan.settings.trained_tokens:,}",
            plan.settings.train_length,
            f"{flops:.3g}",
        ]
        rows.append(
            [
                plan.cell.index,
                plan.cell.id,
                *numbers,
                f"left: {', '.join(missing)}" if missing else "done",
            ]
        )
        left += sum(cost or 0.0 for cost in missing.values())
        n_left = n_left + bool(missing)
        is_partial = is_partial or None in missing.values()
    count = counted(len(plans), "cell")
    console.table(f"{count} in {folder}", COLUMNS, rows)
    if not n_left:
        print("everything is done")
        return
    rate, source = _rate(plans)
    text = f"{n_left} of {count} left: {left:.3g} FLOPs"
    if left:
        text += f", about {duration(left / rate / jobs)} at {rate / 1e9:.3g} GFLOP/s per job"
        text += f" with {counted(jobs, 'job')} ({source})"
    if is_partial:
        text += (
            "; not included: evaluations other than losses, or on corpora that are not prepared yet"
        )
    print(text)


def _rate(plans: Sequence[PlannedCell]) -> tuple[float, str]:
    """(FLOP/s of one job, where it comes from): measured on trained cells, else a share of the peak."""
    found = []
    for plan in plans:
        metrics = plan.run / "metrics.jsonl"
        lines = read_metrics(metrics, "train") if metrics.is_file() else []
        if speeds := [speed for line in lines if (speed := line.get("tokens_per_second"))]:
            each = flops_of(plan.settings, _vocabulary(plan, None)) / plan.settings.trained_tokens
            found.append(statistics.median(speeds) * each)
    if found:
        return statistics.median(found), "measured on its cells"
    return peak_flops(
        find_device("auto")
    ) * USUAL_SHARE, f"{USUAL_SHARE:.0%} of peak; small models reach less"


def _forecast(
    plan: PlannedCell, texts: StudyTexts, folder: Path
) -> tuple[int, float, dict[str, float | None]]:
    """(parameters, FLOPs of the whole training, FLOPs of unfinished training and evaluations by name; None:
    unknown)."""
    vocabulary = _vocabulary(plan, texts.of_run(plan))
    with torch.device("meta"):
        model = make_model(plan.settings, vocabulary)
    flops = flops_of(plan.settings, vocabulary)
    checkpoint = trained(plan)
    record = CellRecord(folder, plan)
    missing = {}
    if checkpoint is None:
        done = max(steps_of(plan.run), default=0)
        name = f"training from step {done:,}" if done else "training"
        missing[name] = flops * (
            1 - plan.settings.tokens_after(done) / plan.settings.trained_tokens
        )
    for evaluation in plan.evaluations:
        extra = texts.arguments(plan, evaluation)
        if checkpoint is None or not record.evaluated(evaluation, extra, checkpoint):
            text = texts.of_evaluation(plan, evaluation)
            missing[evaluation.name] = _cost(plan, evaluation, text, model)
    return model.parameter_count(), flops, missing


def _vocabulary(plan: PlannedCell, prepared: PreparedData | None) -> int:
    if is_run(plan.run):
        return read_object(plan.run / MANIFEST)["vocab_size"]
    if prepared is not None:
        return prepared.tokenizer.vocab_size
    return getattr(plan.settings.data.tokenizer, "vocab_size", 258)


def _cost(
    plan: PlannedCell,
    evaluation: PlannedEvaluation,
    prepared: PreparedData | None,
    model: Transformer,
) -> float | None:
    """FLOPs of a loss evaluation; None for other evaluations and corpora that are not prepared."""
    settings = evaluation.settings
    if not isinstance(settings, EvaluationSettings) or prepared is None:
        return None
    store = prepared.valid if settings.split == "valid" else prepared.train
    text = EvaluationText(store, settings.bos, prepared.tokenizer.bos_id)
    length = plan.settings.train_length
    windows = make_plan(settings, text, store.hash, prepared.tokenizer.hash, length).windows
    limit = input_limit(plan.settings)
    reachable = [(n, w.n_inputs) for n, w in windows.items() if limit is None or n <= limit]
    each = sum(inputs * model.flops_per_token(n) / 3 for n, inputs in reachable)
    return each * len((set(settings.methods) - {TRUNCATE}) | {TRAINED})
