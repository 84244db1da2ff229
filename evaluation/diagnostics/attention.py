"""`protocol: attention`: attention of every method at every length, on windows of the fixed targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from evaluation.diagnostics.settings import AttentionDiagnosticSettings
from evaluation.diagnostics.turns import (
    RotaryPair,
    output_drift,
    pairs_of,
    scored,
    table_drift,
    unturned_features,
)
from evaluation.diagnostics.weights import AttentionRecorder, AttentionSample, bucket_edges, last_outputs
from evaluation.errors import EvaluationError
from evaluation.run import EvaluatedModel, absent_cells, resolve_all
from evaluation.scoring.evaluate import evenly_spread
from evaluation.scoring.forecast import (
    ForecastRow,
    choose_batch,
    fit_pace,
    forecast_line,
    forecast_table,
    memory_budget,
    memory_needed,
)
from evaluation.scoring.methods import TRAINED, Method
from evaluation.scoring.plan import EvaluationPlan, make_plan
from evaluation.scoring.text import EvaluationText
from evaluation.statistics.intervals import unit_means
from model import LinearMixer, ModelError, Transformer, find_device


@dataclass
class AttentionResult:
    """Everything measured; keys are (method, length). Windows are the same at every length and under each
    method.

    Attributes:
        unit: (W,) the independent unit of every window.
        seen: merged over the windows.
        drift: (method, length, dtype) -> result of `output_drift`.
        absent: cells that do not exist, with the reason.
    """

    settings: AttentionDiagnosticSettings
    subject: EvaluatedModel
    plan: EvaluationPlan
    methods: list[Method]
    schemes: dict[str, dict]
    unit: np.ndarray
    unit_kind: str
    documents: int
    facts: dict
    layer_kinds: list[str] = field(default_factory=list)
    seen: dict[tuple[str, int], AttentionSample] = field(default_factory=dict)
    pairs: dict[tuple[str, int], list[RotaryPair]] = field(default_factory=dict)
    tables: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    drift: dict[tuple[str, int, str], dict[str, float]] = field(default_factory=dict)
    absent: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def windows(self) -> int:
        return len(self.unit)

    def edges(self, length: int) -> list[int]:
        return bucket_edges(length, self.subject.trained_length)

    def overall(self, method: str, length: int) -> dict[str, float]:
        """Means over layers, heads and units, by measure."""
        out = {}
        for measure, tensor in self.seen[method, length].values.items():
            by_window = mean_of_finite(tensor.numpy(), (1, 2))
            there = np.isfinite(by_window)
            if there.any():
                out[measure] = float(unit_means(by_window[there], self.unit[there]).mean())
        return out


class AttentionSession:
    """One attention evaluation: windows, memory budget and the model as trained.

    Raises:
        EvaluationError: before any compute for what cannot work: documents too short, no softmax attention,
            too little memory.
    """

    def __init__(
        self,
        settings: AttentionDiagnosticSettings,
        subject: EvaluatedModel,
        *,
        store,
        tokenizer,
        methods: list[Method],
        console,
    ):
        methods = [method for method in methods if not method.truncates]  # context cut to L0 is the row of L0
        schemes = resolve_all(methods, subject)
        self.bos_id = getattr(tokenizer, "bos_id", None)
        self.settings, self.subject, self.console = settings, subject, console
        self.text = EvaluationText(store, settings.bos, self.bos_id)
        plan = make_plan(settings.of_loss(), self.text, store.hash, tokenizer.hash, subject.trained_length)
        if plan.note:
            console.warn(plan.note)
        self.chosen = {n: evenly_spread(plan.windows[n], settings.windows) for n in plan.lengths}
        documents = self.chosen[plan.lengths[0]].document
        unit_of, _, unit_kind = self.text.units()
        self.result = found = AttentionResult(
            settings,
            subject,
            plan,
            methods,
            schemes,
            unit_of[documents],
            unit_kind,
            len(set(documents.tolist())),
            {"corpus_hash": store.hash, "tokenizer_hash": tokenizer.hash},
        )
        found.absent.update(absent_cells(methods, plan.lengths, subject, refuse=False))
        self.cells = [(r, n) for r in methods for n in plan.lengths if (r.label, n) not in found.absent]
        if not self.cells:
            raise EvaluationError(
                f"no method reaches any of the lengths {', '.join(map(str, plan.lengths))}: shorten lengths, "
                f"or add a method that reaches further. {subject.legal}".rstrip()
            )
        self.device = find_device(settings.device)
        self.few = min(settings.precision_windows, found.windows)
        self.dtypes = 1 + len(settings.precision) if settings.precision else 0
        self.trained = subject.load((), settings.dtype)
        if isinstance(self.trained.settings.mixer, LinearMixer):
            raise EvaluationError(
                "protocol=attention requires attention weights, which linear attention "
                "(model.mixer.name=linear) does not have"
            )
        found.layer_kinds = list(self.trained.settings.layer_kinds)
        self.unturned = unturned_features(self.trained)
        self.budget = memory_budget(settings.memory, self.device)
        for length in sorted(plan.lengths, reverse=True):  # the longest one is refused first
            self._batch(self.trained, length)

    def forecast(self) -> None:
        """Print every cell with its memory, and the time of all."""
        found, s = self.result, self.settings
        rows = [
            ForecastRow(
                method.label,
                length,
                found.windows,
                length * found.windows,
                memory_needed(self.trained, length, s.targets, self._batch(self.trained, length), s.chunk),
            )
            for method, length in self.cells
        ]
        self.console.table(
            f"{self.subject.name}: attention in {found.windows} windows", *forecast_table(rows, found.absent)
        )
        lengths = np.array([length for _, length in self.cells])
        pace = fit_pace(
            lambda n: self._record(self.trained, self._tokens(n, slice(0, 1))[:, :-1], n),
            min(lengths),
            max(n for n in lengths if n <= max(2 * s.chunk, min(lengths))),
        )
        passes = found.windows + self.few * self.dtypes
        seconds, peak = passes * pace.seconds(lengths), max(row.peak or 0 for row in rows)
        tokens = passes * int(lengths.sum())
        self.console.info(forecast_line(self.trained, len(rows), tokens, seconds, peak, self.budget))

    def run(self) -> AttentionResult:
        """Run every method at every length."""
        total = sum(length * (self.settings.windows + self.few * self.dtypes) for _, length in self.cells)
        with self.console.bar("attention", total=total, unit="tokens") as bar:
            for method in self.result.methods:
                if lengths := [length for one, length in self.cells if one is method]:
                    self._run(method, lengths, bar.advance)
        return self.result

    def _run(self, method: Method, lengths: list[int], advance: Callable[[float], None]) -> None:
        """All lengths under one method."""
        model = (
            self.trained if method.label == TRAINED else self.subject.load(method.words, self.settings.dtype)
        )
        for length in lengths:
            where = method.label, length
            try:
                self.result.seen[where] = self._measure(model, length, advance)
            except ModelError as error:
                self.result.absent[where] = str(error)
                self.console.warn(f"{method.label} at {length}: {error}; this cell is left out")
                continue
            if pairs := pairs_of(self.trained, model, length):
                self.result.pairs[where] = pairs
            if (drift := table_drift(model, length)) is not None:
                self.result.tables[where] = drift
        if self.settings.precision:
            self._precision(method, [n for n in lengths if (method.label, n) in self.result.seen], advance)

    def _measure(self, model: Transformer, length: int, advance: Callable[[float], None]) -> AttentionSample:
        parts, size = [], self._batch(model, length)
        for start in range(0, self.result.windows, size):
            tokens = self._tokens(length, slice(start, start + size))[:, :-1]
            parts.append(self._record(model, tokens, length))
            advance(tokens.numel())
        return merged(parts)

    def _precision(self, method: Method, lengths: list[int], advance: Callable[[float], None]) -> None:
        """The same few windows in float64 and in lower precision."""
        keep, chunk = self.settings.targets, self.settings.chunk
        exact: dict[int, tuple[Tensor, Tensor]] = {}
        for dtype in ("float64", *self.settings.precision):
            model = self.subject.load(method.words, dtype)
            for length in lengths:
                tokens = self._tokens(length, slice(0, self.few))
                if dtype == "float64":
                    logits = last_outputs(model, tokens[:, :-1], keep, length=length, chunk=chunk)
                    exact[length] = logits, scored(logits, tokens[:, -keep:])
                else:
                    off = output_drift(exact[length], model, tokens, keep, length=length, chunk=chunk)
                    self.result.drift[method.label, length, dtype] = off
                advance(tokens.shape[0] * length)

    def _tokens(self, length: int, rows: slice) -> Tensor:
        """(B, length + 1) some of the windows."""
        windows = self.chosen[length]
        found = self.text.windows(windows.document[rows], windows.end[rows], length)
        return torch.from_numpy(found).to(self.device)

    def _record(self, model: Transformer, tokens: Tensor, length: int) -> AttentionSample:
        """What the last queries of these windows (B, length) attend to."""
        keep, chunk, edges = self.settings.targets, self.settings.chunk, self.result.edges(length)
        recorder = AttentionRecorder(
            tokens, keep, edges, self.subject.trained_length, self.bos_id, self.unturned
        )
        last_outputs(model, tokens, keep, length=length, chunk=chunk, hooks=recorder.hooks())
        return recorder.result()

    def _batch(self, model: Transformer, length: int) -> int:
        keep, chunk = self.settings.targets, self.settings.chunk
        return choose_batch(model, length, keep, chunk=chunk, device=self.device, budget=self.budget)


def merged(parts: list[AttentionSample]) -> AttentionSample:
    """The windows of several batches as one; a measure missing in a batch is NaN."""
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
    return AttentionSample(
        {name: values(name) for name in names},
        torch.cat([part.by_distance for part in parts]),
        (visible * rows[:, None, None]).sum(0) / rows.sum(),
        max(part.mismatch for part in parts),
    )


def mean_of_finite(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Mean over axes of the finite values; NaN where there are none."""
    there = np.isfinite(values)
    count = there.sum(axes)
    total = np.where(there, values, 0.0).sum(axes)
    return np.where(count > 0, total / np.maximum(count, 1), math.nan)
