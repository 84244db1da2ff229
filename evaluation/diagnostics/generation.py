"""`protocol: generation`: the model goes on from real text, past its trained length, measured by position.

The same documents' own continuation is measured beside it. Rows end where the model ends the document.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evaluation.diagnostics.repetition import by_bucket
from evaluation.diagnostics.settings import GenerationSettings
from evaluation.errors import EvaluationError
from evaluation.forecast import choose_batch, memory_free
from evaluation.matrix import Subject, resolve_all
from evaluation.rules import Rule
from evaluation.scoring import ModelScorer
from evaluation.targets import draw_integer, draw_targets, tokens_needed
from evaluation.text import Text
from model import ModelError, Transformer
from model.sampling import Generation, Sampling

REAL = "real text"


def source_of(temperature: float) -> str:
    """The words for how text was made."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


@dataclass
class Generated:
    """Everything measured.

    Attributes:
        edges: of the buckets of positions; the first is the prompt's length.
        values: (rule, source) -> measure -> (prompts, buckets).
        tokens: (rule, source) -> (prompts, N) ids, the prompt first, and (prompts,) how many there are.
        text: (rule, source) -> what the first prompt was continued with.
        absent: rules that reach no further than some length, and why.
    """

    settings: GenerationSettings
    subject: Subject
    rules: list[Rule]
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


def measure_generation(
    settings: GenerationSettings,
    subject: Subject,
    *,
    store,
    tokenizer,
    rules: list[Rule],
    console,
) -> Generated:
    """Continue every prompt under every rule and at every temperature.

    Raises:
        EvaluationError: before any compute where it cannot work: documents too short, no room past prompts.
    """
    rules = [rule for rule in rules if not rule.truncates]  # a cut context has no rule of its own
    schemes = resolve_all(rules, subject)
    l0 = subject.trained_length
    prompt = settings.prompt or max(1, l0 // 2)
    total, width = settings.length or 4 * l0, settings.bucket or max(8, l0 // 2)
    if total < prompt + width:
        raise EvaluationError(
            f"length={total} leaves less than a bucket of {width} tokens after a prompt of {prompt}: raise "
            "length, or lower prompt or bucket"
        )
    text = Text(store, settings.bos, getattr(tokenizer, "bos_id", None))
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
    found = Generated(
        settings,
        subject,
        rules,
        schemes,
        unit_of[drawn.document],
        unit_kind,
        len(set(drawn.document.tolist())),
        {"corpus_hash": store.hash, "tokenizer_hash": tokenizer.hash},
        [*range(prompt, total - width // 2, width), total],
        drawn.hash,
    )
    real = text.windows(drawn.document, drawn.end, total - 1)  # (P, total)
    reach = {rule.label: _reach(found, rule, total) for rule in rules}
    steps = sum(len(settings.temperatures) * (reach[rule.label] - prompt) for rule in rules)
    with console.bar("generating", total=steps * len(real), unit="tokens") as bar:
        for rule in rules:
            model = subject.load(rule.words, settings.dtype)
            rows = real[:, : reach[rule.label]]
            for temperature in settings.temperatures:
                tokens, ends = _continued(model, rows, prompt, temperature, found, tokenizer, bar.advance)
                _measure(found, rule.label, source_of(temperature), model, tokens, ends, tokenizer)
            _measure(found, rule.label, REAL, model, rows, np.full(len(rows), rows.shape[1]), tokenizer)
    return found


def _prompts_each(lengths: np.ndarray, prompts: int, total: int, new: int) -> int:
    """Prompts from each document: as few as give the number that is wanted, or the most."""
    given = {}
    for each in range(1, prompts + 1):
        given[each] = each * int((lengths >= tokens_needed(total - 1, new, each)).sum())
        if given[each] >= prompts:
            return each
    return max(given, key=lambda each: (given[each], -each))


def _reach(found: Generated, rule: Rule, total: int) -> int:
    """Tokens in the end under a rule: as many buckets as its positions reach."""
    limit = found.subject.longest(rule.words)
    if limit is None or total - 1 <= limit:  # the last token is written and never read
        return total
    found.absent[rule.label] = f"its positions end after {limit} tokens"
    if limit + 1 < found.edges[1]:
        raise EvaluationError(
            f"rule {rule.label!r} has no room for {found.edges[1] - found.edges[0]} tokens past a prompt of "
            f"{found.edges[0]}: {found.absent[rule.label]}; lower prompt or bucket"
        )
    return max(edge for edge in found.edges if edge <= limit + 1)


def _continued(
    model: Transformer,
    rows: np.ndarray,
    prompt: int,
    temperature: float,
    found: Generated,
    tokenizer,
    advance,
) -> tuple[np.ndarray, np.ndarray]:
    """(P, N) the prompts and what the model made of them, and how many tokens each row has."""
    out, ends = rows.copy(), np.full(len(rows), rows.shape[1])
    seeds = [draw_integer(str(found.settings.seed), "generation", row) % 2**63 for row in range(len(rows))]
    generation = Generation(
        model,
        [row[:prompt].tolist() for row in rows],
        rows.shape[1] - prompt,
        Sampling(temperature=temperature),
        seeds=seeds,
        eos_id=tokenizer.eos_id,
        prefill_chunk=found.settings.chunk,
    )
    for at, step in enumerate(generation, start=prompt):
        for row, token in enumerate(step):
            if token is not None:
                out[row, at] = token
        advance(len(rows))
    for row, reason in enumerate(generation.finish):
        if reason == "eos":
            written = out[row, prompt:].tolist()
            ends[row] = prompt + written.index(tokenizer.eos_id)  # the end itself is no token of the text
    return out, ends


def _measure(
    found: Generated,
    rule: str,
    source: str,
    model: Transformer,
    tokens: np.ndarray,
    ends: np.ndarray,
    tokenizer,
) -> None:
    """Score the rows by the model that wrote them, in one pass as it declares its length, and count."""
    prompt, total = found.edges[0], tokens.shape[1]
    settings, device = found.settings, model.embed.weight.device
    budget = int(settings.memory * 2**30) if settings.memory else int(0.8 * memory_free(device))
    scorer = ModelScorer(model, device=device, chunk=settings.chunk, length=total)
    size = choose_batch(model, total, total - prompt, chunk=settings.chunk, device=device, budget=budget)
    nll = np.full(tokens.shape, np.nan)
    for start in range(0, len(tokens), size):
        nll[start : start + size, prompt:] = scorer(tokens[start : start + size], total - prompt)
    edges = [edge for edge in found.edges if edge < total] + [total]
    values = by_bucket(tokens, ends, nll, edges)
    if not np.isfinite(values["nll"][:, 0]).any():
        raise ModelError(f"the model gives a loss that is not finite on its own text ({rule}, {source})")
    room = len(found.edges) - len(edges)
    found.values[rule, source] = {
        name: np.pad(value, ((0, 0), (0, room)), constant_values=np.nan) for name, value in values.items()
    }
    found.tokens[rule, source] = tokens, ends
    found.text[rule, source] = tokenizer.decode(tokens[0, prompt : ends[0]].tolist())
