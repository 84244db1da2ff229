"""Export of a run to a GGUF file, compared with ours in llama.cpp where that is installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from errors import InteropError
from interop.export.parity import MULTIPLES
from interop.gguf.llama_cpp_process import is_installed, run_jobs
from interop.gguf.writing.writer import StorageType, check_path, write_gguf
from model import TokenPositions, Transformer
from run_directory.console import Console
from run_directory.run import LoadedRun

MOST_LOGITS = 1 << 27  # 0.5 GB; longer texts are not compared
# Largest accepted difference, relative to the largest logit. llama.cpp rounds activations to float16 beside
# such weights, and to 8 bits beside weights of 8 bits.
TOLERANCES = {"F32": 1e-4, "F16": 0.02, "BF16": 0.1, "Q8_0": 0.1}
# Growth of the tolerance with the length. llama.cpp computes the angle of pair k at position p by k products
# in float32: its error is p·b^(−k/R)·(k + 8)·2⁻²⁴, at most 1e-6·p for any k, in radians, and a logit changes
# by less than the largest one per radian.
PER_TOKEN = 1e-6


@dataclass(frozen=True)
class ExportedFile:
    """An exported file.

    Attributes:
        architecture: `general.architecture`.
        differences: largest difference of a logit by length, relative to the largest logit; None if
            llama-cpp-python is not installed.
    """

    path: Path
    architecture: str
    differences: dict[int, float] | None


def export_gguf(
    run: LoadedRun,
    out: Path,
    *,
    dtype: StorageType = "F32",
    multiples: Sequence[int] = MULTIPLES,
    console: Console | None = None,
) -> ExportedFile:
    """Write a run to a GGUF file; nothing is left if that fails.

    Args:
        dtype: how matrices are stored.
        multiples: multiples of the trained length at which logits are compared with llama.cpp's.

    Raises:
        InteropError: llama.cpp cannot represent the run, the file exists, or llama.cpp's logits differ beyond
            the tolerance.
    """
    console = console or Console()
    check_path(out)
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    about = {
        "name": run.folder.resolve().name,
        "description": f"Sextant run, step {run.step}, checkpoint {run.checkpoint_hash[:12]}",
    }
    model = run.model.float()
    try:
        plan = write_gguf(model, run.tokenizer, draft, dtype, about, add_bos=run.settings.data.bos)
        differences = None
        if is_installed():
            differences = _compare(model, draft, out, dtype, multiples, console)
        else:
            console.info("not compared with llama.cpp: llama-cpp-python is not installed")
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    return ExportedFile(out, plan.architecture, differences)


def _compare(
    model: Transformer,
    draft: Path,
    out: Path,
    dtype: str,
    multiples: Sequence[int],
    console: Console,
) -> dict[int, float]:
    lengths = [multiple * model.train_length for multiple in sorted(multiples)]
    lengths = [length for length in lengths if length * model.vocab_size <= MOST_LOGITS]
    found = {}
    for length in lengths:
        ids = torch.randint(
            model.vocab_size, (length,), generator=torch.Generator().manual_seed(length)
        )
        (theirs,) = run_jobs([{"file": str(draft), "ids": ids.tolist()}])
        with torch.no_grad():
            ours = model(ids[None], TokenPositions.plain(length))[0].numpy()
        found[length] = float(np.abs(theirs["logits"] - ours).max() / np.abs(ours).max())
        limit = TOLERANCES[dtype] + PER_TOKEN * length
        console.info(
            f"{length:,} tokens: logits differ by {found[length]:.1e} (tolerance {limit:.1e})"
        )
        if not found[length] <= limit:
            raise InteropError(
                f"{out} was not written: at {length:,} tokens llama.cpp's logits differ from ours by "
                f"{found[length]:.1e} of the largest, more than {limit:.1e}; report this with the run's "
                "settings.yaml"
            )
    return found
