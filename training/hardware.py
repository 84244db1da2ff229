"""What the machine gives: CPU threads and allocator, peak rate, memory; and what a run will take."""

import ctypes
import os
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.windows import Portion
from model import Transformer
from training.memory import Layout, memory

# Dense bfloat16 peaks from the vendors' data sheets, FLOP/s; the first name found in the device's counts.
GPU_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "4090": 165e12,
    "A10": 125e12,
}
# The share of the peak that small models reach in practice; only for forecasts.
USUAL_SHARE = 0.45
RECOMPUTED = 4 / 3  # work of a step with activation checkpointing: one more forward pass


def prepare_cpu(threads: int | None) -> None:
    """Process-wide CPU settings; call before the first tensor operation, so that worker threads inherit them.

    Denormals are flushed: products of far-away attention weights fall into that range and slow the kernels
    two- to threefold. glibc is told to keep freed blocks: a training step frees and takes the same hundreds
    of megabytes, and returning the pages to the system each time costs a tenth to a fifth of the step.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        mmap_max, trim_threshold, top_pad = -4, -1, -2  # names of mallopt(3)'s parameters
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 256 << 20)


def peak_flops(device: torch.device) -> float:
    """Peak rate in FLOP/s: from data sheets for known GPUs, else that of a large matrix product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [peak for part, peak in GPU_PEAKS.items() if part in name]
        if known:
            return known[0]
    # On a GPU as it will compute: bfloat16, and large enough to fill it.
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1536, torch.float32)
    # A generator of its own: a resumed run has just been given back the state of the global one.
    a = torch.randn(n, n, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    best, end = float("inf"), time.perf_counter() + 1.0
    while time.perf_counter() < end:  # the best of many: other work on the machine only ever slows it
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def peak_memory(device: torch.device) -> int:
    """Bytes: the most this process has held, on the GPU where there is one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts what the file cache would give back; free pages alone do not
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # all there is: the most that can be said


@dataclass(frozen=True)
class Forecast:
    """What a run will take, estimated before it starts."""

    parameters: int
    flops_per_token: float
    steps: int
    tokens: int
    memory: int  # bytes on one device
    seconds: float


def forecast(
    model: Transformer, length: int, plan: Sequence[Portion], layout: Layout, *, peak: float
) -> Forecast:
    """Memory and time of a run.

    Args:
        length: of the longest window.
        plan: the steps of the run.
        layout: its devices, and the windows of `length` of each pass.
        peak: FLOP/s of one device.
    """
    tokens = [portion.steps * portion.batch_size * portion.length for portion in plan]
    flops = sum(n * model.flops_per_token(p.length) for n, p in zip(tokens, plan, strict=True))
    again = RECOMPUTED if layout.checkpointing else 1.0
    return Forecast(
        parameters=model.parameter_count(),
        flops_per_token=flops / sum(tokens),
        steps=sum(portion.steps for portion in plan),
        tokens=sum(tokens),
        memory=round(sum(memory(model, length, layout).values())),
        seconds=again * flops / (peak * USUAL_SHARE * layout.world),
    )
