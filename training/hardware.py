"""Hardware: peak FLOP/s and memory."""

import re
from pathlib import Path

import psutil
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


def known_peak(device: torch.device) -> float | None:
    """Peak rate of a GPU in bfloat16, FLOP/s; None for a device without a data sheet here."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in GPU_PEAKS.items() if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes; GPU memory if there is a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage would include the process that started this one, up to its exec
    status = Path("/proc/self/status")
    text = status.read_text(encoding="utf-8") if status.exists() else ""
    peak = re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else psutil.Process().memory_info().rss
