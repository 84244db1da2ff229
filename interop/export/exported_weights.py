"""The weights of a run, as one safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file

from data.files import sync
from interop.export.files import check_new, space_for
from run_directory.run import LoadedRun
from run_directory.weights import weights_of


def export_weights(run: LoadedRun, out: Path) -> int:
    """Write the weights in the dtype of the checkpoint, under the names of the model's parameters;
    tied weights are written once. The header contains run, step and hash.

    Returns:
        The number of tensors.

    Raises:
        InteropError: the file exists or cannot be written.
    """
    check_new(out)
    weights = weights_of(run.model)
    about = {"run": run.folder.resolve().name, "step": str(run.step), "hash": run.checkpoint_hash}
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with space_for(weights, out):
            out.parent.mkdir(parents=True, exist_ok=True)
            save_file(weights, draft, {"format": "pt"} | about)
            sync(draft)
            os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    return len(weights)
