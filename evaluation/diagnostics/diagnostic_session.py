"""Base class of both diagnostics: they read text, have units of documents and store no cells."""

from collections.abc import Mapping

import numpy as np

from evaluation.evaluated_model import EvaluatedModel
from evaluation.evaluation_settings import DiagnosticSettings
from evaluation.methods import Method
from evaluation.scoring.cells import Measurement
from evaluation.scoring.targets import EvaluationText


class DiagnosticMeasurement(Measurement):
    """The cells of one diagnostic.

    Args:
        document: index of the document of each window or prompt.

    Attributes:
        unit: the independent unit of each window or prompt; `unit_kind`: document or cluster.
        documents: number of documents.
    """

    def __init__(
        self,
        settings: DiagnosticSettings,
        subject: EvaluatedModel,
        text: EvaluationText,
        tokenizer,
        methods: list[Method],
        positions_needed: Mapping[int, int],
        document: np.ndarray,
        console,
    ):
        # A context cut to the trained length shows nothing beyond it.
        methods = [method for method in methods if not method.truncates]
        facts = {"corpus_hash": text.store.hash, "tokenizer_hash": tokenizer.hash}
        super().__init__(settings, subject, methods, positions_needed, facts=facts, console=console)
        self.text = text
        units, _, self.unit_kind = text.units()
        self.unit = units[document]
        self.documents = len(np.unique(document))
