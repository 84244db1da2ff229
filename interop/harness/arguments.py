"""Arguments that the harness passes to a model, and the processes that it was started in."""

import atexit
import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from errors import InteropError
from evaluation.ranks import EvaluationRanks, refuse_silent_launch, this_process


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Overrides from keys and values of `--model_args`, which the harness has parsed."""
    unknown = [key for key in settings if not key.startswith("model.")]
    if unknown:
        raise InteropError(
            f"unknown model argument {unknown[0]!r}; overrides start with model., such as "
            "model.position.scaling.name=yarn"
        )
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    ]


def dtype_named(name: str | None) -> torch.dtype | None:
    """The floating-point dtype `name`, None for the stored one (`auto`)."""
    if name in (None, "auto"):
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InteropError(f"dtype={name} is unknown; use float32, float64 or bfloat16")
    return dtype


def positive(name: str, value: Any) -> int:
    """A positive integer, which the harness may pass as text."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or number != float(value):
        raise InteropError(f"{name} must be a positive integer, got {value!r}")
    return number


def join_processes() -> EvaluationRanks:
    """This process among those that torchrun or accelerate started; they exchange results with
    gloo."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        refuse_silent_launch(os.environ)
    elif not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(hours=24))
        atexit.register(dist.destroy_process_group)
    return this_process()
