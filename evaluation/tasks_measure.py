"""One checkpoint answering one task under every rule at every length; no cell is computed twice."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from evaluation.cells import Cells
from evaluation.forecast import choose_batch, memory_free
from evaluation.matrix import Subject, absent_cells, resolve_all
from evaluation.rules import TRAINED, TRUNCATE, Rule
from evaluation.scoring import CellFailed
from evaluation.tasks_items import Drawn
from evaluation.tasks_scoring import Answers, ModelReader, Reader, read_items
from evaluation.tasks_settings import TaskEvaluationSettings
from model import ModelError, Transformer


@dataclass
class TaskResult:
    """Everything measured: `answers[rule, length]`, in the order of the items."""

    settings: TaskEvaluationSettings
    subject: Subject
    drawn: Drawn
    rules: list[Rule]
    schemes: dict[str, dict]  # label -> position settings as evaluated
    facts: dict
    answers: dict[tuple[str, int], Answers] = field(default_factory=dict)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    absent: dict[tuple[str, int], str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # "rule@length" -> file of every candidate's NLL


def answer_tasks(
    settings: TaskEvaluationSettings,
    subject: Subject,
    drawn: Drawn,
    rules: list[Rule],
    *,
    cells: Path,
    facts: dict,
    console=None,
    reader: Callable[[Transformer], Reader] | None = None,
) -> TaskResult:
    """Measure every cell that is not on disk yet. Raises EvaluationError before any compute where a rule or a
    length cannot work; a cell whose losses are not finite is left out and named."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    schemes = resolve_all(rules, subject)
    absent = absent_cells(rules, drawn.lengths, subject, settings.unreachable == "refuse")
    result = TaskResult(settings, subject, drawn, rules, schemes, facts, absent=absent)
    store, todo = Cells(cells), []
    for rule in rules:
        for length in drawn.lengths:
            if (rule.label, length) in absent:
                continue
            key = _key(result, rule, length, torch.device(device).type)
            found = store.load(key)
            if found is None:
                todo.append((rule, length, key))
            else:
                _keep(result, rule.label, length, found, store.name(key))
    known = len(drawn.lengths) * len(rules) - len(absent) - len(todo)
    if console and known:
        console.say(f"{known} of {known + len(todo)} cells were measured before and are reused")
    read = reader or (lambda model: ModelReader(model, device, settings.chunk))
    if todo:
        _measure(result, todo, store, console, read, device)
    return result


def _measure(result: TaskResult, todo: list, store: Cells, console, read, device: str) -> None:
    s, drawn, l0 = result.settings, result.drawn, result.subject.trained_length
    loaded: tuple[tuple[str, ...], Transformer] | None = None
    budget = int(s.memory * 2**30) if s.memory else int(0.8 * memory_free(torch.device(device)))
    cost = {store.name(key): min(length, l0 if rule.truncates else length) for rule, length, key in todo}
    total = drawn.count * sum(cost.values())
    if console:
        console.say(
            f"{len(cost)} cells: {drawn.count} items of {drawn.candidates} candidates at lengths "
            f"{', '.join(map(str, drawn.lengths))}; {total / 1e6:.2f}M input tokens"
        )

    def run(advance: Callable[[int], None]) -> None:
        nonlocal loaded
        for rule, length, key in todo:
            if (found := store.load(key)) is not None:  # cut to a length it does not exceed: as trained
                _keep(result, rule.label, length, found, store.name(key))
                continue
            if loaded is None or loaded[0] != rule.words:
                loaded = None  # the old weights go before the new ones come
                loaded = rule.words, result.subject.load(rule.words, s.dtype)
            model, cut = loaded[1], l0 if rule.truncates and length > l0 else None
            items, inputs = drawn.items[length], min(length, cut or length)
            # A prompt's cache is there twice while a candidate is read behind it.
            batch = s.batch or choose_batch(
                model, inputs, min(inputs, 64), chunk=max(1, inputs // 2), device=device, budget=budget // 2
            )
            how = {"bos": drawn.bos, "batch": batch, "cut": cut}
            after = lambda done, inputs=inputs: advance(done * inputs)  # noqa: E731
            try:
                answers = read_items(read(model), items, length, **how, after_batch=after)
            except (CellFailed, ModelError) as error:
                result.failed[rule.label, length] = str(error)
                if console:
                    console.warn(f"{rule.label} at {length}: {error}; this cell is left out")
                continue
            record = np.concatenate([answers.nll, answers.exact[:, None]], axis=1)
            store.save(key, record)
            _keep(result, rule.label, length, record, store.name(key))

    if console is None:
        return run(lambda tokens: None)
    with console.bar(f"answering {result.facts['task']}", total=total, unit="tokens") as bar:
        return run(bar.advance)


def _keep(result: TaskResult, label: str, length: int, record: np.ndarray, name: str) -> None:
    result.answers[label, length] = Answers(record[:, :-1], record[:, -1] > 0)
    result.files[f"{label}@{length}"] = name


def _key(result: TaskResult, rule: Rule, length: int, device: str) -> dict:
    """Everything that decides a cell's numbers; the batch size is not among it."""
    s, subject = result.settings, result.subject
    cut = rule.truncates and length > subject.trained_length
    return {
        "format": 1,
        "kind": "tasks",
        "checkpoint": subject.checkpoint_hash,
        "items": result.drawn.hash_at(length),
        "position": result.schemes[TRAINED if rule.label == TRUNCATE else rule.label],
        "train_length": subject.trained_length,
        "original_length": subject.original_length,
        "length": length,
        "cut": cut,
        "dtype": s.dtype,
        "chunk": s.chunk,
        "device": device,
    }
