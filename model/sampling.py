"""Token generation for ragged batches: chunked prefill, then one token at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from errors import ModelError
from model.cache import Cache
from model.position import TokenPositions
from model.transformer import Transformer

PREFILL_CHUNK = 2048  # tokens per prefill pass; bounds its memory
NUCLEUS = 512  # most likely tokens tried first for top_p


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, applied in the order of the fields.

    Attributes:
        repetition_penalty: positive logits of tokens already in the row (prompt included) are divided by
            this, negative ones multiplied; 1: off. Keskar et al. 2019 (arXiv:1909.05858).
        temperature: divides the logits; 0: greedy.
        top_k: keep this many most likely tokens.
        top_p: after top_k, keep the smallest set of most likely tokens with at least this total probability.
            Holtzman et al. 2019 (arXiv:1904.09751).
        min_p: drop tokens with less than this fraction of the highest probability. Nguyen et al. 2024
            (arXiv:2407.01082).

    Raises:
        ModelError: a value is out of range.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        # The comparisons are False for NaN, so NaN is rejected as well.
        for name, is_valid, allowed in (
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or above"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "between 0 and 1"),
        ):
            if not is_valid:
                raise ModelError(f"{name} must be {allowed}, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def penalized(self, logits: Tensor, previous: Tensor | None) -> Tensor:
        """logits (B, V) after the repetition penalty of the tokens marked in `previous` (B, V)."""
        if previous is None or self.repetition_penalty == 1:
            return logits
        r = self.repetition_penalty
        return torch.where(previous, torch.where(logits > 0, logits / r, logits * r), logits)

    def probabilities(self, logits: Tensor) -> Tensor:
        """(B, V) unnormalized float64 probabilities, 0 for dropped tokens.

        Tokens tied with the last kept probability are all kept, so the result does not depend on their order.
        """
        logits = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        p = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            p = p.masked_fill(p < self._least_of_nucleus(p), 0)
        if self.min_p:
            p = p.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), 0)
        return p

    def _least_of_nucleus(self, p: Tensor) -> Tensor:
        """(B, 1) smallest probability that top_p keeps: a token stays if all tokens more likely than it sum
        to less than top_p. The nucleus is nearly always small, and sorting a vocabulary of 32k
        costs more than a pass of a small model."""
        assert self.top_p is not None
        for count in (NUCLEUS, p.shape[-1]):
            largest = p.topk(min(count, p.shape[-1]), dim=-1).values
            before = largest.cumsum(-1) - largest
            if (before[:, -1] >= self.top_p).all():
                break
        return largest.masked_fill(before >= self.top_p, math.inf).amin(-1, keepdim=True)

    def choose(self, logits: Tensor, previous: Tensor | None, u: Tensor | None) -> Tensor:
        """(B,) token ids drawn from logits (B, V).

        Args:
            previous: (B, V) tokens of each row, for the repetition penalty.
            u: (B, 1) float64 uniform random numbers in [0, 1), unused if greedy.
        """
        logits = self.penalized(logits, previous)
        if self.greedy or u is None:
            return logits.argmax(-1)
        cumulative = self.probabilities(logits).cumsum(-1)
        # The first token whose cumulative probability exceeds u·total; its probability is never 0.
        return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)[:, 0]


class Generation:
    """An iterator over generation steps for a batch of prompts; each step yields one token per row.

    Finished rows yield None, after their end-of-document token. The tokens of a row do not depend on the rest
    of the batch: each row has its own random generator and its own declared length.

    Args:
        model: the model; its device and dtype are used.
        prompts: token ids of each row, at least one each.
        tokens: maximum number of new tokens; prompt + tokens is the declared length of the row.
        sampling: sampling parameters.
        seeds: one per row (default: 0 for all, so equal prompts have equal continuations).
        eos_ids: tokens that finish a row.
        vocab_size: number of ids of the tokenizer. Further rows of the embedding are padding, which is never
            sampled; None: all rows are ids.
        cache: False recomputes all tokens at each step, as a reference for the cache.
        prefill_chunk: tokens per prefill pass.

    Attributes:
        finish: per row None while it is active, then ``eos``, ``length`` or ``stop``.

    Raises:
        ModelError: invalid prompts or too many tokens, before any compute; non-finite logits, after the
            prefill.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        sampling: SamplingParams | None = None,
        *,
        seeds: Sequence[int] | None = None,
        eos_ids: Collection[int] = (),
        vocab_size: int | None = None,
        cache: bool = True,
        prefill_chunk: int = PREFILL_CHUNK,
    ):
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        check_prompts(model, prompts, tokens, self.vocab_size)
        self.model, self.tokens, self.sampling = model, tokens, sampling or SamplingParams()
        self.eos_ids, self.chunk = frozenset(eos_ids), prefill_chunk
        self.finish: list[str | None] = [None] * len(prompts)
        counts = [len(prompt) for prompt in prompts]
        self.width, device = max(counts), model.embed.weight.device
        # Slots of the whole generation; a pass is a slice of them. The last token is never an input.
        slots = self.width + tokens - 1
        if len(set(counts)) == 1:
            self.positions = TokenPositions.plain(slots, length=slots + 1, device=device)
        else:
            declared = [count + tokens for count in counts]
            self.positions = TokenPositions.left_padded(counts, slots, lengths=declared, device=device)
        rows = torch.zeros(len(prompts), slots, dtype=torch.int64)
        for row, prompt in zip(rows, prompts, strict=True):
            row[self.width - len(prompt) : self.width] = torch.tensor(prompt)
        self.rows = rows.to(device)  # (B, slots), left padded with id 0
        self.cache = Cache(model, len(prompts), slots) if cache else None
        self.previous = self._mark(prompts) if self.sampling.repetition_penalty != 1 else None
        self.chances = (
            None if self.sampling.greedy else uniform_draws(seeds or [0] * len(prompts), tokens).to(device)
        )

    def stop(self, row: int) -> None:
        """Finish a row, e.g. at a stop string."""
        if self.finish[row] in (None, "length"):
            self.finish[row] = "stop"

    @torch.inference_mode()
    def __iter__(self) -> Iterator[list[int | None]]:
        logits = self._prefill()
        if not torch.isfinite(logits).all():
            raise ModelError(
                "the model's logits are not finite: its weights are corrupted or training diverged"
            )
        for step in range(self.tokens):
            chance = None if self.chances is None else self.chances[:, step : step + 1]
            new = self.sampling.choose(logits[:, : self.vocab_size], self.previous, chance)  # (B,)
            if self.previous is not None:
                self.previous.scatter_(1, new[:, None], True)
            given: list[int | None] = new.tolist()
            for row, token in enumerate(given):
                if self.finish[row] is not None:
                    given[row] = None
                elif token in self.eos_ids:
                    self.finish[row] = "eos"
                elif step == self.tokens - 1:
                    self.finish[row] = "length"
            yield given
            if None not in self.finish:
                return
            logits = self._extend(new, self.width + step)

    def _prefill(self) -> Tensor:
        """(B, V) logits after the prompts."""
        if self.cache is None:
            return self._pass(0, self.width, keep=1)
        for start in range(0, self.width, self.chunk):
            stop = min(start + self.chunk, self.width)
            logits = self._pass(start, stop, keep=int(stop == self.width))
        return logits

    def _extend(self, new: Tensor, slot: int) -> Tensor:
        """(B, V) logits after writing the tokens new (B,) to `slot`."""
        self.rows[:, slot] = new
        return self._pass(slot if self.cache else 0, slot + 1, keep=1)

    def _pass(self, start: int, stop: int, keep: int) -> Tensor:
        positions = self.positions.part(start, stop, reach=stop)
        logits = self.model(self.rows[:, start:stop], positions, cache=self.cache, keep=keep)  # (B, keep, V)
        return logits[:, -1] if keep else logits

    def _mark(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """(B, V) tokens of each prompt, without padding."""
        previous = torch.zeros(len(prompts), self.vocab_size, dtype=torch.bool)
        for row, prompt in zip(previous, prompts, strict=True):
            row[torch.tensor(prompt)] = True
        return previous.to(self.rows.device)


def check_prompts(model: Transformer, prompts: Sequence[Sequence[int]], tokens: int, vocab_size: int) -> None:
    """Raise ModelError for prompts that cannot be continued by `tokens` new tokens."""
    if not 0 < vocab_size <= model.vocab_size:
        raise ModelError(
            f"a tokenizer of {vocab_size} ids does not fit an embedding of {model.vocab_size} rows; use the "
            "model's tokenizer"
        )
    if tokens < 1:
        raise ModelError(f"at least 1 new token is required, got {tokens}")
    if not prompts:
        raise ModelError("no prompt: at least one is required")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ModelError(f"prompt {row + 1} has no tokens: at least one is required")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(i for i in prompt if not 0 <= i < vocab_size)
            raise ModelError(
                f"prompt {row + 1} contains token {wrong}, outside the model's vocabulary of 0 to "
                f"{vocab_size - 1}; check the tokenizer"
            )
    longest = max(map(len, prompts))
    needed = longest + tokens - 1
    if model.limit is not None and needed > model.limit:
        room = model.limit - longest + 1
        raise ModelError(
            f"the model supports positions up to {model.limit - 1}, but a prompt of {longest} tokens and "
            f"{tokens} new tokens require offset + T = {needed}: "
            + (f"generate at most {room} tokens" if room > 0 else "shorten the prompt")
        )


def uniform_draws(seeds: Sequence[int], tokens: int) -> Tensor:
    """(B, tokens) float64 uniform in [0, 1 − 2⁻³²], each row from its own generator, drawn in advance to
    avoid a generator call per token and row."""
    rows = [
        torch.rand(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    # u·total must be below total after rounding; otherwise the index would be out of range.
    return torch.stack(rows).clamp_(max=1 - 2.0**-32)
