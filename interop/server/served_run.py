"""The run that a server offers: its models, one per context-extension method, and their limits."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from typing import Any

from evaluation.scoring.methods import TRAINED, TRUNCATE, builtin_methods, compatible_methods
from generation.continuous_batch import ContinuousBatch
from generation.decoding import check_prompts
from interop.server.requests import ApiError
from model import ModelError, Transformer
from run_directory.run_settings import RunSettings
from training.position_overrides import longest_input, override
from training.run.directory import LoadedRun

LENGTHS = 16  # the default maximum length is this multiple of the trained length


class ServedRun:
    """A loaded run under every method that applies to it.

    The model is called NAME as loaded, and NAME:METHOD under a method of configs/evaluation/methods.yaml,
    whose overrides follow those of the command line. All of them share their weights.

    Args:
        run: the run, loaded without overrides.
        overrides: overrides of the command line.
        max_length: maximum number of tokens of prompt and completion; None: 16 times the trained length, or
            the limit of the positional scheme.
    """

    def __init__(
        self, run: LoadedRun, overrides: Sequence[str] = (), max_length: int | None = None
    ):
        self.run = run
        self.name = run.folder.resolve().name
        self.max_length = max_length or LENGTHS * run.settings.train_length
        self._created = int(time.time())
        self._lock = threading.Lock()

        def resolve(more: Sequence[str]) -> dict:
            position = override(run.settings, [*overrides, *more]).model.position
            return position.model_dump(mode="json")

        found, _ = compatible_methods(builtin_methods(), run.settings.train_length, resolve)
        self.settings: dict[str, RunSettings] = {
            "" if method.label == TRAINED else method.label: override(
                run.settings, [*overrides, *method.overrides]
            )
            for method in found
            if method.label != TRUNCATE
        }
        self._models: dict[str, Transformer] = {}

    def models(self) -> list[dict[str, Any]]:
        """The list of /v1/models."""
        return [self.about(method) for method in self.settings]

    def about(self, method: str) -> dict[str, Any]:
        """A model of /v1/models; the last four keys are extensions."""
        settings = self.settings[method]
        original = settings.original_length or settings.train_length
        return {
            "id": self.name_of(method),
            "object": "model",
            "created": self._created,
            "owned_by": "sextant",
            "method": method or None,
            "positions": settings.model.describe_positions(self.longest(method), original),
            "train_length": settings.train_length,
            "max_length": self.longest(method),
        }

    def name_of(self, method: str) -> str:
        return f"{self.name}:{method}" if method else self.name

    def method_of(self, model: str | None) -> str:
        """The method of a model's name. Raises ApiError (404)."""
        for method in self.settings:
            if model is None or model == self.name_of(method):
                return method
        raise ApiError(
            404,
            f"the model {model!r} does not exist; GET /v1/models lists them",
            "model",
            "model_not_found",
        )

    def longest(self, method: str) -> int:
        """Maximum number of tokens of prompt and completion."""
        limit = longest_input(self.settings[method])
        return self.max_length if limit is None else min(limit, self.max_length)

    def check(self, method: str, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Check token ids and lengths. Raises ApiError (400)."""
        try:
            check_prompts(
                self._model(method), prompts, max(1, tokens), self.run.tokenizer.vocab_size
            )
        except ModelError as error:
            raise ApiError(400, str(error), "prompt") from error
        length = max(map(len, prompts)) + tokens
        if length > self.max_length:
            raise ApiError(
                400,
                f"prompt and max_tokens have {length} tokens together, but the maximum is {self.max_length}; "
                "shorten the prompt, or start the server with a larger --max-length",
                "max_tokens",
                "context_length_exceeded",
            )

    def batch(self, method: str) -> ContinuousBatch:
        """A new running batch under a method."""
        tokenizer = self.run.tokenizer
        return ContinuousBatch(
            self._model(method), eos_ids=tokenizer.eos_ids, vocab_size=tokenizer.vocab_size
        )

    def _model(self, method: str) -> Transformer:
        """The model under a method, with the parameters of the loaded one."""
        with self._lock:
            if method not in self._models:
                shared = {id(weight): weight for weight in self.run.model.parameters()}
                model = copy.deepcopy(self.run.model, shared)
                model.reposition(self.settings[method].model)
                self._models[method] = model.pack()
            return self._models[method]
