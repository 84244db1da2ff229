"""A checkpoint under evaluation. Its weights are read once; a method changes only its positions."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter

from data.data_settings import TaskSource
from data.tasks import Task
from data.tokenizers import Tokenizer
from errors import EvaluationError, TrainingError
from evaluation.methods import Method, MethodAndLength, new_sinks
from model import AnyPosition, ModelError, Transformer, legal_overrides
from model.decoding import pack
from run_directory.console import Console
from run_directory.position_overrides import meta_model, override, why, widens
from run_directory.run import Run
from run_directory.run_settings import RunSettings

_POSITION = TypeAdapter(AnyPosition)


class EvaluatedModel:
    """The checkpoint, under one method and in one dtype at a time.

    Args:
        name: name of the run in reports.
        model: the model as trained, on the evaluation's device.
        settings: the settings of the training.
        bos_first: why this model expects BOS as the first token, '' if it does not.
    """

    def __init__(
        self,
        name: str,
        model: Transformer,
        settings: RunSettings,
        checkpoint_hash: str,
        step: int,
        bos_first: str = "",
    ):
        self.name = name
        self.settings = settings
        self.checkpoint_hash = checkpoint_hash
        self.step = step
        self.bos_first = bos_first
        self._model = model
        self._cast: Transformer | None = None
        self._settings: dict[tuple[str, ...], RunSettings] = {(): settings}

    @property
    def trained_length(self) -> int:
        return self.settings.train_length

    @property
    def original_length(self) -> int:
        return self.settings.original_length or self.settings.train_length

    def settings_under(self, overrides: Sequence[str]) -> RunSettings:
        """The settings under a method. Raises ModelError or TrainingError if they are illegal."""
        key = tuple(overrides)
        if key not in self._settings:
            self._settings[key] = override(self.settings, overrides)
        return self._settings[key]

    def position(self, overrides: Sequence[str]) -> dict:
        """Position settings under a method, as JSON."""
        return self.settings_under(overrides).model.positions_record()

    def reduced(self, position: dict, length: int) -> dict:
        """Position settings of each layer kind, without settings that have no effect on `length`
        tokens."""
        kinds = position.get("kinds") or {"": position}
        return {
            kind: _POSITION.validate_python(settings).reduced(length, self.original_length)
            for kind, settings in kinds.items()
        }

    def under(self, overrides: Sequence[str], dtype: str = "float32") -> Transformer:
        """The model under a method; a model returned by an earlier call becomes invalid."""
        wanted = getattr(torch, dtype)
        model = self._model
        if model.embed.weight.dtype != wanted:
            if self._cast is None or self._cast.embed.weight.dtype != wanted:
                self._cast = None  # free the copy before the next one is made
                self._cast = pack(copy.deepcopy(model).to(wanted))
            model = self._cast
        model.reposition(self.settings_under(overrides).model)
        return model

    def longest(self, overrides: Sequence[str]) -> int | None:
        """The longest input that the positions of a method allow; None if unlimited."""
        return meta_model(self.settings_under(overrides)).limit

    def offered(self, overrides: Sequence[str], bos: str) -> dict:
        """Position settings under a built-in method; raises EvaluationError with the reason if
        --matrix does not offer it."""
        try:
            settings = self.settings_under(overrides)
        except (ModelError, TrainingError) as error:
            raise EvaluationError(why(error)) from error
        if widens(self.settings, settings):
            raise EvaluationError("the model was trained with a narrower window")
        scheme = self.position(overrides)
        self.check_sinks({"sinks": scheme}, bos)
        return scheme

    def check_sinks(self, schemes: Mapping[str, dict], bos: str) -> str:
        """A note about methods that keep the first tokens of windows, which start anywhere in a
        document.

        Raises EvaluationError if the model was trained with BOS as the first token.
        """
        trained = self.position(())
        names = ", ".join(label for label, scheme in schemes.items() if new_sinks(scheme, trained))
        if not names or bos == "every-window":
            return ""
        if self.bos_first:
            raise EvaluationError(
                f"{names}: the first tokens of a window are kept as sinks. {self.bos_first}, but "
                "windows inside a document start with any token: set bos=every-window, or remove "
                "these methods"
            )
        return (
            f"Sinks ({names}) are the first tokens of a window, here arbitrary tokens, as at the "
            "start of a training window; bos=every-window puts BOS first."
        )

    def schemes(self, methods: Sequence[Method]) -> dict[str, dict]:
        """Position settings by method. Raises EvaluationError for an illegal method."""
        schemes = {}
        for method in methods:
            try:
                schemes[method.label] = self.position(method.overrides)
            except ValueError as error:
                raise EvaluationError(f"method {method.label!r}: {error}") from error
        return schemes

    def absent_cells(
        self,
        methods: Sequence[Method],
        positions_needed: Mapping[int, int],
        refuse: bool,
    ) -> dict[MethodAndLength, str]:
        """The cells whose length exceeds the positions of their method, with the reason.

        Args:
            positions_needed: number of positions that each length requires.

        With `refuse`, raises EvaluationError if no cell remains at a length.
        """
        limits = {
            method.label: self.longest(method.overrides)
            for method in methods
            if not method.truncates
        }
        absent = {}
        for label, limit in limits.items():
            for length, end in positions_needed.items():
                if limit is not None and end > limit:
                    absent[label, length] = f"its positions end after {limit} tokens"
        for length, end in positions_needed.items():
            if refuse and all((label, length) in absent for label in limits):
                most = max(limit for limit in limits.values() if limit is not None)
                raise EvaluationError(
                    f"length {length} requires {end} positions, and {', '.join(limits)} have at "
                    f"most {most}; shorten lengths, or add a method that extends "
                    "the positions (--matrix tries all). "
                    f"{legal_overrides(self.settings.model)}".rstrip()
                )
        return absent


@dataclass(frozen=True)
class EvaluatedRun:
    """A run directory opened for evaluation.

    Attributes:
        name: the shortest name that tells several runs apart.
        changed: settings that changed during training, in one sentence; '' if none did.
    """

    run: Run
    name: str
    model: EvaluatedModel
    changed: str

    @classmethod
    def open(
        cls,
        folder: Path,
        name: str,
        device: torch.device,
        console: Console,
        dtype: str = "float32",
        weights: Literal["ema", "last"] | None = None,
    ) -> "EvaluatedRun":
        """Read and verify a checkpoint, in float32 (float64 if it is stored or evaluated in
        float64)."""
        run = Run.open(folder)
        loaded = run.load(
            device=device,
            dtype=torch.float64 if dtype == "float64" else None,
            weights=weights,
            console=console,
        )
        model = EvaluatedModel(
            name=str(folder),
            model=loaded.model,
            settings=loaded.settings,
            checkpoint_hash=loaded.checkpoint_hash,
            step=loaded.step,
            bos_first=bos_first(loaded.settings, run.manifest),
        )
        return cls(run, name, model, loaded.changed)

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def cells(self) -> Path:
        """The folder of stored cells."""
        return self.folder / "evaluation" / "cells"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.run.tokenizer

    @property
    def data(self) -> str | None:
        """The prepared corpus the run was trained on; None for an imported model."""
        return self.run.manifest.get("data")

    @property
    def task(self) -> Task | None:
        """The task the run was trained on, if any."""
        source = self.model.settings.data.source
        return source.task if isinstance(source, TaskSource) else None


def bos_first(settings: RunSettings, manifest: dict) -> str:
    """Why the model expects BOS as the first token, or '' if it was trained without BOS.

    With data.packing=concat a window begins anywhere, so its first token is arbitrary.
    """
    if not settings.data.bos:
        return ""
    if manifest.get("data") is None:
        return "This model was imported and is assumed to be trained with BOS first"
    if settings.data.packing == "intra_document":
        return "This model was trained with BOS first (data.bos=true, data.packing=intra_document)"
    return ""
