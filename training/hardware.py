"""Hardware: peak FLOP/s and memory, and what `training.precision: auto` chooses for it."""

import importlib
import sys
import time
from pathlib import Path

import torch

from model.loss import LOGITS_AT_ONCE
from run_directory.parent_run import ParentRun
from run_directory.run import Run, is_run
from run_directory.run_settings import RunSettings
from training.memory import vocabulary_of
from training.parallel import Parallel

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


def known_peak(device: torch.device) -> float | None:
    """Peak rate of a GPU in bfloat16, FLOP/s; None for a device without a data sheet here."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in GPU_PEAKS.items() if part in name), None)


def peak_flops(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Peak rate in FLOP/s: of the data sheet, else that of a large matrix product.

    Args:
        dtype: of the matrix product; None: bfloat16 on a GPU, float32 on a CPU.
    """
    is_gpu = device.type == "cuda"
    n = 8192 if is_gpu else 1536  # saturates a GPU
    dtype = dtype or (torch.bfloat16 if is_gpu else torch.float32)
    return known_peak(device) or 2 * n**3 / product_seconds(n, n, n, dtype, device)


def product_seconds(
    rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> float:
    """Seconds of a product of float32 matrices, cast to `dtype` as autocast does."""
    # Its own generator: the restored state of the global one in a resumed run must not change.
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, inner, generator=generator, device=device)
    weight = torch.randn(inner, columns, generator=generator, device=device)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        _ = x.to(dtype) @ weight.to(dtype)
        if x.device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[2:])  # the first ones choose kernels and allocate memory


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 natively."""
    if device.type == "cuda":
        # Without `including_emulation=False`, this is also true on older GPUs, where bfloat16 is
        # much slower.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes; GPU memory where there is a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage includes the process that started this one, up to its exec
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return 0  # not known
    resource = importlib.import_module("resource")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


PRECISION = "precision"  # manifest key: what `auto` was resolved to
FASTER = 0.9  # bfloat16 is chosen where its product takes at most this share of the time


def resolve_precision(
    settings: RunSettings,
    parent: ParentRun | None,
    folder: Path | None,
    parallel: Parallel,
    given: str | None = None,
) -> str:
    """The precision of a run: that of its settings, or what `auto` resolves to.

    Existing runs and forks keep theirs. A new one takes `given` or else bfloat16 on GPUs that have
    it and, on CPUs that have it, where the largest matrix product of the model is faster. Every
    process must call it; the main one decides.
    """
    precision = settings.training.precision
    if precision != "auto":
        return precision
    if folder is not None and is_run(folder):
        return Run(folder).manifest.get(PRECISION, "float32")
    if parent is not None and settings.is_fork and parent.about.get(PRECISION):
        return parent.about[PRECISION]
    if given is not None:
        return given
    if parallel.device_type != parallel.device.type:  # simulated GPUs
        return "bfloat16"
    chosen = faster_precision(settings, parent, parallel.device) if parallel.main else None
    return parallel.gather(chosen)[0]


def faster_precision(settings: RunSettings, parent: ParentRun | None, device: torch.device) -> str:
    """The faster precision on a device for the largest matrix product of a model."""
    if not has_bfloat16(device):
        return "float32"
    if device.type == "cuda":
        return "bfloat16"
    t = settings.training
    tokens = (t.micro_batch_size or t.batch_size) * settings.train_length
    vocab_size = vocabulary_of(settings, parent)
    feed_forward = (tokens, settings.model.dim, 2 * settings.model.ffn_dim)
    head = (min(tokens, LOGITS_AT_ONCE["cpu"] // vocab_size + 1), settings.model.dim, vocab_size)
    largest = max(feed_forward, head, key=lambda sizes: sizes[0] * sizes[2])
    half = product_seconds(*largest, torch.bfloat16)
    full = product_seconds(*largest, torch.float32)
    return "bfloat16" if half <= FASTER * full else "float32"
