"""What a study will take, told before anything is started."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evaluation import EvaluationSettings, Text
from evaluation.plan import make_plan
from model import Transformer
from studies.document import counted
from studies.plan import CellPlan, Evaluation
from studies.records import CellFile, flops_of, trained
from studies.texts import Texts
from training.checkpoint import steps_of
from training.console import Console, duration
from training.files import read_json
from training.hardware import USUAL_SHARE, peak_flops
from training.log import read_metrics
from training.run import MANIFEST, is_run
from training.start import make_model, reach_of


@dataclass
class _Row:
    plan: CellPlan
    parameters: int
    flops: float  # of the whole training
    left: float  # FLOPs of training and loss evaluations that are not done
    state: str
    unknown: bool  # evaluations whose cost is not known are left


def show(plans: Sequence[CellPlan], texts: Texts, folder: Path, jobs: int, console: Console) -> None:
    """A table of all cells, and what is left to do in one line."""
    rows = [_row(plan, texts, folder) for plan in plans]
    console.table(
        f"{counted(len(plans), 'cell')} of {folder}",
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
    print(_words(rows, jobs))


def _words(rows: Sequence[_Row], jobs: int) -> str:
    left, n_left = sum(row.left for row in rows), sum(row.state != "done" for row in rows)
    if not n_left:
        return "everything is done"
    rate, source = _rate([row.plan for row in rows])
    text = f"{n_left} of {counted(len(rows), 'cell')} left: {left:.3g} FLOPs"
    if left:
        text += f", about {duration(left / rate / jobs)} at {rate / 1e9:.3g} GFLOP/s a job, {jobs} at a time"
        text += f" ({source})"
    if any(row.unknown for row in rows):
        text += "; evaluations of other kinds, or of text that is not prepared yet, come on top"
    return text


def _rate(plans: Sequence[CellPlan]) -> tuple[float, str]:
    """FLOP/s of one job: as finished cells have reached it, else a share of the machine's peak."""
    found = []
    for plan in plans:
        metrics = plan.run / "metrics.jsonl"
        if metrics.is_file():
            speeds = [s for line in read_metrics(metrics, "train") if (s := line.get("tokens_per_second"))]
            each = flops_of(plan.settings, _vocabulary(plan, None)) / plan.settings.trained_tokens
            found += [statistics.median(speeds) * each] if speeds else []
    if found:
        return statistics.median(found), "as its cells have trained so far"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return peak_flops(device) * USUAL_SHARE, f"{USUAL_SHARE:.0%} of the peak rate; small models reach less"


def _row(plan: CellPlan, texts: Texts, folder: Path) -> _Row:
    own = texts.of_run(plan)
    vocabulary = _vocabulary(plan, own)
    with torch.device("meta"):
        model = make_model(plan.settings, vocabulary)
    flops, checkpoint, file = flops_of(plan.settings, vocabulary), trained(plan), CellFile(folder, plan)
    left, unknown, missing = 0.0, False, []
    if checkpoint is None:
        done = max(steps_of(plan.run), default=0)
        left += flops * (1 - plan.settings.tokens_after(done) / plan.settings.trained_tokens)
        missing.append(f"training from step {done:,}" if done else "training")
    for evaluation in plan.evaluations:
        if checkpoint is not None and file.evaluated(evaluation, texts.words(plan, evaluation), checkpoint):
            continue
        missing.append(evaluation.name)
        cost = _cost(plan, evaluation, texts, model)
        left += cost or 0.0
        unknown |= cost is None
    state = f"left: {', '.join(missing)}" if missing else "done"
    return _Row(plan, model.parameter_count(), flops, left, state, unknown)


def _vocabulary(plan: CellPlan, prepared: Any) -> int:
    if is_run(plan.run):
        return read_json(plan.run / MANIFEST)["vocab_size"]
    if prepared is not None:
        return prepared.tokenizer.vocab_size
    return getattr(plan.settings.data.tokenizer, "vocab_size", 258)


def _cost(plan: CellPlan, evaluation: Evaluation, texts: Texts, model: Transformer) -> float | None:
    """FLOPs of an evaluation of the loss; None where they are not known."""
    settings, prepared = evaluation.settings, texts.of_evaluation(plan, evaluation)
    if not isinstance(settings, EvaluationSettings) or prepared is None:
        return None
    store = prepared.valid if settings.split == "valid" else prepared.train
    text = Text(store, settings.bos, prepared.tokenizer.bos_id)
    length = plan.settings.train_length
    windows = make_plan(settings, text, store.hash, prepared.tokenizer.hash, length).windows
    labels = set(settings.rules) - {"truncate"} | {"trained"}
    limit = reach_of(plan.settings)
    each = sum(
        w.n_inputs * model.flops_per_token(n) / 3 for n, w in windows.items() if limit is None or n <= limit
    )
    return each * len(labels)
