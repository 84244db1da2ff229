"""Hardware: CPU threads and allocator, peak FLOP/s and memory."""

import os
import resource
import sys
import time
from functools import lru_cache
from pathlib import Path

import torch

# Dense bfloat16 peaks with float32 accumulation from the vendors' data sheets, FLOP/s. The first
# key in the device name applies, so cards of one chip with other clocks and units precede it.
GPU_PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "4090": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
}
# The share of the peak that small models reach in practice; used only for estimates.
USUAL_SHARE = 0.45
# FLOPs of a step with activation checkpointing: full adds a forward pass, selective no matrix
# products.
RECOMPUTED = {"none": 1.0, "selective": 1.0, "full": 4 / 3}


@lru_cache
def peak_flops(device: torch.device) -> float:
    """Peak rate in FLOP/s: from data sheets for known GPUs, else measured with a matrix product,
    once."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [peak for part, peak in GPU_PEAKS.items() if part in name]
        if known:
            return known[0]
    # On a GPU in bfloat16, as in training, and large enough to saturate it.
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1536, torch.float32)
    # Uses its own generator, so that the restored state of the global one in a resumed run does not
    # change.
    a = torch.randn(
        n, n, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0)
    )
    best = float("inf")
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:  # take the fastest: other processes can only slow it down
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes; GPU memory where there is a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage includes the process that started this one, up to its exec
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
        if "VmHWM" in lines:
            return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def free_memory(device: torch.device) -> int:
    """Free memory in bytes: of the GPU, or of the host on a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # MemAvailable includes the reclaimable file cache
        lines = dict(
            line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines()
        )
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # total memory, an upper bound
