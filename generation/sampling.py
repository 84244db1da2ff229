"""Sampling of the next token from logits: temperature, top-k, top-p, min-p and repetition
penalty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from errors import ModelError

NUCLEUS = 512  # number of most likely tokens tried first for top_p


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, applied in the order of the fields.

    Attributes:
        repetition_penalty: positive logits of tokens already in the row (prompt included) are
            divided by this factor, negative logits multiplied; 1: off. Keskar et al. 2019
            (arXiv:1909.05858).
        temperature: divisor of the logits; 0: greedy.
        top_k: keep only this many most likely tokens.
        top_p: after top_k, keep the smallest set of most likely tokens with at least this total
            probability. Holtzman et al. 2019 (arXiv:1904.09751).
        min_p: drop tokens with less than this fraction of the highest probability. Nguyen et al.
            2024 (arXiv:2407.01082).

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
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or above"),
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
        """The logits (B, V) with the repetition penalty on the tokens marked in `previous` (B,
        V)."""
        if previous is None or self.repetition_penalty == 1:
            return logits
        r = self.repetition_penalty
        return torch.where(
            previous,
            torch.where(logits > 0, logits / r, logits * r),
            logits,
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        """(B, V) unnormalized float64 probabilities, 0 for dropped tokens.

        Tokens tied with the last kept probability are all kept, so the result does not depend on
        their order.
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
        """(B, 1) smallest probability that top_p keeps: a token stays if all tokens more likely
        than it sum to less than top_p. The nucleus is nearly always small, and on a CPU, sorting a
        vocabulary of 32k costs more than a pass of a small model. On a GPU the check would
        synchronize."""
        assert self.top_p is not None
        vocab_size = p.shape[-1]
        is_small_first = p.device.type == "cpu" and vocab_size > NUCLEUS
        for size in (NUCLEUS, vocab_size) if is_small_first else (vocab_size,):
            largest = p.topk(size, dim=-1).values
            before = largest.cumsum(-1) - largest
            if size < vocab_size and (before[:, -1] >= self.top_p).all():
                break
        return largest.masked_fill(before.ge(self.top_p), math.inf).amin(-1, keepdim=True)

    def choose(
        self,
        logits: Tensor,
        previous: Tensor | None,
        u: Tensor | None,
    ) -> Tensor:
        """(B,) token ids drawn from logits (B, V).

        Args:
            previous: (B, V) whether each row contains each token, for the repetition penalty.
            u: (B, 1) float64 uniform random numbers in [0, 1), unused if greedy.
        """
        logits = self.penalized(logits, previous)
        if self.greedy or u is None:
            return logits.argmax(-1)
        cumulative = self.probabilities(logits).cumsum(-1)
        # The first token whose cumulative probability exceeds u·total; its probability is never 0.
        return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)[:, 0]


def uniform_draws(seeds: Sequence[int], tokens: int) -> Tensor:
    """(B, tokens) float64 uniform in [0, 1 − 2⁻³²], each row from its own generator, drawn in
    advance to avoid a generator call per token and row."""
    rows = [
        torch.rand(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed in seeds
    ]
    # u·total must be below total after rounding; otherwise the index would be out of range.
    return torch.stack(rows).clamp_(max=1 - 2.0**-32)
