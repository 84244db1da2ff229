"""`protocol: generation`: continue real text past the trained length, measured by position.

The true continuation is the reference. A row ends when the model generates EOS.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evaluation.diagnostics.repetition import by_bucket
from evaluation.diagnostics.settings import GenerationDiagnosticSettings
from evaluation.errors import EvaluationError
from evaluation.run import EvaluatedModel, resolve_all
from evaluation.scoring.forecast import (
    ForecastRow,
    choose_batch,
    fit_pace,
    forecast_line,
    forecast_table,
    memory_budget,
    memory_needed,
)
from evaluation.scoring.methods import Method
from evaluation.scoring.scoring import ModelScorer
from evaluation.scoring.targets import draw_integer, draw_targets, tokens_needed
from evaluation.scoring.text import EvaluationText
from model import ModelError, Transformer, find_device
from model.sampling import Generation, SamplingParams

REAL = "real text"


def source_of(temperature: float) -> str:
    """The label of generated text."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


@dataclass
class GenerationResult:
    """Everything measured.

    Attributes:
        edges: of the buckets of positions; the first is the prompt's length.
        values: (method, source) -> measure -> (prompts, buckets).
        tokens: (method, source) -> (prompts, N) ids, the prompt first, and (prompts,) the number of tokens.
        text: (method, source) -> continuation of the first prompt.
        absent: methods with a limited reach, and why.
    """

    settings: GenerationDiagnosticSettings
    subject: EvaluatedModel
    methods: list[Method]
    schemes: dict[str, dict]
    unit: np.ndarray
    unit_kind: str
    documents: int
    facts: dict
    edges: list[int]
    targets_hash: str
    values: dict[tuple[str, str], dict[str, np.ndarray]] = field(default_factory=dict)
    tokens: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    text: dict[tuple[str, str], str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        return [*map(source_of, self.settings.temperatures), REAL]


class GenerationSession:
    """One generation evaluation: prompts, lengths and memory budget.

    Raises:
        EvaluationError: before any compute for what cannot work: documents too short, no room after prompts.
    """

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
        self.settings, self.subject, self.tokenizer, self.console = settings, subject, tokenizer, console
        methods = [method for method in methods if not method.truncates]  # truncation generates nothing new
        schemes = resolve_all(methods, subject)
        l0 = subject.trained_length
        prompt = settings.prompt or max(1, l0 // 2)
        total, width = settings.length or 4 * l0, settings.bucket or max(8, l0 // 2)
        if total < prompt + width:
            raise EvaluationError(
                f"length={total} leaves less than a bucket of {width} tokens after a prompt of {prompt}: "
                "raise length, or lower prompt or bucket"
            )
        text = EvaluationText(store, settings.bos, getattr(tokenizer, "bos_id", None))
        each = _prompts_each(text.lengths, settings.prompts, total, total - prompt)
        drawn = draw_targets(
            text,
            corpus_hash=store.hash,
            tokenizer_hash=tokenizer.hash,
            longest=total - 1,
            span=total - prompt,
            documents=-(-settings.prompts // each),
            spans_per_document=each,
            seed=settings.seed,
            least_documents=settings.least_documents,
        )
        unit_of, _, unit_kind = text.units()
        self.result = GenerationResult(
            settings,
            subject,
            methods,
            schemes,
            unit_of[drawn.document],
            unit_kind,
            len(set(drawn.document.tolist())),
            {"corpus_hash": store.hash, "tokenizer_hash": tokenizer.hash},
            [*range(prompt, total - width // 2, width), total],
            drawn.hash,
        )
        self.real = text.windows(drawn.document, drawn.end, total - 1)  # (P, total)
        self.ends = {method.label: _reach(self.result, method, total) for method in methods}
        self.budget = memory_budget(settings.memory, find_device(settings.device))

    def forecast(self) -> None:
        """Print every method with its memory, and the time of all, from a few tokens generated."""
        prompts, prompt, s = len(self.real), self.result.edges[0], self.settings
        model = self.subject.load((), s.dtype)
        rows, seconds = [], 0.0
        few = min(8, min(self.ends.values()) - prompt)
        pace = fit_pace(lambda n: self._generate(model, self.real[:, : prompt + n], 0.0, None), few, few)
        for method in self.result.methods:
            end = self.ends[method.label]
            batch = self._batch(model, end)
            peak = memory_needed(model, end, end - prompt, batch, s.chunk)
            rows.append(ForecastRow(method.label, end, prompts, prompts * end, peak))
            seconds += len(s.temperatures) * pace.seconds(np.array([end - prompt]))
        self.console.table(
            f"{self.subject.name}: {prompts} prompts of {prompt} tokens", *forecast_table(rows, {}, "prompts")
        )
        tokens = len(s.temperatures) * sum(row.inputs for row in rows)
        peak = max(row.peak or 0 for row in rows)
        self.console.info(forecast_line(model, len(rows), tokens, seconds, peak, self.budget))

    def run(self) -> GenerationResult:
        """Continue every prompt under every method and at every temperature, and score the text."""
        prompt, temperatures = self.result.edges[0], self.settings.temperatures
        steps = sum(len(temperatures) * (end - prompt) for end in self.ends.values())
        with self.console.bar("generating", total=steps * len(self.real), unit="tokens") as bar:
            for method in self.result.methods:
                model = self.subject.load(method.words, self.settings.dtype)
                rows = self.real[:, : self.ends[method.label]]
                for temperature in temperatures:
                    tokens, ends = self._generate(model, rows, temperature, bar.advance)
                    self._measure(method.label, source_of(temperature), model, tokens, ends)
                self._measure(method.label, REAL, model, rows, np.full(len(rows), rows.shape[1]))
        return self.result

    def _batch(self, model: Transformer, total: int) -> int:
        how = {"chunk": self.settings.chunk, "device": model.embed.weight.device, "budget": self.budget}
        return choose_batch(model, total, total - self.result.edges[0], **how)

    def _generate(
        self, model: Transformer, rows: np.ndarray, temperature: float, advance
    ) -> tuple[np.ndarray, np.ndarray]:
        """(P, N) prompts with their continuation by the model, and the number of tokens of each row."""
        prompt, eos_id = self.result.edges[0], self.tokenizer.eos_id
        out, ends = rows.copy(), np.full(len(rows), rows.shape[1])
        seeds = [draw_integer(str(self.settings.seed), "generation", row) % 2**63 for row in range(len(rows))]
        generation = Generation(
            model,
            [row[:prompt].tolist() for row in rows],
            rows.shape[1] - prompt,
            SamplingParams(temperature=temperature),
            seeds=seeds,
            eos_id=eos_id,
            prefill_chunk=self.settings.chunk,
        )
        for at, step in enumerate(generation, start=prompt):
            for row, token in enumerate(step):
                if token is not None:
                    out[row, at] = token
            if advance is not None:
                advance(len(rows))
        for row, reason in enumerate(generation.finish):
            if reason == "eos":
                written = out[row, prompt:].tolist()
                ends[row] = prompt + written.index(eos_id)  # without the EOS token itself
        return out, ends

    def _measure(
        self, method: str, source: str, model: Transformer, tokens: np.ndarray, ends: np.ndarray
    ) -> None:
        """Score the rows with the model in one pass, declared at their own length, and count repetitions."""
        found, settings = self.result, self.settings
        prompt, total, device = found.edges[0], tokens.shape[1], model.embed.weight.device
        scorer = ModelScorer(model, device=device, chunk=settings.chunk, length=total)
        size = self._batch(model, total)
        nll = np.full(tokens.shape, np.nan)
        for start in range(0, len(tokens), size):
            nll[start : start + size, prompt:] = scorer(tokens[start : start + size], total - prompt)
        edges = [edge for edge in found.edges if edge < total] + [total]
        values = by_bucket(tokens, ends, nll, edges)
        if not np.isfinite(values["nll"][:, 0]).any():
            raise ModelError(
                f"the model gives a loss that is not finite on its own text ({method}, {source})"
            )
        room = len(found.edges) - len(edges)
        found.values[method, source] = {
            name: np.pad(value, ((0, 0), (0, room)), constant_values=np.nan) for name, value in values.items()
        }
        found.tokens[method, source] = tokens, ends
        found.text[method, source] = self.tokenizer.decode(tokens[0, prompt : ends[0]].tolist())


def _prompts_each(lengths: np.ndarray, prompts: int, total: int, new: int) -> int:
    """Prompts per document: the fewest that give the requested number, or the most possible."""
    given = {}
    for each in range(1, prompts + 1):
        given[each] = each * int((lengths >= tokens_needed(total - 1, new, each)).sum())
        if given[each] >= prompts:
            return each
    return max(given, key=lambda each: (given[each], -each))


def _reach(found: GenerationResult, method: Method, total: int) -> int:
    """Total tokens under a method: as many buckets as its positions reach."""
    limit = found.subject.longest(method.words)
    if limit is None or total - 1 <= limit:  # the last token is generated and not read
        return total
    found.absent[method.label] = f"its positions end after {limit} tokens"
    if limit + 1 < found.edges[1]:
        raise EvaluationError(
            f"method {method.label!r} has no room for {found.edges[1] - found.edges[0]} tokens past a prompt "
            f"of {found.edges[0]}: {found.absent[method.label]}; lower prompt or bucket"
        )
    return max(edge for edge in found.edges if edge <= limit + 1)
