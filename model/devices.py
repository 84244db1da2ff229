"""Resolution of device names."""

import torch
from torch import Tensor

from errors import ModelError


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The device `name`: a PyTorch device string, or `auto` for a GPU if available.

    `cuda` without an index selects the GPU of this local rank. Raises ModelError if the device is
    not available on this machine or in this build of PyTorch.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name in ("auto", "cuda") and gpus:
        name = f"cuda:{local_rank % gpus}"
    try:
        device = torch.device("cpu" if name == "auto" else name)
        torch.empty(0, device=device)
        is_usable = device.type != "meta"
    except (RuntimeError, AssertionError):  # the latter from a build without CUDA
        is_usable = False
    if not is_usable:
        known = ", ".join(["auto", "cpu", *(f"cuda:{i}" for i in range(gpus))])
        raise ModelError(f"device {name} is not available on this machine; use one of {known}")
    return device


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on the device, through pinned memory for a GPU: the host does not
    wait for it. On a CPU, x itself."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
