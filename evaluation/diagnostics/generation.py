"""`protocol: generation`: continue real text past the trained length, measured by position.

The true continuation is the reference. A row ends when the model generates EOS.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from errors import EvaluationError
from evaluation.diagnostics.diagnostic_session import DiagnosticResult, DiagnosticSession
from evaluation.diagnostics.diagnostic_settings import GenerationDiagnosticSettings
from evaluation.diagnostics.repetition import by_bucket
from evaluation.evaluated_model import EvaluatedModel
from evaluation.scoring.forecast import fit_pace
from evaluation.scoring.methods import Method
from evaluation.scoring.scoring import ModelScorer
from evaluation.scoring.targets import draw_integer, draw_targets, tokens_needed
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import ModelError, Transformer

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
        tokens: (method, source) -> (prompts, N) ids, the prompt first, and (prompts,) the number of
            tokens.
        text: (method, source) -> continuation of the first prompt.
        shorter: methods whose positions end before the full length, and why.
    """

    settings: GenerationDiagnosticSettings
    edges: list[int]
    targets_hash: str
    values: dict[tuple[str, str], dict[str, np.ndarray]] = field(default_factory=dict)
    tokens: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    text: dict[tuple[str, str], str] = field(default_factory=dict)
    shorter: dict[str, str] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        return [*map(source_of, self.settings.temperatures), REAL]


