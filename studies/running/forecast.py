"""How long the cells of a study take: measured on earlier cells of the same kind, else estimated
from the time of one step."""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from data import PreparedData
from data.files import canonical_hash
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.tasks.task_settings import TaskEvaluationSettings
from model import find_device
from run_directory.checkpoints import steps_of
from run_directory.position_overrides import make_model
from run_directory.run_settings import RunSettings
from studies.running.cell_record import TRAINING, CellRecord, flops_of
from studies.running.cell_work import CellWork
from studies.running.children import value_of
from studies.running.corpora import StudyCorpora
from studies.running.plan import PlannedCell, PlannedEvaluation
from training.hardware import USUAL_SHARE, peak_flops

TIMED_FLOPS = 1e12  # larger steps are not timed
OVERHEAD = 0.5  # seconds of a training or an evaluation besides its passes
OPTIMIZER = 1.1  # a step's time, in those of its passes
GENERATED = 3  # passes over the tokens of a task's item: its candidates, and the generated answer


class StudyForecast:
    """Seconds of the cells of a study, by kind: cells of one kind differ in their seed only."""

    def __init__(self, plans: Sequence[PlannedCell], corpora: StudyCorpora, folder: Path):
        self.corpora = corpora
        self._measured: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._flops: dict[str, tuple[int, float]] = {}
        for plan in plans:
            self.add(plan, folder)

    def add(self, plan: PlannedCell, folder: Path) -> None:
        """Take the times of a finished cell into account."""
        record = CellRecord(folder, plan)
        if record.entry["status"] == "done":
            for name, seconds in record.seconds.items():
                self._measured[_kind(plan)][name].append(seconds)

    def size(self, plan: PlannedCell) -> tuple[int, float]:
        """Parameters, and FLOPs of the training."""
        kind = _kind(plan)
        if kind not in self._flops:
            vocabulary = self._vocabulary(plan)
            with torch.device("meta"):
                model = make_model(plan.settings, vocabulary)
            self._flops[kind] = model.parameter_count(), flops_of(plan.settings, vocabulary)
        return self._flops[kind]

    def parts(self, plan: PlannedCell, work: CellWork) -> dict[str, float]:
        """Seconds of the unfinished training and evaluations of a cell."""
        left = {}
        known = self._measured[_kind(plan)]
        if work.checkpoint is None:
            step = max(steps_of(plan.run), default=0)
            share = 1 - plan.settings.tokens_after(step) / plan.settings.trained_tokens
            seconds = known[TRAINING] or [self._training(plan)]
            left[TRAINING] = share * statistics.median(seconds)
        for evaluation in work.missing():
            seconds = known[evaluation.name] or [self._evaluation(plan, evaluation)]
            left[evaluation.name] = statistics.median(seconds)
        return left

    def seconds(self, plan: PlannedCell, work: CellWork) -> float:
        return sum(self.parts(plan, work).values())

    def _vocabulary(self, plan: PlannedCell) -> int:
        prepared = self.corpora.of_run(plan)
        if prepared is not None:
            return prepared.tokenizer.vocab_size
        return getattr(plan.settings.data.tokenizer, "vocab_size", 258)

    def _training(self, plan: PlannedCell) -> float:
        _, flops = self.size(plan)
        return OVERHEAD + flops / self._rate(plan)

    def _rate(self, plan: PlannedCell) -> float:
        settings = plan.settings.model_copy(update={"seed": 0})
        return _rate_of(settings.model_dump_json(), self._vocabulary(plan))

    def _evaluation(self, plan: PlannedCell, evaluation: PlannedEvaluation) -> float:
        """Seconds of an evaluation of losses or tasks, from the tokens that it reads."""
        settings = evaluation.settings
        methods = len({TRAINED, *settings.methods} - {TRUNCATE})
        tokens = 0
        if isinstance(settings, EvaluationSettings):
            prepared = self.corpora.of_evaluation(plan, evaluation)
            documents = settings.documents
            if isinstance(prepared, PreparedData):
                store = prepared.valid if settings.split == "valid" else prepared.train
                documents = min(documents, store.n_documents)
            tokens = documents * settings.spans_per_document * sum(plan.lengths_of(settings))
        elif isinstance(settings, TaskEvaluationSettings):
            tokens = GENERATED * settings.items * sum(plan.lengths_of(settings))
        _, flops = self.size(plan)
        a_token = flops / plan.settings.trained_tokens / 3  # without the backward pass
        return OVERHEAD + methods * tokens * a_token / self._rate(plan)


def _kind(plan: PlannedCell) -> str:
    """What cells of different seeds have in common."""
    settings = plan.settings.model_dump(mode="json", exclude={"seed"})
    evaluations = [(e.name, e.arguments) for e in plan.evaluations]
    return canonical_hash([settings, evaluations])


@cache
def _rate_of(settings: str, vocabulary: int) -> float:
    """FLOP/s of a step of a run with these settings (JSON), timed in a child; of a large one or on
    a GPU, a share of the peak."""
    run = RunSettings.model_validate_json(settings)
    return value_of(lambda: _measured_rate(run, vocabulary))


def _measured_rate(settings: RunSettings, vocabulary: int) -> float:
    """FLOP/s of a training step, the shorter of two."""
    device = find_device("auto")
    model = make_model(settings, vocabulary)
    t = settings.training
    rows = t.micro_batch_size or t.batch_size
    length = settings.train_length
    flops = rows * length * model.flops_per_token(length)
    if device.type == "cuda" or flops > TIMED_FLOPS:
        return peak_flops(device) * USUAL_SHARE
    if t.num_threads:
        torch.set_num_threads(t.num_threads)
    model.initialize(settings.seed)
    tokens = torch.randint(vocabulary, (rows, length))
    times = []
    for _ in range(3):
        begun = time.monotonic()
        model(tokens, targets=tokens, reduction="sum").backward()
        times.append(time.monotonic() - begun)
    return flops / (OPTIMIZER * min(times[1:]))
