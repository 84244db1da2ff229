"""Sharded tensors on the disk: one file per process, readable by any number of processes.

Files are safetensors; the header stores the offset of each shard in the format of
torch.distributed.checkpoint, whose reader reassembles the shards and also reads unsharded files. No
pickle is written or read.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from errors import TrainingError

_PLACES = "DCP_SHARDING_INFO"  # header key of the offsets of the shards, as JSON
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")


class TensorShard(NamedTuple):
    """This process's shard of a tensor, in host memory, and its offset in the whole tensor."""

    tensor: Tensor
    offset: tuple[int, ...]


def detached(tensor: Tensor, copied: bool = False) -> Tensor:
    """A tensor on the CPU; a sharded one on its device. With `copied`, an unsharded result does not
    change when the tensor does."""
    return tensor.detach() if isinstance(tensor, DTensor) else _on_host(tensor, copied)


def _on_host(tensor: Tensor, copied: bool) -> Tensor:
    """A tensor on the CPU. The transfer from another device is already a copy, so it is not copied
    again."""
    own = tensor.detach()
    return (own.clone() if copied and own.device.type == "cpu" else own.cpu()).contiguous()


def own_part(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, or all of an unsharded one, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: DTensor, copied: bool) -> TensorShard:
    """This process's shard in host memory; with `copied`, it does not change when the tensor
    does."""
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return TensorShard(_on_host(tensor.to_local(), copied), tuple(offset))


def whole_name(name: str) -> str:
    """`model.safetensors` for `model-00001-of-00002.safetensors`; other names unchanged."""
    return _PART.sub("", name)


def write_part(
    folder: Path, kind: str, held: Mapping[str, Tensor | TensorShard], rank: int, world: int
) -> Path:
    """Write this process's file of a `kind`: its shard of every sharded tensor and, on rank 0, all
    others."""
    parts = {}
    offsets = {}
    for name, own in held.items():
        if isinstance(own, Tensor):
            if rank > 0:
                continue
            own = TensorShard(own, (0,) * own.ndim)
        if own.tensor.numel():
            parts[name], offsets[name] = own.tensor, {"saved_offsets": list(own.offset)}
    file = folder / f"{kind}-{rank + 1:05d}-of-{world:05d}.safetensors"
    # A single key: safetensors writes several in random order, and equal trainings must give equal
    # bytes.
    save_file(parts, file, {_PLACES: json.dumps(offsets, sort_keys=True)})
    return file


def flaw(tensor: Tensor, kind: str) -> str | None:
    """Why a tensor in a checkpoint file of this kind is unusable, as text; None where it is
    usable."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = tensor.aminmax()
    largest = max(-low.item(), high.item()) if low == low else math.nan
    if not math.isfinite(largest):
        return "is not finite"
    # Norms and attention scores square the activations: above this limit they overflow for any
    # input.
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    if kind != "optimizer" and largest > torch.finfo(wide).max ** 0.5:
        return f"has numbers of {largest:.0e}, whose squares are not finite"
    return None


def flaw_of_file(file: Path) -> str | None:
    """Why a safetensors file of a checkpoint is unusable, as text: a header that does not match the
    file, or the `flaw` of a tensor; None where it is usable."""
    kind = whole_name(file.name).removesuffix(file.suffix)
    try:
        with safe_open(file, framework="pt") as stored:
            places = json.loads((stored.metadata() or {}).get(_PLACES, "null"))
            for name in stored.keys():  # noqa: SIM118  (not a mapping)
                tensor = stored.get_tensor(name)
                if (wrong := flaw(tensor, kind)) is not None:
                    return f"{name} {wrong}"
                if places is not None:
                    begins = places[name]["saved_offsets"]
                    is_valid = all(type(begin) is int and begin >= 0 for begin in begins)
                    if not is_valid or len(begins) != tensor.ndim:
                        return f"{_PLACES} is not that of {name}"
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        return f"not readable as safetensors ({error})"
    return None


class _Files(FileSystem):
    """Files of some kinds only: weights and their EMA have the same tensor names."""

    def __init__(self, kinds: Collection[str]):
        super().__init__()
        self._kinds = kinds

    def ls(self, path: str | os.PathLike) -> list[str]:
        return [file for file in super().ls(path) if whole_name(Path(file).name) in self._kinds]


def _reader(folder: Path, kinds: Collection[str]) -> HuggingFaceStorageReader:
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _Files(kinds)
    return reader


def shapes_in(folder: Path, kinds: Collection[str]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape (unsharded) and dtype of every tensor in a folder's files of these kinds."""
    metadata = _reader(folder, kinds).read_metadata().state_dict_metadata
    return {
        name: (about.size, about.properties.dtype)
        for name, about in metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }


def read_into(
    folder: Path,
    tensors: Mapping[str, Tensor],
    kinds: Collection[str],
) -> None:
    """Fill each tensor, sharded or not, with the one of the same name in a folder's files of these
    kinds.

    Every process reads independently, and only what it needs.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        try:
            load(
                dict(tensors),
                storage_reader=_reader(folder, kinds),
                no_dist=True,
            )
        except CheckpointException as error:  # not an Exception, which error barriers handle
            failures = "; ".join(str(failure) for failure, _ in error.failures.values())
            raise TrainingError(f"{folder} cannot be read: {failures}") from error


def read_like(
    folder: Path,
    names: Iterable[str],
    like: Mapping[str, Tensor],
    kinds: Collection[str],
) -> dict[str, Tensor]:
    """Read the named tensors of a folder: sharded and shaped as `like[name]` where present, else
    whole."""
    shapes = shapes_in(folder, kinds)
    tensors: dict[str, Tensor] = {}
    for name in names:
        shape, dtype = shapes[name]
        model = like.get(name)
        if isinstance(model, DTensor) and model.shape == shape:
            tensors[name] = torch.zeros_like(
                model,
                dtype=dtype,
                requires_grad=False,
            )
        else:
            tensors[name] = torch.zeros(shape, dtype=dtype)
    read_into(folder, tensors, kinds)
    return tensors
