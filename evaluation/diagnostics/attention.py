"""`protocol: attention`: every rule at every length, on windows of the fixed targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from evaluation.diagnostics.settings import AttentionSettings
from evaluation.diagnostics.turns import (
    Pair,
    output_drift,
    pairs_of,
    scored,
    table_drift,
    unturned_features,
)
from evaluation.diagnostics.weights import Recorder, Seen, bucket_edges, last_outputs
from evaluation.errors import EvaluationError
from evaluation.forecast import choose_batch, memory_free
from evaluation.matrix import Subject, resolve_all
from evaluation.plan import Plan, make_plan
from evaluation.protocols import Windows
from evaluation.rules import TRAINED, Rule
from evaluation.session import evenly_spread
from evaluation.text import Text
from model import LinearMixer, ModelError, Transformer


@dataclass
class Attention:
    """Everything measured; keys are (rule, length). Windows are the same at every length and under each rule.

    Attributes:
        unit: (W,) the independent unit of every window.
        seen: merged over the windows.
        drift: (rule, length, dtype) -> what `output_drift` gives.
        absent: cells that do not exist, and why.
    """

    settings: AttentionSettings
    subject: Subject
    plan: Plan
    rules: list[Rule]
    schemes: dict[str, dict]
    unit: np.ndarray
    unit_kind: str
    documents: int
    facts: dict
    layer_kinds: list[str] = field(default_factory=list)
    seen: dict[tuple[str, int], Seen] = field(default_factory=dict)
    pairs: dict[tuple[str, int], list[Pair]] = field(default_factory=dict)
    tables: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    drift: dict[tuple[str, int, str], dict[str, float]] = field(default_factory=dict)
    absent: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def windows(self) -> int:
        return len(self.unit)

    def edges(self, length: int) -> list[int]:
        return bucket_edges(length, self.subject.trained_length)


def measure_attention(
    settings: AttentionSettings,
    subject: Subject,
    *,
    store,
    tokenizer,
    rules: list[Rule],
    console,
) -> Attention:
    """Run every rule at every length.

    Raises:
        EvaluationError: before any compute where it cannot work: documents too short, no softmax, no memory.
    """
    rules = [rule for rule in rules if not rule.truncates]  # context cut to L0 is L0's own row
    schemes = resolve_all(rules, subject)
    bos_id = getattr(tokenizer, "bos_id", None)
    text = Text(store, settings.bos, bos_id)
    plan = make_plan(settings.of_loss(), text, store.hash, tokenizer.hash, subject.trained_length)
    if plan.note:
        console.warn(plan.note)
    chosen = {length: evenly_spread(plan.windows[length], settings.windows) for length in plan.lengths}
    documents = chosen[plan.lengths[0]].document
    unit_of, _, unit_kind = text.units()
    found = Attention(
        settings,
        subject,
        plan,
        rules,
        schemes,
        unit_of[documents],
        unit_kind,
        len(set(documents.tolist())),
        {"corpus_hash": store.hash, "tokenizer_hash": tokenizer.hash},
    )
    for rule in rules:
        limit = subject.longest(rule.words)
        for length in plan.lengths:
            if limit is not None and length > limit:
                found.absent[rule.label, length] = f"its positions end after {limit} tokens"
    todo = [(r, n) for r in rules for n in plan.lengths if (r.label, n) not in found.absent]
    if not todo:
        raise EvaluationError(
            f"no rule can place any of the lengths {', '.join(map(str, plan.lengths))}: shorten lengths, or "
            f"add a rule that reaches further. {subject.legal}".rstrip()
        )
    work = _Work(found, text, chosen, bos_id, console)
    passes = {rule.label: [length for r, length in todo if r is rule] for rule in rules}
    total = sum(length * (settings.windows + work.few * work.dtypes) for _, length in todo)
    with console.bar("attention", total=total, unit="tokens") as bar:
        for rule in rules:
            if passes[rule.label]:
                work.run(rule, passes[rule.label], bar.advance)
    return found


class _Work:
    """One call: the windows, the memory, and the trained model's slow pairs."""

    def __init__(self, found: Attention, text: Text, chosen: dict[int, Windows], bos_id: int | None, console):
        self.found, self.text, self.chosen, self.bos_id, self.console = found, text, chosen, bos_id, console
        self.settings, self.subject = found.settings, found.subject
        wanted = self.settings.device
        self.device = torch.device(
            wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        )
        self.few = min(self.settings.precision_windows, found.windows)
        self.dtypes = 1 + len(self.settings.precision) if self.settings.precision else 0
        self.trained = self.subject.load((), self.settings.dtype)
        if isinstance(self.trained.settings.mixer, LinearMixer):
            raise EvaluationError(
                "protocol=attention looks at attention weights, and this run has linear attention "
                "(model.mixer.name = linear), which remembers sums in place of keys and has none"
            )
        found.layer_kinds = list(self.trained.settings.layer_kinds)
        self.unturned = unturned_features(self.trained)
        limit = self.settings.memory
        self.budget = int(limit * 2**30) if limit else int(0.8 * memory_free(self.device))
        for length in sorted(found.plan.lengths, reverse=True):  # the longest decides, before any compute
            self._batch(self.trained, length)

    def run(self, rule: Rule, lengths: list[int], advance: Callable[[float], None]) -> None:
        """All lengths under one rule."""
        model = self.trained if rule.label == TRAINED else self.subject.load(rule.words, self.settings.dtype)
        for length in lengths:
            where = rule.label, length
            try:
                self.found.seen[where] = self._watch(model, length, advance)
            except ModelError as error:
                self.found.absent[where] = str(error)
                self.console.warn(f"{rule.label} at {length}: {error}; this cell is left out")
                continue
            if pairs := pairs_of(self.trained, model, length):
                self.found.pairs[where] = pairs
            if (drift := table_drift(model, length)) is not None:
                self.found.tables[where] = drift
        if self.settings.precision:
            self._precision(rule, [n for n in lengths if (rule.label, n) in self.found.seen], advance)

    def _watch(self, model: Transformer, length: int, advance: Callable[[float], None]) -> Seen:
        keep, edges, parts = self.settings.targets, self.found.edges(length), []
        size = self._batch(model, length)
        for start in range(0, self.found.windows, size):
            tokens = self._tokens(length, slice(start, start + size))[:, :-1]
            recorder = Recorder(tokens, keep, edges, self.subject.trained_length, self.bos_id, self.unturned)
            last_outputs(
                model, tokens, keep, length=length, chunk=self.settings.chunk, watch=recorder.watches()
            )
            parts.append(recorder.result())
            advance(tokens.numel())
        return merged(parts)

    def _precision(self, rule: Rule, lengths: list[int], advance: Callable[[float], None]) -> None:
        """The same few windows in float64 and in lower precision."""
        keep, chunk = self.settings.targets, self.settings.chunk
        exact: dict[int, tuple[Tensor, Tensor]] = {}
        for dtype in ("float64", *self.settings.precision):
            model = self.subject.load(rule.words, dtype)
            for length in lengths:
                tokens = self._tokens(length, slice(0, self.few))
                if dtype == "float64":
                    logits = last_outputs(model, tokens[:, :-1], keep, length=length, chunk=chunk)
                    exact[length] = logits, scored(logits, tokens[:, -keep:])
                else:
                    off = output_drift(exact[length], model, tokens, keep, length=length, chunk=chunk)
                    self.found.drift[rule.label, length, dtype] = off
                advance(tokens.shape[0] * length)

    def _tokens(self, length: int, rows: slice) -> Tensor:
        """(B, length + 1) some of the windows."""
        windows = self.chosen[length]
        found = self.text.windows(windows.document[rows], windows.end[rows], length)
        return torch.from_numpy(found).to(self.device)

    def _batch(self, model: Transformer, length: int) -> int:
        keep, chunk = self.settings.targets, self.settings.chunk
        return choose_batch(model, length, keep, chunk=chunk, device=self.device, budget=self.budget)


def merged(parts: list[Seen]) -> Seen:
    """The windows of several batches as one; a measure that a batch does not have is NaN there."""
    names = list(dict.fromkeys(name for part in parts for name in part.values))

    def values(name: str) -> Tensor:
        like = next(part.values[name] for part in parts if name in part.values)
        return torch.cat(
            [
                part.values.get(
                    name, torch.full((len(part.by_distance), *like.shape[1:]), torch.nan).double()
                )
                for part in parts
            ]
        )

    rows = torch.tensor([len(part.by_distance) for part in parts], dtype=torch.float64)
    visible = torch.stack([part.visible for part in parts])
    return Seen(
        {name: values(name) for name in names},
        torch.cat([part.by_distance for part in parts]),
        (visible * rows[:, None, None]).sum(0) / rows.sum(),
        max(part.mismatch for part in parts),
    )
