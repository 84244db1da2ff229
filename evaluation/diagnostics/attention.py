"""`protocol: attention`: attention of every method at every length, on windows of the fixed
targets."""

import torch

from errors import EvaluationError
from evaluation.diagnostics.attention_weights import (
    AttentionSample,
    bucket_edges,
    record_attention,
)
from evaluation.diagnostics.diagnostic_session import DiagnosticMeasurement
from evaluation.diagnostics.diagnostic_settings import AttentionDiagnosticSettings
from evaluation.evaluated_model import EvaluatedModel
from evaluation.scoring.cells import Advance, EvaluationCell
from evaluation.scoring.methods import CellPlace, Method
from evaluation.scoring.targets import EvaluationText
from evaluation.scoring.text_loss import spread
from evaluation.scoring.windows import fixed_plan
from model import Transformer


class AttentionMeasurement(DiagnosticMeasurement):
    """Windows, and what their last queries attend to. Windows are the same at every length and
    under each method.

    Raises:
        EvaluationError: before any compute for what cannot work: documents too short, no softmax
            attention.

    Attributes:
        seen: by (method, length), merged over the windows.
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
        self.plan = plan
        chosen = spread(len(plan.truncated), settings.windows)
        self.chosen = {length: windows[chosen] for length, windows in plan.windows.items()}
        super().__init__(
            settings,
            subject,
            methods,
            {length: length for length in plan.lengths},
            text=self.text,
            tokenizer=tokenizer,
            document=plan.truncated[chosen, 0],
            console=console,
        )
        self.seen: dict[CellPlace, AttentionSample] = {}
        if plan.note:
            self.warn(plan.note)
        self.title = f"attention in {len(self.unit)} windows"
        model = subject.under((), settings.dtype)
        self.layer_kinds = list(model.settings.layer_kinds)
        for block, kind in zip(model.layers, self.layer_kinds, strict=True):
            if not block.mixer.has_attention_weights:
                raise EvaluationError(
                    "protocol=attention requires attention weights, which layers with mixer.name="
                    f"{model.kinds[kind].mixer.name} do not have"
                )

    def edges(self, length: int) -> list[int]:
        """Of the buckets of distances."""
        return bucket_edges(length, self.subject.trained_length)

    def cells(self) -> list[EvaluationCell]:
        return [
            EvaluationCell(
                method,
                length,
                self.key(method, length),
                inputs=self.chosen[length][:, 2],
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
        document, end, *_ = cell.windows.T
        tokens = self.text.windows(document, end, cell.length)
        tokens = torch.from_numpy(tokens).to(self.device)
        parts = []
        for rows in tokens.split(batch):
            sample = record_attention(
                model,
                rows[:, :-1],
                keep=self.settings.targets,
                chunk=self.settings.chunk,
                edges=self.edges(cell.length),
                trained_length=self.subject.trained_length,
            )
            parts.append(sample)
            advance(len(rows) / len(tokens))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def keep(self, cell: EvaluationCell, values: AttentionSample) -> None:
        self.seen[cell.where] = values
