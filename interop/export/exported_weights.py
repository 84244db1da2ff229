"""The weights of a run, as one safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from data.files import sync
from errors import InteropError
from run_directory.run import LoadedRun
from training.train_state import weights_of


def export_weights(run: LoadedRun, out: Path) -> int:
    """Write the weights in the dtype of the checkpoint, under the names of the model's parameters;
    tied weights are written once. The header contains run, step and hash.

    Returns:
        The number of tensors.

    Raises:
        InteropError: the file exists or cannot be written.
    """
    if out.exists():
        raise InteropError(f"{out} already exists; choose another name or move it")
    if not out.absolute().parent.is_dir():
        raise InteropError(f"{out}: its folder does not exist; create it first")
    weights = weights_of(run.model)
    about = {"run": run.folder.resolve().name, "step": str(run.step), "hash": run.checkpoint_hash}
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        save_file(weights, draft, {"format": "pt"} | about)
        sync(draft)
        os.replace(draft, out)
    except (OSError, SafetensorError) as error:
        raise InteropError(f"{out} cannot be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return len(weights)
