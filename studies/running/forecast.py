"""--dry-run: the cells of a study, what is left to do, and the estimated time."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from data import PreparedData
from data.files import read_object
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.reports.text import counted
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.scoring.plan import make_plan
from evaluation.scoring.text import EvaluationText
from model import Transformer, find_device
from run_directory.checkpoints import steps_of
from run_directory.console import Console, duration
from run_directory.metrics_file import read_metrics
from run_directory.position_overrides import make_model
from run_directory.run import MANIFEST, is_run
from studies.running.cell_record import CellRecord, flops_of, last_checkpoint
from studies.running.corpora import StudyCorpora
from studies.running.plan import PlannedCell, PlannedEvaluation
from training.checks import input_limit
from training.hardware import USUAL_SHARE, peak_flops

COLUMNS = ["#", "cell", "parameters", "tokens", "train length", "training FLOPs", "state"]


def print_forecast(
    plans: Sequence[PlannedCell], corpora: StudyCorpora, folder: Path, jobs: int, console: Console
) -> None:
    """Print a table of all cells and one line about the remaining work."""
    rows = []
    costs = []  # of what is left
    n_left = 0
    for plan in plans:
        vocabulary = _vocabulary(plan, corpora.of_run(plan))
        with torch.device("meta"):
            model = make_model(plan.settings, vocabulary)
        flops = flops_of(plan.settings, vocabulary)
        left = _remaining(plan, corpora, folder, model, flops)
        rows.append([
            plan.cell.index,
            plan.id,
            f"{model.parameter_count():,}",
            f"{plan.settings.trained_tokens:,}",
            plan.settings.train_length,
            f"{flops:.3g}",
            f"left: {', '.join(left)}" if left else "done",
        ])  # fmt: skip
        costs += left.values()
        n_left += bool(left)
    count = counted(len(plans), "cell")
    console.table(f"{count} in {folder}", COLUMNS, rows)
    if not n_left:
        print("everything is done")
        return
    total = sum(cost for cost in costs if cost is not None)
    rate, source = _rate(plans)
    text = f"{n_left} of {count} left: {total:.3g} FLOPs"
    if total:
        text += f", about {duration(total / rate / jobs)} at {rate / 1e9:.3g} GFLOP/s per job"
        text += f" with {counted(jobs, 'job')} ({source})"
    if None in costs:
        text += (
            "; not included: evaluations other than losses, or on corpora that are not prepared yet"
        )
    print(text)


def _rate(plans: Sequence[PlannedCell]) -> tuple[float, str]:
    """FLOP/s of one job, measured on trained cells or else a share of the peak; its source."""
    rates = []
    for plan in plans:
        metrics = plan.run / "metrics.jsonl"
        lines = read_metrics(metrics, "train") if metrics.is_file() else []
        speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
        if speeds:
            flops = flops_of(plan.settings, _vocabulary(plan, None))
            rates.append(statistics.median(speeds) * flops / plan.settings.trained_tokens)
    if rates:
        return statistics.median(rates), "measured on its cells"
    peak = peak_flops(find_device("auto"))
    return peak * USUAL_SHARE, f"{USUAL_SHARE:.0%} of peak; small models reach less"


def _remaining(
    plan: PlannedCell, corpora: StudyCorpora, folder: Path, model: Transformer, flops: float
) -> dict[str, float | None]:
    """FLOPs of unfinished training and evaluations by name; None: unknown. `flops`: of the whole
    training."""
    left: dict[str, float | None] = {}
    checkpoint = last_checkpoint(plan)
    if checkpoint is None:
        step = max(steps_of(plan.run), default=0)
        name = f"training from step {step:,}" if step else "training"
        done = plan.settings.tokens_after(step) / plan.settings.trained_tokens
        left[name] = flops * (1 - done)
    record = CellRecord(folder, plan)
    for evaluation in plan.evaluations:
        extra = corpora.arguments(plan, evaluation)
        if checkpoint is None or not record.is_evaluated(
            evaluation,
            extra,
            checkpoint,
        ):
            prepared = corpora.of_evaluation(plan, evaluation)
            left[evaluation.name] = _evaluation_flops(
                plan,
                evaluation,
                prepared,
                model,
            )
    return left


def _vocabulary(plan: PlannedCell, prepared: PreparedData | None) -> int:
    if is_run(plan.run):
        return read_object(plan.run / MANIFEST)["vocab_size"]
    if prepared is not None:
        return prepared.tokenizer.vocab_size
    return getattr(plan.settings.data.tokenizer, "vocab_size", 258)


def _evaluation_flops(
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
    windows = make_plan(
        settings,
        text,
        store.hash,
        prepared.tokenizer.hash,
        length,
    ).windows
    limit = input_limit(plan.settings)
    methods = {TRAINED, *settings.methods} - {TRUNCATE}
    flops = 0.0
    for n, window in windows.items():
        if limit is None or n <= limit:
            flops += (
                int(window.inputs.sum()) * model.flops_per_token(n) / 3
            )  # without the backward pass
    return flops * len(methods)
