"""`protocol: attention`: attention of every method at every length, on windows of the fixed
targets."""

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
from evaluation.diagnostics.diagnostic_session import DiagnosticResult, common_fields
from evaluation.diagnostics.diagnostic_settings import AttentionDiagnosticSettings
from evaluation.diagnostics.turns import RotaryPair, frequencies_of, pairs_of
from evaluation.evaluated_model import EvaluatedModel
from evaluation.ranks import EvaluationRanks
from evaluation.scoring.evaluate import evenly_spread
from evaluation.scoring.methods import Method
from evaluation.scoring.plan import EvaluationPlan, fixed_plan
from evaluation.scoring.session import CellSession, EvaluationCell
from evaluation.scoring.text import EvaluationText
from model import Transformer
from model.position.scaling import turns_within


@dataclass(kw_only=True)
class AttentionResult(DiagnosticResult):
    """Everything measured; keys are (method, length). Windows are the same at every length and
    under each method.

    Attributes:
        seen: merged over the windows.
    """

    settings: AttentionDiagnosticSettings
    plan: EvaluationPlan
    layer_kinds: list[str] = field(default_factory=list)
    seen: dict[tuple[str, int], AttentionSample] = field(default_factory=dict)
    pairs: dict[tuple[str, int], list[RotaryPair]] = field(default_factory=dict)

    @property
    def windows(self) -> int:
        return len(self.unit)

    def edges(self, length: int) -> list[int]:
        return bucket_edges(length, self.subject.trained_length)


class AttentionSession(CellSession):
    """One attention evaluation: windows, memory budget and the model as trained.

    Raises:
        EvaluationError: before any compute for what cannot work: documents too short, no softmax
            attention.
    """

    settings: AttentionDiagnosticSettings

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
        self.text = EvaluationText(store, settings.bos, getattr(tokenizer, "bos_id", None))
        plan = fixed_plan(settings, self.text, tokenizer.hash, subject.trained_length)
        self.chosen = {n: evenly_spread(plan.windows[n], settings.windows) for n in plan.lengths}
        documents = self.chosen[plan.lengths[0]].document
        fields = common_fields(settings, subject, methods, self.text, tokenizer.hash, documents)
        super().__init__(AttentionResult(**fields, plan=plan), None, console, EvaluationRanks())
        if plan.note:
            self.warn(plan.note)
        result = self.result
        result.absent |= subject.absent_cells(result.methods, plan.lengths, refuse=False)
        if not self.cells():
            raise EvaluationError(
                f"no method reaches any of the lengths {', '.join(map(str, plan.lengths))}: "
                f"shorten lengths, or add a method that reaches further. {subject.legal}".rstrip()
            )
        self.title = f"attention in {result.windows} windows"
        model = subject.under((), settings.dtype)
        result.layer_kinds = list(model.settings.layer_kinds)
        for block, kind in zip(model.blocks, result.layer_kinds, strict=True):
            if not block.attention.has_attention_weights:
                raise EvaluationError(
                    "protocol=attention requires attention weights, which layers with mixer.name="
                    f"{model.kinds[kind].mixer.name} do not have"
                )
        l0 = subject.trained_length
        self.trained_turns = {
            kind: turns_within(frequencies, l0)
            for kind, frequencies in frequencies_of(model, l0).items()
        }

    def cells(self) -> list[EvaluationCell]:
        return [
            EvaluationCell(
                method,
                length,
                self.key(method, length),
                inputs=self.chosen[length].inputs,
                keep=self.settings.targets,
                chunk=self.settings.chunk,
                windows=self.chosen[length],
            )
            for method in self.result.methods
            for length in self.result.plan.lengths
            if (method.label, length) not in self.result.absent
        ]

    def score(
        self, cell: EvaluationCell, model: Transformer, batch: int, advance: Callable[[float], None]
    ) -> AttentionSample:
        windows = cell.windows
        tokens = self.text.windows(windows.document, windows.end, cell.length)
        tokens = torch.from_numpy(tokens).to(self.device)
        parts = []
        for rows in tokens.split(batch):
            parts.append(self._record(model, rows[:, :-1], cell.length))
            advance(len(rows) / len(tokens))
        return merged(parts)

    def keep(self, cell: EvaluationCell, values: AttentionSample) -> None:
        self.result.seen[cell.where] = values
        pairs = pairs_of(self.model(cell), self.trained_turns, cell.length)
        if pairs:
            self.result.pairs[cell.where] = pairs

    def run(self) -> AttentionResult:
        super().run()
        self.result.absent |= self.result.failed
        return self.result

    def trial(self, model: Transformer, length: int, keep: int) -> None:
        tokens = torch.zeros(1, length, dtype=torch.long, device=self.device)
        self._record(model, tokens, length)

    def _record(self, model: Transformer, tokens: Tensor, length: int) -> AttentionSample:
        """What the last queries of these windows (B, length) attend to."""
        keep = self.settings.targets
        recorder = AttentionRecorder(
            len(model.blocks),
            length - keep,
            self.result.edges(length),
            self.result.subject.trained_length,
        )
        last_outputs(
            model, tokens, keep, length=length, chunk=self.settings.chunk, hooks=recorder.hooks()
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
