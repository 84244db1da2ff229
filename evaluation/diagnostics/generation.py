"""`protocol: generation`: continue real text past the trained length, measured by position.

The true continuation is the reference. A row ends when the model generates EOS.
"""

from collections.abc import Callable, Iterator

import numpy as np

from errors import EvaluationError
from evaluation.diagnostics.diagnostic_session import DiagnosticMeasurement
from evaluation.evaluated_model import EvaluatedModel
from evaluation.evaluation_settings import GenerationDiagnosticSettings
from evaluation.methods import Method
from evaluation.scoring.cells import Advance, CellFailed, EvaluationCell
from evaluation.scoring.targets import EvaluationText, draw_integer, draw_targets
from evaluation.scoring.text_loss import ModelScorer
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import Transformer

REAL = "real text"
GRAM = 4

TEXT = {  # heading and format in reports, meaning
    "repeated_4": (
        "4-grams repeated",
        ".1%",
        "share of 4-grams that ended before within as many tokens as a bucket has",
    ),
    "distinct_1": (
        "distinct tokens of a bucket",
        ".1%",
        "different tokens of a bucket, as a share of its tokens",
    ),
    "longest_run": (
        "longest repeated stretch, tokens",
        ".1f",
        "longest stretch of a bucket, in tokens, that repeats one of the last tokens before",
    ),
    "nll": (
        "NLL of the text, nats",
        ".2f",
        "NLL of the tokens under the model, nats, at temperature 1",
    ),
}


def source_of(temperature: float) -> str:
    """The label of generated text."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


class GenerationMeasurement(DiagnosticMeasurement):
    """Prompts and their continuations by the model.

    Raises:
        EvaluationError: before any compute, if documents are too short or a prompt leaves no room.

    Attributes:
        edges: edges of the buckets of positions; the first is the prompt's length.
        sources: roles of the cells: each is a source of continuations.
    """

    settings: GenerationDiagnosticSettings
    counted = "prompts"

    def __init__(
        self,
        settings: GenerationDiagnosticSettings,
        subject: EvaluatedModel,
        text: EvaluationText,
        tokenizer,
        methods: list[Method],
        console=None,
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
        lengths = {total: total - 1}  # the last token is generated and not read
        super().__init__(
            settings,
            subject,
            text,
            tokenizer,
            methods,
            lengths,
            drawn.document,
            console,
        )
        self.edges = [*range(prompt, total - width // 2, width), total]
        self.targets_hash = drawn.hash
        self.sources = [*map(source_of, settings.temperatures), REAL]
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
            for source in self.sources
        ]

    def score(
        self,
        cell: EvaluationCell,
        model: Transformer,
        batch: int,
        advance: Advance,
    ) -> tuple[str, dict[str, np.ndarray]]:
        """The continuation of the first prompt, and the measures of the continuations of all
        prompts. The model scores each in one pass, declared at its own length."""
        tokens = self.real
        ends = np.full(len(tokens), cell.length)
        if cell.role != REAL:
            temperatures = {source_of(t): t for t in self.settings.temperatures}
            tokens, ends = self._generate(
                model,
                tokens,
                temperatures[cell.role],
                lambda: advance(1 / cell.keep),
            )
        scorer = ModelScorer(model, device=self.device, chunk=cell.chunk, length=cell.length)
        nll = np.full(tokens.shape, np.nan)
        for start in range(0, len(tokens), batch):
            rows = slice(start, start + batch)
            nll[rows, self.prompt :] = scorer(tokens[rows], cell.keep)
        values = by_bucket(tokens, ends, nll, self.edges)
        if not np.isfinite(values["nll"][:, 0]).any():
            raise CellFailed(f"the loss of the text is not finite ({cell.role})")
        text = self.tokenizer.decode(tokens[0, self.prompt : ends[0]].tolist())
        return text, values

    def continuations(self) -> Iterator[tuple[str, str, str, dict[str, np.ndarray]]]:
        """Method, source, first continuation and measures, each (prompts, buckets), of every
        measured cell."""
        for cell in self.cells():
            if cell.where in self.values_by_role[cell.role]:
                yield cell.method.label, cell.role, *self.values_by_role[cell.role][cell.where]

    def _generate(
        self,
        model: Transformer,
        rows: np.ndarray,
        temperature: float,
        after_token: Callable[[], None] = lambda: None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The prompts with their continuations by the model (P, N), and the number of tokens of
        each row."""
        prompt = self.prompt
        eos_ids = self.tokenizer.eos_ids
        out = rows.copy()
        ends = np.full(len(rows), rows.shape[1])
        seed = str(self.settings.seed)
        generation = Generation(
            model,
            [row[:prompt].tolist() for row in rows],
            rows.shape[1] - prompt,
            SamplingParams(temperature=temperature),
            seeds=[draw_integer(seed, "generation", row) % 2**63 for row in range(len(rows))],
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


def repeated_runs(tokens: np.ndarray, back: int) -> np.ndarray:
    """For each of the ids (R, N), the length (R, N) of the longest stretch that ends here and also
    ended at most `back` tokens earlier. Stretches may overlap: after `aaaa` comes a run of 4."""
    rows, count = tokens.shape
    longest = np.zeros((rows, count), dtype=np.int64)
    place = np.arange(count)
    for shift in range(1, min(back, count - 1) + 1):
        same = tokens[:, shift:] == tokens[:, :-shift]
        # The length of the run is the distance to the last mismatch.
        last = np.maximum.accumulate(np.where(same, -1, place[: count - shift]), axis=1)
        run = place[: count - shift] - last
        longest[:, shift:] = np.maximum(longest[:, shift:], run)
    return longest


def by_bucket(
    tokens: np.ndarray,
    ends: np.ndarray,
    nll: np.ndarray,
    edges: list[int],
) -> dict[str, np.ndarray]:
    """Every measure, (R, buckets); NaN if a row has no token in a bucket.

    Args:
        tokens: (R, N) ids, the prompt first.
        ends: (R,) number of tokens of each row.
        nll: (R, N) nats; only entries from the first edge on are read.
        edges: edges of the buckets of positions, the first one the prompt's length. Repetitions are
            counted within as many tokens as the first bucket has.
    """
    runs = repeated_runs(tokens, edges[1] - edges[0])
    buckets = len(edges) - 1
    out = {name: np.full((len(tokens), buckets), np.nan) for name in TEXT}
    for row, end in enumerate(ends.tolist()):
        for n in range(buckets):
            low = edges[n]
            high = min(edges[n + 1], end)
            if low >= high:
                break
            here = runs[row, low:high]
            out["repeated_4"][row, n] = (here >= GRAM).mean()
            out["distinct_1"][row, n] = len(np.unique(tokens[row, low:high])) / (high - low)
            out["longest_run"][row, n] = here.max()
            out["nll"][row, n] = nll[row, low:high].mean()
    return out
