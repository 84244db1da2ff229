"""Token generation for a batch that rows join and leave between steps: continuous batching.

Yu et al. 2022 (Orca, OSDI 2022). A prompt is prefilled alone, in chunks between the steps of the
other rows, and its rows then join their cache. The tokens of a row are those of `Generation` with
the same seed, up to rounding.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from errors import ModelError
from generation.decoding import check_prompts
from generation.sampling import SamplingParams, uniform_draws
from model import Cache, TokenPositions, Transformer

CHUNK = 512  # prompt tokens per step, which bounds how long a long prompt delays the other rows


@dataclass(frozen=True)
class TokenScore:
    """A token and its log-probability in nats under the model, before sampling parameters.

    Attributes:
        logprob: None for the first token of a prompt, and where no log-probabilities were
            requested.
        top: the most likely tokens and their log-probabilities, most likely first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class GenerationRow:
    """One prompt and its generation.

    Attributes:
        tokens: maximum number of new tokens; 0 only scores the prompt. The declared length is
            prompt + tokens.
        logprobs: number of most likely tokens per score; None: no log-probabilities.
        score_prompt: also return the scores of the prompt.
        finish: None while the row is active, then ``eos``, ``length`` or ``stop``. The caller may
            set ``stop`` between steps, which removes the row.
        error: the reason why the row cannot be continued, or None.
    """

    prompt: list[int]
    tokens: int
    sampling: SamplingParams
    seed: int = 0
    logprobs: int | None = None
    score_prompt: bool = False
    finish: str | None = None
    error: ModelError | None = None
    generated: int = 0
    filled: int = 0  # tokens in the cache
    last: int = 0  # the newest token, which is not in the cache yet
    chances: Tensor | None = field(default=None, repr=False)  # (1, tokens)
    previous: Tensor | None = field(default=None, repr=False)  # (1, V), for the repetition penalty

    @property
    def length(self) -> int:
        """The declared length."""
        return len(self.prompt) + self.tokens


@dataclass(eq=False)
class _Prefill:
    """Waiting rows with the same prompt and declared length, and the first `filled` tokens of their
    cache."""

    rows: list[GenerationRow]
    cache: Cache
    filled: int = 0


