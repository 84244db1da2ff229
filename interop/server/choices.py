"""The choices of one completion request: tokens to text and log-probabilities, and their delivery."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data.tokenizers import Tokenizer
from generation.continuous_batch import GenerationRow, TokenScore
from generation.samples import Sample
from generation.text_stream import TextStream

LEAST = -9999.0  # log-probability of an impossible token; JSON has no infinity
# our reasons -> those of the OpenAI API
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass
class Delta:
    """New text of a choice and the entries of its tokens: (text, log-probability, top, offset)."""

    text: str = ""
    entries: list[tuple[str, float | None, dict[str, float] | None, int]] = field(
        default_factory=list
    )
    finish: str | None = None

    def add(self, later: Delta) -> None:
        self.text += later.text
        self.entries += later.entries
        self.finish = later.finish

    def logprobs(self) -> dict[str, list]:
        """The entries in the form of the OpenAI API."""
        keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        columns = list(zip(*self.entries, strict=True)) if self.entries else [()] * 4
        return {key: list(column) for key, column in zip(keys, columns, strict=True)}


class Choice:
    """One sample of a request.

    A token is delivered with the text that contains it, so tokens that may belong to a stop string wait, and
    those of a complete stop string are dropped.
    """

    def __init__(self, sample: Sample, row: GenerationRow, tokenizer: Tokenizer, echo: bool):
        self.sample = sample
        self.row = row
        self.tokenizer = tokenizer
        # Used by the event loop only: what is not sent yet, and whether it ends the choice.
        self.delta = Delta()
        self.is_complete = False
        self._prompt_left = len(sample.ids) if row.score_prompt else 0
        self._echoed = sample.prompt if echo else ""
        self._whole = TextStream(tokenizer, begins=echo or not sample.prompt)
        self._decoded = 0  # characters of the tokens so far
        self._released = 0  # characters of the text so far
        self._held: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, scores: Sequence[TokenScore]) -> Delta:
        """The delta of new tokens; sets the row's `finish` at a stop string."""
        delta = Delta()
        if self._echoed and not self._prompt_left:
            delta.text = self._echoed
            self._echoed = ""
        for score in scores:
            if self.row.logprobs is not None:
                self._held.append(self._entry(score))
                self._decoded += len(self._whole.push(score.token))
            if self._prompt_left:
                self._prompt_left -= 1
                if not self._prompt_left:
                    delta.text = delta.text + self._echoed
                    self._echoed = ""
            else:
                delta.text += self.sample.add(score.token, self.row.finish)
        if self.sample.finish == "stop":
            self.row.finish = "stop"
        delta.finish = self.sample.finish or self.row.finish
        self._released += len(delta.text)
        if delta.finish and delta.finish != "stop":
            ready = len(self._held)
        else:
            ready = sum(entry[3] < self._released for entry in self._held)
        delta.entries = self._held[:ready]
        self._held = self._held[ready:]
        return delta

    def take(self) -> Delta:
        """What is not sent yet. Called on the event loop."""
        taken = self.delta
        self.delta = Delta()
        return taken

    def _entry(self, score: TokenScore) -> tuple[str, float | None, dict[str, float] | None, int]:
        top: dict[str, float] | None = None
        if score.logprob is not None and self.row.logprobs:
            top = {}
            for token, logprob in (*score.top, (score.token, score.logprob)):
                top.setdefault(self._label(token), finite(logprob))
        logprob = None if score.logprob is None else finite(score.logprob)
        return self._label(score.token), logprob, top, self._decoded

    def _label(self, token: int) -> str:
        """The text of a token; bytes that are not UTF-8 as `bytes:\\xNN`, as in the OpenAI API."""
        piece = self.tokenizer.pieces[token] if token < len(self.tokenizer.pieces) else b""
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


class Completion:
    """A request in the engine.

    The engine passes deltas to the event loop and never waits for a client: what is not sent yet is merged,
    and its size is bounded by the request's number of tokens.
    """

    def __init__(self, method: str, choices: list[Choice], loop: asyncio.AbstractEventLoop):
        self.method = method
        self.choices = choices
        self.loop = loop
        self.cancelled = False
        self.error: Exception | None = None
        self.news = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        return self.error is not None or all(choice.is_complete for choice in self.choices)

    def deliver(self, choice: Choice, delta: Delta) -> None:
        """Called on the event loop."""
        choice.delta.add(delta)
        choice.is_complete = delta.finish is not None
        self.news.set()

    def fail(self, error: Exception) -> None:
        """Called on the event loop."""
        self.error = error
        self.news.set()

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(choice.sample.ids) for choice in self.choices)
        new = sum(len(choice.sample.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
