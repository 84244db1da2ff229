"""A trained run as an evaluation receives it: the model, the tokenizer and where its text is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.sampling.exposure import Exposure
from data.tasks.settings import Task
from data.tokenizer import Tokenizer
from evaluation.scoring.evaluate import EvaluatedModel
from evaluation.stores import EvaluationStores


@dataclass(frozen=True)
class EvaluatedRun:
    """A run folder opened for evaluation.

    Attributes:
        name: the shortest name that tells several runs apart.
        data: prepared corpus the run was trained on, None for an imported model.
        task: the task it was trained on, if any.
        bos: whether training sequences start with BOS.
        changed: settings that changed during training, in one sentence; '' if none did.
        open_stores: (settings, folders of other runs) -> the text to read and the text trained on.
        position_settings: (overrides, bos) -> position settings under a built-in method; raises ValueError
            where the method does not apply.
        exposure: positions and distances seen in training up to the evaluated step, if they were recorded.
    """

    folder: Path
    name: str
    model: EvaluatedModel
    tokenizer: Tokenizer
    data: str | None
    task: Task | None
    bos: bool
    changed: str
    open_stores: Callable[[Any, Sequence[Path]], EvaluationStores]
    position_settings: Callable[[Sequence[str], str], dict]
    exposure: Callable[[], Exposure | None]
