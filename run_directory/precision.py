"""Chooses the precision for `training.precision=auto` by the hardware; a run's settings store
it."""

from collections.abc import Callable
from pathlib import Path

import torch

from model import find_device
from run_directory.run import Run, is_run
from run_directory.run_settings import RunSettings

# On one core with AVX512-BF16, steps of widths 32, 64, 96 and 192 take 2.14, 1.05, .76 and .7 times
# those of float32.
MIN_WIDTH = 96


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 natively."""
    if device.type == "cuda":
        # Without `including_emulation=False`, this is also true on older GPUs, where bfloat16 is
        # much slower.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def auto_precision(settings: RunSettings, device: torch.device | None = None) -> str:
    """bfloat16 on a device that multiplies it natively, float16 on other GPUs, else float32.

    On a CPU, narrow models use float32: their casts take longer than faster products save.

    Args:
        device: None: a GPU if available, else the CPU.
    """
    device = device or find_device("auto")
    if device.type == "cuda":
        return "bfloat16" if has_bfloat16(device) else "float16"
    is_narrow = settings.model.dim < MIN_WIDTH
    return "bfloat16" if has_bfloat16(device) and not is_narrow else "float32"


def resolve_precision(
    settings: RunSettings,
    folder_of: Callable[[RunSettings], Path],
    choose: Callable[[RunSettings], str] = auto_precision,
    restart: bool = False,
) -> tuple[RunSettings, Path]:
    """The settings of a run with `auto` replaced by a precision, and its directory. An existing run
    keeps its precision.

    Args:
        folder_of: returns the run directory for given settings.
        choose: returns the precision of a new run for `auto`.
        restart: a new run replaces the one in the run directory.
    """
    folder = folder_of(settings)
    if settings.training.precision != "auto":
        return settings, folder
    is_existing = is_run(folder)
    if is_existing and not restart:
        precision = Run(folder).settings.training.precision
    else:
        precision = choose(settings)
    training = settings.training.model_copy(update={"precision": precision})
    settings = settings.model_copy(update={"training": training})
    return settings, folder if is_existing else folder_of(settings)
