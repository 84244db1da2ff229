"""What `training.precision=auto` stands for: a rule of the hardware, stored in a run's settings."""

from collections.abc import Callable
from pathlib import Path

import torch

from model import find_device
from run_directory.parent_run import ParentRun
from run_directory.run import Run, is_run
from run_directory.run_settings import RunSettings

# On one core with AVX512-BF16, steps of widths 32, 64, 96 and 192 take 2.14, 1.05, .76 and .7 times
# those of float32.
MIN_WIDTH = 96
PRECISION = "precision"  # manifest key of runs whose settings say auto, begun by earlier versions


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 natively."""
    if device.type == "cuda":
        # Without `including_emulation=False`, this is also true on older GPUs, where bfloat16 is
        # much slower.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def auto_precision(settings: RunSettings, device: torch.device | None = None) -> str:
    """bfloat16 on a device that multiplies it natively, else float32.

    On a CPU, a narrow model takes float32: casts outweigh its products.

    Args:
        device: None: a GPU if available, else the CPU.
    """
    device = device or find_device("auto")
    is_narrow = device.type == "cpu" and settings.model.dim < MIN_WIDTH
    return "bfloat16" if has_bfloat16(device) and not is_narrow else "float32"


def resolve_precision(
    settings: RunSettings,
    parent: ParentRun | None,
    folder_of: Callable[[RunSettings], Path],
    choose: Callable[[RunSettings], str] = auto_precision,
    restart: bool = False,
) -> tuple[RunSettings, Path]:
    """The settings of a run without `auto`, and its directory.

    An existing run keeps its precision. One that an earlier version began also keeps `auto` in its
    settings, which are part of its identity; `run_precision` reads what it stands for.

    Args:
        folder_of: the run directory of settings.
        choose: what `auto` stands for in a new run.
        restart: the run directory is replaced by a new run.
    """
    folder = folder_of(settings)
    if settings.training.precision != "auto":
        return settings, folder
    if is_run(folder) and not restart:
        return _with_precision(settings, Run(folder).settings.training.precision), folder
    kept = parent.about.get(PRECISION) if parent is not None and settings.is_fork else None
    settings = _with_precision(settings, kept or choose(settings))
    return settings, folder if is_run(folder) else folder_of(settings)


def run_precision(settings: RunSettings, folder: Path) -> str:
    """The precision in which the run in a folder is trained."""
    precision = settings.training.precision
    if precision != "auto":
        return precision
    return Run(folder).manifest.get(PRECISION, "float32")  # an earlier version began it


def _with_precision(settings: RunSettings, precision: str) -> RunSettings:
    training = settings.training.model_copy(update={"precision": precision})
    return settings.model_copy(update={"training": training})