class GenerationSession(DiagnosticSession):
    """One generation evaluation: prompts, lengths and memory budget.

    Raises:
        EvaluationError: before any compute for what cannot work: documents too short, no room after
            prompts.
    """

    settings: GenerationDiagnosticSettings

    def __init__(
        self, settings: GenerationDiagnosticSettings, subject: EvaluatedModel, *, store, **shared
    ):
        super().__init__(settings, subject, store=store, **shared)
        l0 = subject.trained_length
        prompt = settings.prompt or max(1, l0 // 2)
        total = settings.length or 4 * l0
        width = settings.bucket or max(8, l0 // 2)
        if total < prompt + width:
            raise EvaluationError(
                f"length={total} leaves less than a bucket of {width} tokens after a prompt of "
                f"{prompt}: raise length, or lower prompt or bucket"
            )
        each = _prompts_each(self.text.lengths, settings.prompts, total, total - prompt)
        drawn = draw_targets(
            self.text,
            **self.facts,
            longest=total - 1,
            span=total - prompt,
            documents=-(-settings.prompts // each),
            spans_per_document=each,
            seed=settings.seed,
            least_documents=settings.least_documents,
        )
        edges = [*range(prompt, total - width // 2, width), total]
        self.result = GenerationResult(
            **self.about(drawn.document), edges=edges, targets_hash=drawn.hash
        )
        self.real = self.text.windows(drawn.document, drawn.end, total - 1)  # (P, total)
        self.ends = {method.label: _reach(self.result, method, total) for method in self.methods}

    def forecast(self) -> None:
        """Print every method with its memory, and the time of all, from a few tokens generated."""
        prompts = len(self.real)
        prompt = self.result.edges[0]
        s = self.settings
        model = self.subject.under((), s.dtype)
        repeats = len(s.temperatures)
        few = min(8, min(self.ends.values()) - prompt)
        pace = fit_pace(
            lambda n: self._generate(model, self.real[:, : prompt + n], 0.0, lambda _: None),
            few,
            few,
        )
        rows = [
            self.row(model, label, end, prompts, end - prompt) for label, end in self.ends.items()
        ]
        seconds = sum(
            repeats * pace.seconds(np.array([end - prompt])) for end in self.ends.values()
        )
        tokens = repeats * sum(row.inputs for row in rows)
        self.show_forecast(
            model, f"{prompts} prompts of {prompt} tokens", rows, tokens, seconds, {}, "prompts"
        )

    def run(self) -> GenerationResult:
        """Continue every prompt under every method and at every temperature, and score the text."""
        prompt = self.result.edges[0]
        temperatures = self.settings.temperatures
        steps = sum(len(temperatures) * (end - prompt) for end in self.ends.values())
        with self.console.bar("generating", total=steps * len(self.real), unit="tokens") as bar:
            for method in self.result.methods:
                model = self.subject.under(method.overrides, self.settings.dtype)
                rows = self.real[:, : self.ends[method.label]]
                for temperature in temperatures:
                    tokens, ends = self._generate(model, rows, temperature, bar.advance)
                    self._measure(method.label, source_of(temperature), model, tokens, ends)
                ends = np.full(len(rows), rows.shape[1])
                self._measure(method.label, REAL, model, rows, ends)
        return self.result

    def _generate(
        self, model: Transformer, rows: np.ndarray, temperature: float, advance
    ) -> tuple[np.ndarray, np.ndarray]:
        """(P, N) prompts with their continuation by the model, and the number of tokens of each
        row."""
        prompt = self.result.edges[0]
        tokenizer = self.tokenizer
        out = rows.copy()
        ends = np.full(len(rows), rows.shape[1])
        seeds = [
            draw_integer(str(self.settings.seed), "generation", row) % 2**63
            for row in range(len(rows))
        ]
        generation = Generation(
            model,
            [row[:prompt].tolist() for row in rows],
            rows.shape[1] - prompt,
            SamplingParams(temperature=temperature),
            seeds=seeds,
            eos_ids=tokenizer.eos_ids,
            vocab_size=tokenizer.vocab_size,
            prefill_chunk=self.settings.chunk,
        )
        for at, step in enumerate(generation, start=prompt):
            for row, token in enumerate(step):
                if token is not None:
                    out[row, at] = token
            advance(len(rows))
        for row, reason in enumerate(generation.finish):
            if reason == "eos":
                is_end = np.isin(out[row, prompt:], tokenizer.eos_ids)
                ends[row] = prompt + int(is_end.argmax())  # without the EOS token itself
        return out, ends

    def _measure(
        self, method: str, source: str, model: Transformer, tokens: np.ndarray, ends: np.ndarray
    ) -> None:
        """Score the rows with the model in one pass, declared at their own length, and count
        repetitions."""
        result = self.result
        prompt = result.edges[0]
        total = tokens.shape[1]
        scorer = ModelScorer(model, device=self.device, chunk=self.settings.chunk, length=total)
        size = self.batch(model, total, total - prompt)
        nll = np.full(tokens.shape, np.nan)
        for start in range(0, len(tokens), size):
            rows = slice(start, start + size)
            nll[rows, prompt:] = scorer(tokens[rows], total - prompt)
        edges = [edge for edge in result.edges if edge < total] + [total]
        values = by_bucket(tokens, ends, nll, edges)
        if not np.isfinite(values["nll"][:, 0]).any():
            raise ModelError(f"the loss of the text is not finite ({method}, {source})")
        room = ((0, 0), (0, len(result.edges) - len(edges)))
        result.values[method, source] = {
            name: np.pad(value, room, constant_values=np.nan) for name, value in values.items()
        }
        result.tokens[method, source] = tokens, ends
        result.text[method, source] = self.tokenizer.decode(tokens[0, prompt : ends[0]].tolist())


def _prompts_each(lengths: np.ndarray, prompts: int, total: int, new: int) -> int:
    """Prompts per document: the fewest that give the requested number, or the most possible."""
    best = most = 0
    for each in range(1, prompts + 1):
        count = each * int((lengths >= tokens_needed(total - 1, new, each)).sum())
        if count > most or not best:
            best = each
            most = count
        if count >= prompts:
            break
    return best


def _reach(result: GenerationResult, method: Method, total: int) -> int:
    """Total tokens under a method: as many buckets as its positions reach."""
    limit = result.subject.longest(method.overrides)
    if limit is None or total - 1 <= limit:  # the last token is generated and not read
        return total
    reason = f"its positions end after {limit} tokens"
    result.shorter[method.label] = reason
    if limit + 1 < result.edges[1]:
        raise EvaluationError(
            f"method {method.label!r} has no room for {result.edges[1] - result.edges[0]} new "
            f"tokens after a prompt of {result.edges[0]}: {reason}; decrease prompt or bucket"
        )
    return max(edge for edge in result.edges if edge <= limit + 1)
