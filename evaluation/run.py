"""What is evaluated: a checkpoint under several methods, and the run it belongs to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.sampling.exposure import Exposure
from data.tasks import Task
from data.tokenizers import Tokenizer
from errors import EvaluationError
from evaluation.scoring.methods import Method
from evaluation.stores import EvaluationStores
from model import Transformer


@dataclass(frozen=True)
class EvaluatedModel:
    """The checkpoint under evaluation.

    `resolve(overrides)` -> position settings as evaluated (raises where illegal); `load(overrides, dtype)` ->
    the model in eval mode on the evaluation's device; `longest(overrides)` -> the longest input its positions
    allow (None: unlimited); `legal`: which settings may change, as a sentence.
    """

    name: str
    checkpoint_hash: str
    step: int
    trained_length: int
    original_length: int
    resolve: Callable[[Sequence[str]], dict]
    load: Callable[[Sequence[str], str], Transformer]
    longest: Callable[[Sequence[str]], int | None] = lambda overrides: None
    legal: str = ""
    bos_first: str = ""  # why this model expects BOS as the first token, '' if it does not


@dataclass(frozen=True)
class EvaluatedRun:
    """A run directory opened for evaluation.

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


def resolve_all(methods: Sequence[Method], subject: EvaluatedModel) -> dict[str, dict]:
    """Position settings of every method; the error names all illegal methods at once."""
    schemes = {}
    refused = []
    for method in methods:
        try:
            schemes[method.label] = subject.resolve(method.overrides)
        except ValueError as error:
            refused.append(f"method {method.label!r}: {error}")
    if refused:
        raise EvaluationError("\n       ".join(refused))
    return schemes


def absent_cells(
    methods: Sequence[Method], lengths: Sequence[int], subject: EvaluatedModel, refuse: bool
) -> dict[tuple[str, int], str]:
    """The cells whose length exceeds the positions of their method, and why.

    Raises EvaluationError if no cell remains at a length, with `refuse`.
    """
    limits = {
        method.label: subject.longest(method.overrides)
        for method in methods
        if not method.truncates
    }
    absent = {
        (label, length): f"its positions end after {limit} tokens"
        for label, limit in limits.items()
        for length in lengths
        if limit is not None and length > limit
    }
    for length in lengths if refuse else ():
        if all((label, length) in absent for label in limits):
            raise EvaluationError(
                f"length {length} exceeds the positions of {', '.join(limits)}: at most "
                f"{max(limit or 0 for limit in limits.values())} tokens; shorten lengths, or add a method "
                f"that extends the positions (--matrix tries all). {subject.legal}".rstrip()
            )
    return absent
