"""Decoding of a batch of prompts of different lengths: chunked prefill, then one token at a
time."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from errors import ModelError
from generation.sampling import SamplingParams, uniform_draws
from model import TokenPositions, Transformer
from model.decoding import make_decoder

PREFILL_CHUNK = 2048  # tokens per prefill pass; bounds its memory


class HostTokens:
    """Tokens (B,) that are being copied to the host; `read` waits for the copy, not for later
    work."""

    def __init__(self, tokens: Tensor):
        self._tokens = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens = host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tokens.tolist()


class Generation:
    """An iterator over generation steps for a batch of prompts; each step yields one token per row.

    After its end-of-document token, a finished row yields None. The tokens of a row do not depend
    on the rest of the batch: each row has its own random generator and its own declared length.

    Args:
        model: the model; its device and dtype are used.
        prompts: token ids of each row, at least one per row.
        tokens: maximum number of new tokens; prompt + tokens is the declared length of the row.
        sampling: sampling parameters.
        seeds: one seed per row (default: 0 for all rows, so equal prompts have equal
            continuations).
        eos_ids: tokens that finish a row.
        vocab_size: number of ids of the tokenizer. Further rows of the embedding are padding, which
            is never sampled; None: all rows are ids.
        cache: False recomputes all tokens at each step, as a reference for the cache.
        is_compiled: on a GPU, compile the passes after the prompt if their operations are the same;
            ignored for other models and devices.
        prefill_chunk: tokens per prefill pass.
        positions: for each row, the positions of its prompt and of `tokens` new tokens; None: 0, 1,
            2, ...

    Attributes:
        finish: for each row, None while it is active, then ``eos``, ``length`` or ``stop``.

    Raises:
        ModelError: before any compute, for invalid prompts or too many tokens; after the prefill,
            for non-finite logits.
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
        is_compiled: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
        positions: Sequence[Sequence[int]] | None = None,
    ):
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        # the last new token is never an input
        end = max(map(len, prompts), default=0) + tokens - 1
        if positions is not None:
            end = 1 + max(max(row[:-1]) for row in positions)
        check_prompts(model, prompts, tokens, self.vocab_size, end)
        self.model = model
        self.tokens = tokens
        self.sampling = sampling or SamplingParams()
        self.eos_ids = frozenset(eos_ids)
        self.chunk = prefill_chunk
        self._is_compiled = is_compiled
        self.finish: list[str | None] = [None] * len(prompts)
        counts = [len(prompt) for prompt in prompts]
        self.width = max(counts)
        device = model.embed.weight.device
        # Positions of the slots of the whole generation; a pass uses a slice of them. The last
        # token is never an input.
        slots = self.width + tokens - 1
        if len(set(counts)) == 1:
            self.positions = TokenPositions.plain(
                slots,
                length=slots + 1,
                device=device,
            )
        else:
            declared = [count + tokens for count in counts]
            self.positions = TokenPositions.left_padded(
                counts, slots, lengths=declared, device=device
            )
        if positions is not None:
            self.positions = _given(self.positions, positions, counts)
        self.rows = torch.zeros(
            len(prompts),
            slots,
            dtype=torch.int64,
        )  # left padded with id 0
        for row, prompt in zip(self.rows, prompts, strict=True):
            row[self.width - len(prompt) : self.width] = torch.tensor(prompt)
        self.rows = self.rows.to(device)  # (B, slots)
        self.cache = model.make_cache(len(prompts), slots) if cache else None
        self.decode: Callable[[Tensor], Tensor] | None = None  # passes after the prompts
        self.previous: Tensor | None = None  # (B, V) bool, for the repetition penalty
        if self.sampling.repetition_penalty != 1:
            self.previous = self._mark(prompts)
        self.uniform: Tensor | None = None  # (B, tokens) random numbers
        if not self.sampling.greedy:
            self.uniform = uniform_draws(seeds or [0] * len(prompts), tokens).to(device)

    def stop(self, row: int) -> None:
        """Finish a row, e.g. at a stop string."""
        if self.finish[row] in (None, "length"):
            self.finish[row] = "stop"

    def __iter__(self) -> Iterator[list[int | None]]:
        try:
            yield from self._steps()
        finally:
            self.decode = None  # frees its buffers for the next generation

    @torch.inference_mode()
    def _steps(self) -> Iterator[list[int | None]]:
        logits = self._prefill()
        if not torch.isfinite(logits).all():
            raise ModelError(
                "the model's logits are not finite: its weights are corrupted or training diverged"
            )
        for step in range(self.tokens):
            u = None if self.uniform is None else self.uniform[:, step : step + 1]
            new = self.sampling.choose(
                logits[:, : self.vocab_size],
                self.previous,
                u,
            )  # (B,)
            if self.previous is not None:
                self.previous.scatter_(1, new[:, None], True)
            is_last = step == self.tokens - 1
            tokens = HostTokens(new)
            # A GPU computes the next pass while the host reads the tokens. The first of these
            # passes is recorded as a graph; the first token does not wait for the recording.
            is_early = new.device.type == "cuda" and self.decode is not None and not is_last
            if is_early:
                logits = self._extend(new, self.width + step)
            yield self._finished(tokens.read(), is_last)
            if None not in self.finish:
                break
            if not is_early:
                logits = self._extend(new, self.width + step)

    def _finished(self, new: list[int], is_last: bool) -> list[int | None]:
        """The new tokens, None for rows that finished earlier; updates `finish`."""
        tokens: list[int | None] = []
        for row, token in enumerate(new):
            tokens.append(token if self.finish[row] is None else None)
            if self.finish[row] is None and token in self.eos_ids:
                self.finish[row] = "eos"
            elif self.finish[row] is None and is_last:
                self.finish[row] = "length"
        return tokens

    def _prefill(self) -> Tensor:
        """The logits (B, V) after the prompts."""
        if self.cache is None:
            return self._pass(0, self.width, keep=1)
        for start in range(0, self.width, self.chunk):
            stop = min(start + self.chunk, self.width)
            logits = self._pass(start, stop, keep=int(stop == self.width))
        return logits

    def _extend(self, new: Tensor, slot: int) -> Tensor:
        """The logits (B, V) after writing the tokens `new` (B,) to `slot`."""
        if self.cache is not None:
            if self.decode is None:
                rest = self.positions.part(self.width, self.rows.shape[1])
                self.decode = make_decoder(
                    self.model, self.cache, rest, is_compiled=self._is_compiled
                )
            return self.decode(new)
        self.rows[:, slot] = new
        return self._pass(0, slot + 1, keep=1)

    def _pass(self, start: int, stop: int, keep: int) -> Tensor:
        positions = self.positions.part(start, stop)
        if positions.unit_steps:
            positions = replace(positions, position_end=stop)
        tokens = self.rows[:, start:stop]
        logits = self.model(
            tokens,
            positions,
            cache=self.cache,
            keep=keep,
        )  # (B, keep, V)
        return logits[:, -1] if keep else logits

    def _mark(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """(B, V) whether each prompt contains each token; padding does not count."""
        previous = torch.zeros(len(prompts), self.vocab_size, dtype=torch.bool)
        for row, prompt in zip(previous, prompts, strict=True):
            row[torch.tensor(prompt)] = True
        return previous.to(self.rows.device)


def _given(
    plain: TokenPositions, positions: Sequence[Sequence[int]], counts: Sequence[int]
) -> TokenPositions:
    """`plain` with the given `positions` of each row. `counts`: number of tokens of each prompt."""
    slots = plain.order.shape[1]
    rows = torch.zeros(len(positions), slots, dtype=torch.int64)
    for row, given, count in zip(rows, positions, counts, strict=True):
        start = max(counts) - count
        row[start:] = torch.tensor(given)[: slots - start]
    end = 1 + int(rows.max())
    return replace(plain, position=rows.to(plain.order.device), position_end=end, unit_steps=False)


def check_prompts(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    vocab_size: int,
    needed: int,
) -> None:
    """Raise ModelError if the prompts cannot be continued by `tokens` new tokens, or need more
    positions (`needed`) than the model has."""
    if not 0 < vocab_size <= model.vocab_size:
        raise ModelError(
            f"a tokenizer of {vocab_size} ids does not fit an embedding of {model.vocab_size} "
            "rows; use the model's tokenizer"
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
    if model.limit is not None and needed > model.limit:
        room = model.limit - longest + 1
        fix = f"generate at most {room} tokens" if room > 0 else "shorten the prompt"
        raise ModelError(
            f"the model supports positions up to {model.limit - 1}, but a prompt of {longest} "
            f"tokens and {tokens} new tokens need {needed} positions: {fix}"
        )
