"""`protocol: attention`: attention of every method at every length, on windows of the fixed
targets."""

from dataclasses import dataclass, field

import torch

from errors import EvaluationError
from evaluation.diagnostics.attention_weights import (
    AttentionSample,
    bucket_edges,
    record_attention,
)
from evaluation.diagnostics.diagnostic_session import DiagnosticResult, common_fields
from evaluation.diagnostics.diagnostic_settings import AttentionDiagnosticSettings
from evaluation.evaluated_model import EvaluatedModel
from evaluation.scoring.evaluate import evenly_spread
from evaluation.scoring.methods import CellPlace, Method
from evaluation.scoring.plan import EvaluationPlan, fixed_plan
from evaluation.scoring.session import Advance, CellSession, EvaluationCell
from evaluation.scoring.text import EvaluationText
from model import Transformer


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
    seen: dict[CellPlace, AttentionSample] = field(default_factory=dict)

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
        result = AttentionResult(**fields, plan=plan)
        lengths = {length: length for length in plan.lengths}
        super().__init__(result, lengths, None, console)
        if plan.note:
            self.warn(plan.note)
        self.title = f"attention in {len(result.unit)} windows"
        model = subject.under((), settings.dtype)
        result.layer_kinds = list(model.settings.layer_kinds)
        for block, kind in zip(model.layers, result.layer_kinds, strict=True):
            if not block.mixer.has_attention_weights:
                raise EvaluationError(
                    "protocol=attention requires attention weights, which layers with mixer.name="
                    f"{model.kinds[kind].mixer.name} do not have"
                )

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
            for method, length in self.places()
        ]

    def score(
        self,
        cell: EvaluationCell,
        model: Transformer,
        batch: int,
        advance: Advance,
    ) -> AttentionSample:
        windows = cell.windows
        tokens = self.text.windows(windows.document, windows.end, cell.length)
        tokens = torch.from_numpy(tokens).to(self.device)
        parts = []
        for rows in tokens.split(batch):
            sample = record_attention(
                model,
                rows[:, :-1],
                keep=self.settings.targets,
                chunk=self.settings.chunk,
                edges=self.result.edges(cell.length),
                trained_length=self.subject.trained_length,
            )
            parts.append(sample)
            advance(len(rows) / len(tokens))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def keep(self, cell: EvaluationCell, values: AttentionSample) -> None:
        self.result.seen[cell.where] = values
