"""What a run tells: held-out loss, samples, mirrors, traces. No setting here shapes the weights."""

from typing import Literal

from pydantic import field_validator

from training.optimizer_settings import ShareOrSteps
from training.settings_base import Settings
from training.settings_base import free as _free


class ValidationSettings(Settings):
    """Held-out loss inside the run, on the same targets at every length."""

    every: int | None = _free(250, "steps between validations; null: only at the end and as `at` says", ge=1)
    at: list[ShareOrSteps] = _free(
        [], "more validations: below 1 after that share of the run, from 1 on after so many steps"
    )
    multiples: list[int] = _free([1, 2, 4], "lengths, as multiples of train_length", min_length=1)
    spans: int = _free(32, "spans of targets, each from another place of the validation text", ge=1)
    targets: int = _free(64, "targets in each span, at the end of its context", ge=1)

    @field_validator("multiples")
    @classmethod
    def _multiples_are_positive(cls, multiples: list[int]) -> list[int]:
        if min(multiples) < 1 or len(set(multiples)) < len(multiples):
            raise ValueError(f"multiples must be different whole numbers from 1 on, not {multiples}")
        return multiples

    @field_validator("at")
    @classmethod
    def _after_some_steps(cls, at: list[float]) -> list[float]:
        if any(one <= 0 for one in at):
            raise ValueError(f"each of at must be above 0, not {at}")
        return at


class SampleSettings(Settings):
    """Text written by the model inside the run, greedily."""

    every: int | None = _free(None, "steps between samples; null: only at the end", ge=1)
    prompts: list[str] = _free(["def ", "The "], "one sample for each")
    tokens: int = _free(64, "new tokens in each sample", ge=1)


class WandbSettings(Settings):
    """A mirror of metrics.jsonl at Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = _free(
        "disabled", "online needs an account and a network"
    )
    project: str = _free("sextant", "project the run appears in")
    entity: str | None = _free(None, "account or team; null: your own")


class ProfileSettings(Settings):
    """A trace of some steps by torch.profiler, for chrome://tracing or Perfetto, in the run's profile folder.
    It slows these steps down and changes no number."""

    start: int = _free(10, "steps of the run before the first that is traced", ge=0)
    steps: int = _free(3, "how many are traced", ge=1, le=100)
