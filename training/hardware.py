"""Hardware: CPU threads and allocator, peak FLOP/s and memory."""

import resource
import sys
import time
from collections.abc import Callable
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
def measured_peak(device: torch.device, dtype: torch.dtype) -> tuple[float, bool]:
    """Rate of a large matrix product in FLOP/s, measured once, and whether the process had its CPU
    cores to itself during it."""
    n = 8192 if device.type == "cuda" else 1536  # saturates a GPU
    # Uses its own generator, so that the restored state of the global one in a resumed run does not
    # change.
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(n, n, device=device, dtype=dtype, generator=generator)
    best = float("inf")
    begun = time.perf_counter()
    cpu_begun = time.process_time()
    while time.perf_counter() < begun + 1.0:  # the fastest: other processes can only slow it down
        best = min(best, _seconds_of(lambda: torch.mm(a, a), device))
    busy = (time.process_time() - cpu_begun) / (time.perf_counter() - begun)
    is_alone = device.type == "cuda" or busy > 0.9 * torch.get_num_threads()
    return 2 * n**3 / best, is_alone


def peak_flops(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Peak rate in FLOP/s: from data sheets for known GPUs, else measured.

    Args:
        dtype: of the matrix products; None: bfloat16 on a GPU, float32 on a CPU.
    """
    is_gpu = device.type == "cuda"
    if is_gpu:
        name = torch.cuda.get_device_name(device)
        known = [peak for part, peak in GPU_PEAKS.items() if part in name]
        if known:
            return known[0]
    return measured_peak(device, dtype or (torch.bfloat16 if is_gpu else torch.float32))[0]


def reliable_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """As `peak_flops`; None where other processes used the CPU cores while it was measured."""
    if device.type == "cuda" or measured_peak(device, dtype)[1]:
        return peak_flops(device, dtype)
    return None


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 natively."""
    if device.type == "cuda":
        # Without `including_emulation=False`, this is also true on older GPUs, where bfloat16 is
        # much slower.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def product_seconds(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """Seconds of a product of float32 matrices on the CPU, cast to `dtype` as autocast does."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=generator)
    weight = torch.randn(inner, columns, generator=generator)
    device = torch.device("cpu")
    times = [_seconds_of(lambda: x.to(dtype) @ weight.to(dtype), device) for _ in range(8)]
    return min(times[2:])  # the first ones choose kernels and allocate memory


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


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