class ContinuousBatch:
    """Rows that are generated together; each step yields at most one new token per row.

    Args:
        model: the model; its device and dtype are used.
        eos_ids: tokens that finish a row.
        vocab_size: number of ids of the tokenizer; further rows of the embedding are never sampled.
        chunk: prompt tokens that are prefilled per step.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        eos_ids: Collection[int] = (),
        vocab_size: int | None = None,
        chunk: int = CHUNK,
    ):
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.chunk = chunk
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        self.rows: list[GenerationRow] = []  # in the order of the cache
        self._waiting: deque[_Prefill] = deque()
        self._cache: Cache | None = None
        self._device = model.embed.weight.device

    def __len__(self) -> int:
        return len(self.rows) + sum(len(one.rows) for one in self._waiting)

    def admit(self, row: GenerationRow) -> None:
        """Add a row. Rows with the same prompt and declared length that are admitted between two
        steps are prefilled once.

        Raises:
            ModelError: its prompt is invalid or too long.
        """
        check_prompts(self.model, [row.prompt], max(1, row.tokens), self.vocab_size)
        if not row.sampling.greedy and row.tokens:
            row.chances = uniform_draws([row.seed], row.tokens).to(self._device)
        if row.sampling.repetition_penalty != 1:
            row.previous = torch.zeros(1, self.vocab_size, dtype=torch.bool, device=self._device)
            row.previous[0, torch.tensor(row.prompt, device=self._device)] = True
        for one in self._waiting:
            if not one.filled and (one.rows[0].prompt, one.rows[0].tokens) == (
                row.prompt,
                row.tokens,
            ):
                one.rows.append(row)
                return
        self._waiting.append(_Prefill([row], self.model.make_cache(1, len(row.prompt))))

    @torch.inference_mode()
    def step(self) -> list[tuple[GenerationRow, list[TokenScore]]]:
        """One token for every prefilled row, and one chunk of the first prompt that is not
        prefilled.

        Returns the new scores by row: of its prompt, if requested, and of at most one generated
        token. A row whose logits are not finite has `error` set instead.
        """
        scores: dict[GenerationRow, list[TokenScore]] = {}
        self.remove_finished()
        parts = [self._extend()] if self.rows else []
        if self._waiting:
            logits = self._prefill(scores)
            if logits is not None:
                parts.append(logits)
        if self.rows:
            self._choose(torch.cat(parts), scores)
        return list(scores.items())

    def remove_finished(self) -> None:
        """Free the memory of finished rows. `step` does so too, before its forward pass."""
        for one in self._waiting:
            one.rows = [row for row in one.rows if row.finish is None]
        self._waiting = deque(one for one in self._waiting if one.rows)
        kept = [index for index, row in enumerate(self.rows) if row.finish is None]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in kept]
        if self._cache is not None:
            self._cache = self._merged([(self._cache, kept)]) if kept else None

    def clear(self) -> list[GenerationRow]:
        """Remove all rows, and return them."""
        removed = [*self.rows, *(row for one in self._waiting for row in one.rows)]
        self.rows = []
        self._cache = None
        self._waiting.clear()
        return removed

    def _merged(self, parts: list[tuple[Cache, list[int]]]) -> Cache:
        room = max(row.length - row.filled for row in self.rows)
        return Cache.merge(self.model, parts, room)

    def _extend(self) -> Tensor:
        """(B, V) logits after the newest token of each row."""
        order = torch.tensor([[row.filled] for row in self.rows], device=self._device)
        positions = TokenPositions(
            order,
            order,
            torch.zeros_like(order),
            layout="ragged",
            position_end=max(row.filled for row in self.rows) + 1,
            lengths=tuple(row.length for row in self.rows),
        )
        tokens = torch.tensor([[row.last] for row in self.rows], device=self._device)
        for row in self.rows:
            row.filled += 1
        return self.model(tokens, positions, cache=self._cache)[:, -1]

    def _prefill(self, scores: dict[GenerationRow, list[TokenScore]]) -> Tensor | None:
        """Prefill a chunk of the first waiting prompt. After its last chunk its n rows join the
        batch, and their logits (n, V) are returned."""
        one = self._waiting[0]
        first = one.rows[0]
        start = one.filled
        prompt = first.prompt
        stop = min(start + self.chunk, len(first.prompt))
        whole = TokenPositions.plain(len(prompt), length=first.length, device=self._device)
        positions = whole.part(start, stop, position_end=stop)
        is_last = stop == len(prompt)
        scored = [row for row in one.rows if row.score_prompt]
        keep = stop - start if scored else int(is_last)
        tokens = torch.tensor([prompt[start:stop]], device=self._device)
        logits = self.model(tokens, positions, cache=one.cache, keep=keep)[0]  # (keep, V)
        one.filled = stop
        targets = prompt[start + 1 : stop + 1]
        for row in scored:
            found = self._scores(logits[: len(targets)], targets, [row.logprobs] * len(targets))
            scores[row] = [TokenScore(prompt[0]), *found] if start == 0 else found
        if not is_last:
            return None
        self._waiting.popleft()
        if not torch.isfinite(logits).all():
            for row in one.rows:
                row.error = ModelError(
                    "the model's logits are not finite: its weights are corrupted or training diverged"
                )
                row.finish, scores[row] = "stop", []
            return None
        if first.tokens == 0:
            for row in one.rows:
                row.finish = "length"
                scores.setdefault(row, [])
            return None
        for row in one.rows:
            row.filled = stop
        old = [] if self._cache is None else [(self._cache, list(range(len(self.rows))))]
        self.rows += one.rows
        self._cache = self._merged([*old, (one.cache, [0] * len(one.rows))])
        return logits[-1:].expand(len(one.rows), -1)

    def _choose(self, logits: Tensor, scores: dict[GenerationRow, list[TokenScore]]) -> None:
        """Choose the next token of every row from logits (B, V)."""
        groups: dict[SamplingParams, list[int]] = defaultdict(list)
        for index, row in enumerate(self.rows):
            groups[row.sampling].append(index)
        new = [0] * len(self.rows)
        for sampling, indices in groups.items():
            rows = [self.rows[index] for index in indices]
            chances = [
                row.chances[:, row.generated, None] for row in rows if row.chances is not None
            ]
            previous = [row.previous for row in rows if row.previous is not None]
            chosen = sampling.choose(
                logits[indices, : self.vocab_size],
                torch.cat(previous) if previous else None,
                torch.cat(chances) if chances else None,
            )
            for index, token in zip(indices, chosen.tolist(), strict=True):
                new[index] = token
        found = self._scores(logits, new, [row.logprobs for row in self.rows])
        for row, token, score in zip(self.rows, new, found, strict=True):
            row.last = token
            row.generated = row.generated + 1
            if row.previous is not None:
                row.previous[0, token] = True
            if token in self.eos_ids:
                row.finish = "eos"
            elif row.generated == row.tokens:
                row.finish = "length"
            scores.setdefault(row, []).append(score)

    def _scores(
        self, logits: Tensor, tokens: list[int], tops: list[int | None]
    ) -> list[TokenScore]:
        """Scores of one token for each row of logits (n, V); `tops` is `logprobs` of each."""
        wanted = [index for index, top in enumerate(tops) if top is not None]
        found = [TokenScore(token) for token in tokens]
        if not wanted:
            return found
        log_p = logits[wanted].float().log_softmax(-1)
        chosen = log_p.gather(1, torch.tensor([[tokens[i]] for i in wanted], device=log_p.device))[
            :, 0
        ]
        most = min(max(top or 0 for top in tops), self.vocab_size)
        values, ids = log_p[:, : self.vocab_size].topk(most, dim=-1)
        rows = zip(wanted, chosen.tolist(), values.tolist(), ids.tolist(), strict=True)
        for index, logprob, best, which in rows:
            count = tops[index] or 0
            found[index] = TokenScore(
                tokens[index], logprob, tuple(zip(which[:count], best[:count], strict=True))
            )
        return found
