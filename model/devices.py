"""Devices: process-wide settings of the CPU, names, and copies."""

import ctypes
import os
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor

from errors import ModelError


def prepare_cpu(threads: int | None) -> None:
    """Process-wide CPU settings; call before the first tensor operation, so that worker threads
    inherit them.

    Denormals are flushed to zero: products of small attention weights fall into that range and slow
    the kernels two- to threefold. glibc is set to keep freed blocks: a training step frees and
    allocates the same hundreds of megabytes, and returning the pages to the system takes 10% to 20%
    of a step.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        # parameters of mallopt(3)
        mmap_max = -4
        trim_threshold = -1
        top_pad = -2
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 256 << 20)


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The device `name`: a PyTorch device string, or `auto` for a GPU if available.

    `cuda` without an index selects the GPU of this local rank. Raises ModelError if the device is
    not available on this machine or in this build of PyTorch, or has no float64.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name in ("auto", "cuda") and gpus:
        name = f"cuda:{local_rank % gpus}"
    if name.partition(":")[0] == "mps":
        raise ModelError(
            "device mps has no float64, in which positions, sums of gates and losses are computed; "
            "use cpu"
        )
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


def free_memory(device: torch.device) -> int:
    """Free bytes of the GPU, or of the machine and the container that the process runs in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # an upper bound
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):  # includes the reclaimable file cache
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # not Linux, or no control group
    return free
