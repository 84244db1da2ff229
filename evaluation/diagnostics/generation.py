"""`protocol: generation`: continue real text past the trained length, measured by position.

The true continuation is the reference. A row ends when the model generates EOS.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from errors import EvaluationError
from evaluation.diagnostics.diagnostic_session import DiagnosticResult, common_fields
from evaluation.diagnostics.diagnostic_settings import GenerationDiagnosticSettings
from evaluation.diagnostics.repetition import by_bucket
from evaluation.evaluated_model import EvaluatedModel
from evaluation.ranks import EvaluationRanks
from evaluation.scoring.methods import Method
from evaluation.scoring.scoring import CellFailed, ModelScorer
from evaluation.scoring.session import Advance, CellSession, EvaluationCell
from evaluation.scoring.targets import draw_integer, draw_targets
from evaluation.scoring.text import EvaluationText
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import Transformer

REAL = "real text"


def source_of(temperature: float) -> str:
    """The label of generated text."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


@dataclass(kw_only=True)
class GenerationResult(DiagnosticResult):
    """Everything measured.

    Attributes:
        edges: of the buckets of positions; the first is the prompt's length.
        values: (method, source) -> measure -> (prompts, buckets).
        text: (method, source) -> continuation of the first prompt.
    """

    settings: GenerationDiagnosticSettings
    edges: list[int]
    targets_hash: str
    values: dict[tuple[str, str], dict[str, np.ndarray]] = field(default_factory=dict)
    text: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        return [*map(source_of, self.settings.temperatures), REAL]


class GenerationSession(CellSession):
    """One generation evaluation: prompts, lengths and memory budget.

    Raises:
        EvaluationError: before any compute for what cannot work: documents too short, no room after
            prompts.
    """

    settings: GenerationDiagnosticSettings
    counted = "prompts"

    def __init__(
        self,
        settings: GenerationDiagnosticSettings,
        subject: EvaluatedModel,
        *,
        store,
        tokenizer,
        methods: list[Method],
        console,
    ):
        l0 = subject.trained_length
        prompt = settings.prompt or max(1, l0 // 2)
        total = settings.length or 4 * l0
        width = settings.bucket or max(8, l0 // 2)
        if total < prompt + width:
            raise EvaluationError(
                f"length={total} leaves less than a bucket of {width} tokens after a prompt of "
                f"{prompt}: raise length, or lower prompt or bucket"
            )
        self.prompt = prompt
        self.tokenizer = tokenizer
        text = EvaluationText(store, settings.bos, getattr(tokenizer, "bos_id", None))
        drawn = draw_targets(
            text,
            tokenizer_hash=tokenizer.hash,
            longest=total - 1,
            span=total - prompt,
            documents=settings.prompts,
            spans_per_document=1,
            seed=settings.seed,
            least_documents=settings.least_documents,
        )
        fields = common_fields(settings, subject, methods, text, tokenizer.hash, drawn.document)
        edges = [*range(prompt, total - width // 2, width), total]
        result = GenerationResult(**fields, edges=edges, targets_hash=drawn.hash)
        # the last token is generated and not read
        super().__init__(result, {total: total - 1}, None, console, EvaluationRanks())
        self.real = text.windows(drawn.document, drawn.end, total - 1)  # (P, total)
        self.title = f"{len(self.real)} prompts of {prompt} tokens"

    def cells(self) -> list[EvaluationCell]:
        return [
            EvaluationCell(
                method,
                total,
                self.key(method, total) | {"source": source, "method": method.label},
                inputs=np.full(len(self.real), total),
                keep=total - self.prompt,
                chunk=self.settings.chunk,
                role=source,
            )
            for method, total in self.places()
            for source in self.result.sources
        ]

    def score(
        self,
        cell: EvaluationCell,
        model: Transformer,
        batch: int,
        advance: Advance,
    ) -> tuple[str, dict[str, np.ndarray]]:
        """The continuation of the first prompt, and the measures of that of every prompt, scored by
        the model in one pass, declared at its own length."""
        tokens = self.real
        ends = np.full(len(tokens), cell.length)
        if cell.role != REAL:
            temperatures = {source_of(t): t for t in self.settings.temperatures}
            tokens, ends = self._generate(
                model, tokens, temperatures[cell.role], lambda: advance(1 / cell.keep)
            )
        scorer = ModelScorer(model, device=self.device, chunk=cell.chunk, length=cell.length)
        nll = np.full(tokens.shape, np.nan)
        for start in range(0, len(tokens), batch):
            rows = slice(start, start + batch)
            nll[rows, self.prompt :] = scorer(tokens[rows], cell.keep)
        values = by_bucket(tokens, ends, nll, self.result.edges)
        if not np.isfinite(values["nll"][:, 0]).any():
            raise CellFailed(f"the loss of the text is not finite ({cell.role})")
        text = self.tokenizer.decode(tokens[0, self.prompt : ends[0]].tolist())
        return text, values

    def keep(self, cell: EvaluationCell, values: tuple[str, dict[str, np.ndarray]]) -> None:
        where = (cell.method.label, cell.role)
        self.result.text[where], self.result.values[where] = values

    def _generate(
        self,
        model: Transformer,
        rows: np.ndarray,
        temperature: float,
        after_token: Callable[[], None] = lambda: None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(P, N) prompts with their continuation by the model, and the number of tokens of each
        row."""
        prompt = self.prompt
        eos_ids = self.tokenizer.eos_ids
        out = rows.copy()
        ends = np.full(len(rows), rows.shape[1])
        generation = Generation(
            model,
            [row[:prompt].tolist() for row in rows],
            rows.shape[1] - prompt,
            SamplingParams(temperature=temperature),
            seeds=[
                draw_integer(str(self.settings.seed), "generation", row) % 2**63
                for row in range(len(rows))
            ],
            eos_ids=eos_ids,
            vocab_size=self.tokenizer.vocab_size,
            prefill_chunk=self.settings.chunk,
        )
        for at, step in enumerate(generation, start=prompt):
            for row, token in enumerate(step):
                if token is not None:
                    out[row, at] = token
            after_token()
        for row, reason in enumerate(generation.finish):
            if reason == "eos":
                is_end = np.isin(out[row, prompt:], eos_ids)
                ends[row] = prompt + int(is_end.argmax())  # without the EOS token itself
        return out, ends
