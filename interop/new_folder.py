"""New folders that appear only when they are complete."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from data.files import path_problem, sync
from errors import InteropError, UserError, is_disk_full


def check_new(out: Path) -> None:
    """Raise InteropError if `out` exists or cannot be created."""
    if problem := path_problem(out):
        raise InteropError(f"{out} {problem}")
    if out.exists():
        raise InteropError(f"{out} already exists; choose another --out or move it")


@contextmanager
def space_for(tensors: Mapping[str, Tensor], out: Path) -> Iterator[None]:
    """Raise InteropError if the disk has no space for the tensors, before or during the block."""
    needed = sum(tensor.nbytes for tensor in tensors.values())
    parent = next(parent for parent in out.absolute().parents if parent.is_dir())
    full = f"{out} is not written: the disk is full ({needed / 1e6:,.1f} MB needed); free space"
    if shutil.disk_usage(parent).free < needed:
        raise InteropError(full)
    try:
        yield
    except (OSError, SafetensorError, UserError) as error:
        if is_disk_full(error) or is_disk_full(error.__cause__ or error):
            raise InteropError(full) from error
        raise


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` if the block ends without an error."""
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        for path in draft.iterdir():
            sync(path)
        os.rename(draft, out)
        sync(out.absolute().parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
