"""What both diagnostics do before they measure: methods, text, units, memory budget and
forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evaluation.diagnostics.diagnostic_settings import DiagnosticSettings
from evaluation.evaluated_model import EvaluatedModel
from evaluation.scoring.forecast import (
    ForecastRow,
    choose_batch,
    forecast_line,
    forecast_table,
    memory_budget,
    memory_needed,
)
from evaluation.scoring.loss_session import MeasuredCells
from evaluation.scoring.methods import Method
from evaluation.scoring.text import EvaluationText
from model import Transformer, find_device


@dataclass(kw_only=True)
class DiagnosticResult(MeasuredCells):
    """The common fields of the diagnostics. `unit`: the independent unit of each window or
    prompt."""

    settings: DiagnosticSettings
    unit: np.ndarray
    unit_kind: str
    documents: int


class DiagnosticSession:
    """One diagnostic of one run."""

    def __init__(
        self, settings, subject: EvaluatedModel, *, store, tokenizer, methods: list[Method], console
    ):
        self.settings = settings
        self.subject = subject
        self.tokenizer = tokenizer
        self.console = console
        # A context cut to the trained length shows nothing beyond it.
        self.methods = [method for method in methods if not method.truncates]
        self.schemes = subject.schemes(self.methods)
        self.bos_id = getattr(tokenizer, "bos_id", None)
        self.text = EvaluationText(store, settings.bos, self.bos_id)
        self.facts = {"corpus_hash": store.hash, "tokenizer_hash": tokenizer.hash}
        self.device = find_device(settings.device)
        self.budget = memory_budget(settings.memory, self.device)

    def about(self, documents: np.ndarray) -> dict[str, Any]:
        """The fields of a `DiagnosticResult`, from the document of each window or prompt."""
        unit_of, _, kind = self.text.units()
        return {
            "settings": self.settings,
            "subject": self.subject,
            "methods": self.methods,
            "schemes": self.schemes,
            "facts": self.facts,
            "documents": len(set(documents.tolist())),
            "unit": unit_of[documents],
            "unit_kind": kind,
        }

    def batch(self, model: Transformer, length: int, keep: int) -> int:
        """Rows of a pass that fit into memory."""
        chunk = self.settings.chunk
        return choose_batch(
            model, length, keep, chunk=chunk, device=self.device, budget=self.budget
        )

    def row(
        self, model: Transformer, method: str, length: int, count: int, keep: int
    ) -> ForecastRow:
        """The memory of `count` windows of a length under a method."""
        batch = self.batch(model, length, keep)
        peak = memory_needed(model, length, keep, batch, self.settings.chunk)
        return ForecastRow(method, length, count, count * length, peak)

    def show_forecast(
        self,
        model: Transformer,
        title: str,
        rows: Sequence[ForecastRow],
        tokens: int,
        seconds: float,
        absent: Mapping[tuple[str, int], str],
        what: str = "windows",
    ) -> None:
        """Print every cell with its memory, and the time of all."""
        self.console.table(f"{self.subject.name}: {title}", *forecast_table(rows, absent, what))
        peak = max(row.peak or 0 for row in rows)
        self.console.info(forecast_line(model, len(rows), tokens, seconds, peak, self.budget))
