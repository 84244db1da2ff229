"""`protocol: attention`: attention of every method at every length, on windows of the fixed
targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from errors import EvaluationError
from evaluation.diagnostics.attention_weights import (
    AttentionRecorder,
    AttentionSample,
    bucket_edges,
    last_outputs,
)
from evaluation.diagnostics.diagnostic_session import DiagnosticResult, DiagnosticSession
from evaluation.diagnostics.diagnostic_settings import AttentionDiagnosticSettings
from evaluation.diagnostics.turns import (
    RotaryPair,
    output_drift,
    pairs_of,
    scored_outputs,
    table_drift,
    trained_turns,
    unturned_features,
)
from evaluation.evaluated_model import EvaluatedModel
from evaluation.scoring.evaluate import evenly_spread
from evaluation.scoring.forecast import fit_pace
from evaluation.scoring.methods import Method
from evaluation.scoring.plan import EvaluationPlan, make_plan
from evaluation.statistics.intervals import unit_means
from model import ModelError, Transformer


@dataclass(kw_only=True)
class AttentionResult(DiagnosticResult):
    """Everything measured; keys are (method, length). Windows are the same at every length and
    under each method.

    Attributes:
        seen: merged over the windows.
        drift: (method, length, dtype) -> result of `output_drift`.
    """

    settings: AttentionDiagnosticSettings
    plan: EvaluationPlan
    layer_kinds: list[str] = field(default_factory=list)
    seen: dict[tuple[str, int], AttentionSample] = field(default_factory=dict)
    pairs: dict[tuple[str, int], list[RotaryPair]] = field(default_factory=dict)
    tables: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    drift: dict[tuple[str, int, str], dict[str, float]] = field(default_factory=dict)

    @property
    def windows(self) -> int:
        return len(self.unit)

    def edges(self, length: int) -> list[int]:
        return bucket_edges(length, self.subject.trained_length)

    def lengths_of(self, method: str) -> list[int]:
        """The lengths at which a method was measured."""
        return [n for n in self.plan.lengths if (method, n) in self.seen]

    def overall(self, method: str, length: int) -> dict[str, float]:
        """Means over layers, heads and units, by measure."""
        out = {}
        for measure, tensor in self.seen[method, length].values.items():
            by_window = mean_of_finite(tensor.numpy(), (1, 2))
            there = np.isfinite(by_window)
            if there.any():
                out[measure] = float(unit_means(by_window[there], self.unit[there]).mean())
        return out


class AttentionSession(DiagnosticSession):
    """One attention evaluation: windows, memory budget and the model as trained.

    Raises:
        EvaluationError: before any compute for what cannot work: documents too short, no softmax
            attention, too little memory.
    """

    settings: AttentionDiagnosticSettings

    def __init__(
        self, settings: AttentionDiagnosticSettings, subject: EvaluatedModel, *, store, **shared
    ):
        super().__init__(settings, subject, store=store, **shared)
        hashes = store.hash, self.tokenizer.hash
        plan = make_plan(
            settings.of_loss(),
            self.text,
            *hashes,
            subject.trained_length,
        )
        if plan.note:
            self.console.warn(plan.note)
        self.chosen = {n: evenly_spread(plan.windows[n], settings.windows) for n in plan.lengths}
        self.result = AttentionResult(
            **self.about(self.chosen[plan.lengths[0]].document), plan=plan
        )
        self.result.absent.update(subject.absent_cells(self.methods, plan.lengths, refuse=False))
        self.cells = [
            (method, length)
            for method in self.methods
            for length in plan.lengths
            if (method.label, length) not in self.result.absent
        ]
        if not self.cells:
            raise EvaluationError(
                f"no method reaches any of the lengths {', '.join(map(str, plan.lengths))}: "
                f"shorten lengths, or add a method that reaches further. {subject.legal}".rstrip()
            )
        windows = self.result.windows
        self.precise = min(settings.precision_windows, windows) if settings.precision else 0
        # Windows read by each cell: once, and the precise ones in float64 and each lower precision.
        self.passes = windows + self.precise * (1 + len(settings.precision))
        model = subject.under((), settings.dtype)
        for block, kind in zip(model.blocks, model.settings.layer_kinds, strict=True):
            if not block.attention.has_attention_weights:
                raise EvaluationError(
                    "protocol=attention requires attention weights, which layers with mixer.name="
                    f"{model.kinds[kind].mixer.name} do not have"
                )
        self.result.layer_kinds = list(model.settings.layer_kinds)
        self.unturned = unturned_features(model)
        self.trained_turns = trained_turns(model)
        for length in sorted(plan.lengths, reverse=True):  # the longest one is refused first
            self.batch(model, length, settings.targets)

    def forecast(self) -> None:
        """Print every cell with its memory, and the time of all."""
        settings = self.settings
        windows = self.result.windows
        model = self.subject.under((), settings.dtype)
        rows = [
            self.row(model, method.label, length, windows, settings.targets)
            for method, length in self.cells
        ]
        lengths = np.array([length for _, length in self.cells])
        shortest = min(lengths)
        pace = fit_pace(
            lambda n: self._record(model, self._tokens(n, slice(0, 1))[:, :-1], n),
            shortest,
            max(n for n in lengths if n <= max(2 * settings.chunk, shortest)),
        )
        self.show_forecast(
            model,
            f"attention in {windows} windows",
            rows,
            self.passes * int(lengths.sum()),
            self.passes * pace.seconds(lengths),
            self.result.absent,
        )

    def run(self) -> AttentionResult:
        """Run every method at every length."""
        total = self.passes * sum(length for _, length in self.cells)
        with self.console.bar("attention", total=total, unit="tokens") as bar:
            for method in self.result.methods:
                self._run(method, bar.advance)
        return self.result

    def _run(self, method: Method, advance: Callable[[float], None]) -> None:
        """All lengths under one method."""
        model = self.subject.under(method.overrides, self.settings.dtype)
        for length in [length for measured, length in self.cells if measured is method]:
            cell = method.label, length
            try:
                self.result.seen[cell] = self._measure(model, length, advance)
            except ModelError as error:
                self.result.absent[cell] = str(error)
                self.console.warn(f"{method.label} at {length}: {error}; this cell is skipped")
                continue
            if pairs := pairs_of(model, self.trained_turns, length):
                self.result.pairs[cell] = pairs
            if (drift := table_drift(model, length)) is not None:
                self.result.tables[cell] = drift
        if self.precise:
            self._precision(method, advance)

    def _measure(
        self, model: Transformer, length: int, advance: Callable[[float], None]
    ) -> AttentionSample:
        parts = []
        size = self.batch(model, length, self.settings.targets)
        for start in range(0, self.result.windows, size):
            tokens = self._tokens(length, slice(start, start + size))[:, :-1]
            parts.append(self._record(model, tokens, length))
            advance(tokens.numel())
        return merged(parts)

    def _precision(self, method: Method, advance: Callable[[float], None]) -> None:
        """The same few windows in float64 and in lower precision."""
        keep = self.settings.targets
        exact: dict[int, tuple[Tensor, Tensor]] = {}
        for dtype in ("float64", *self.settings.precision):
            model = self.subject.under(method.overrides, dtype)
            for length in self.result.lengths_of(method.label):
                tokens = self._tokens(length, slice(0, self.precise))
                outputs = scored_outputs(
                    model, tokens, keep, length=length, chunk=self.settings.chunk
                )
                if dtype == "float64":
                    exact[length] = outputs
                else:
                    drift = output_drift(exact[length], outputs)
                    self.result.drift[method.label, length, dtype] = drift
                advance(tokens.shape[0] * length)

    def _tokens(self, length: int, rows: slice) -> Tensor:
        """(B, length + 1) some of the windows."""
        windows = self.chosen[length]
        found = self.text.windows(windows.document[rows], windows.end[rows], length)
        return torch.from_numpy(found).to(self.device)

    def _record(self, model: Transformer, tokens: Tensor, length: int) -> AttentionSample:
        """What the last queries of these windows (B, length) attend to."""
        keep = self.settings.targets
        recorder = AttentionRecorder(
            tokens,
            keep,
            self.result.edges(length),
            self.subject.trained_length,
            self.bos_id,
            self.unturned,
        )
        last_outputs(
            model,
            tokens,
            keep,
            length=length,
            chunk=self.settings.chunk,
            hooks=recorder.hooks(),
        )
        return recorder.result()


def merged(parts: list[AttentionSample]) -> AttentionSample:
    """The windows of several batches as one, without measures that are defined in none."""
    values = {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values}
    rows = sum(len(part.by_distance) for part in parts)
    return AttentionSample(
        {name: value for name, value in values.items() if not value.isnan().all()},
        torch.cat([part.by_distance for part in parts]),
        sum(part.visible * (len(part.by_distance) / rows) for part in parts),
        max(part.mismatch for part in parts),
    )


def mean_of_finite(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Mean over axes of the finite values; NaN where there are none."""
    there = np.isfinite(values)
    count = there.sum(axes)
    total = np.where(there, values, 0.0).sum(axes)
    return np.where(count > 0, total / np.maximum(count, 1), math.nan)
