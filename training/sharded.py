"""Tensors of which every process holds a part, on the disk: a file from each, read by any number of them.

Files are safetensors, with the place of each part in the header as torch.distributed.checkpoint notes it
there; its own reader puts the parts together again, also from a whole file. No pickle is written or read.
"""

import json
import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_OF_TRAINING = ("model.safetensors", "optimizer.safetensors")  # no name is in both
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")


class Part(NamedTuple):
    """What this process holds of a sharded tensor, on the host, and where that begins in the whole."""

    tensor: Tensor
    offset: tuple[int, ...]


def at_rest(tensor: Tensor, copied: bool = False) -> Tensor:
    """A tensor on the CPU; a sharded one where it is. If `copied`, what becomes of a tensor does not change
    what is given of one that is not sharded."""
    return tensor.detach() if isinstance(tensor, DTensor) else _on_host(tensor, copied)


def _on_host(tensor: Tensor, copied: bool) -> Tensor:
    """A tensor on the CPU. One that comes from a device is a copy as it comes, and is not copied again."""
    own = tensor.detach()
    return (own.clone() if copied and own.device.type == "cpu" else own.cpu()).contiguous()


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, all of one that is not sharded: the same memory, no copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: DTensor, copied: bool) -> Part:
    """This process's part; if `copied`, what becomes of the tensor does not change it."""
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(_on_host(tensor.to_local(), copied), tuple(offset))


def whole_name(name: str) -> str:
    """`model.safetensors` of `model-00001-of-00002.safetensors`; other names as they are."""
    return _PART.sub("", name)


def is_sharded(names: Iterable[str]) -> bool:
    """Whether these files of a checkpoint are those of several processes."""
    return any(_PART.search(name) for name in names)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def wholes(held: Mapping[str, Tensor | Part]) -> dict[str, Tensor]:
    """The tensors of a process that shares them with no other."""
    return {name: own if isinstance(own, Tensor) else own.tensor for name, own in held.items()}


def write_part(folder: Path, kind: str, held: Mapping[str, Tensor | Part], rank: int, world: int) -> Path:
    """This process's file of the `kind`: its part of every sharded tensor, on rank 0 also all others."""
    parts, offsets = {}, {}
    for name, own in held.items():
        if isinstance(own, Tensor):
            if rank > 0:
                continue
            own = Part(own, (0,) * own.ndim)
        if own.tensor.numel():
            parts[name], offsets[name] = own.tensor, {"saved_offsets": list(own.offset)}
    file = folder / f"{kind}-{rank + 1:05d}-of-{world:05d}.safetensors"
    # One key alone: safetensors writes several in an order of chance, and equal trainings give equal bytes.
    save_file(parts, file, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    return file


class _Files(FileSystem):
    """Those of some kinds: weights and their means have the same names inside."""

    def __init__(self, kinds: Collection[str]):
        super().__init__()
        self._kinds = kinds

    def ls(self, path: str | os.PathLike) -> list[str]:
        return [file for file in super().ls(path) if whole_name(Path(file).name) in self._kinds]


def _reader(folder: Path, kinds: Collection[str]) -> HuggingFaceStorageReader:
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _Files(kinds)
    return reader


def shapes_in(
    folder: Path, kinds: Collection[str] = _OF_TRAINING
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Whole shape and dtype of every tensor in a folder's files of these kinds."""
    found = _reader(folder, kinds).read_metadata().state_dict_metadata
    return {
        name: (about.size, about.properties.dtype)
        for name, about in found.items()
        if isinstance(about, TensorStorageMetadata)
    }


def is_weight(name: str) -> bool:
    """Whether a tensor of a checkpoint is a weight; moments are named `key/weight`."""
    return "/" not in name


def read_into(folder: Path, tensors: Mapping[str, Tensor], kinds: Collection[str] = _OF_TRAINING) -> None:
    """Fill each tensor, whole or sharded, with what a folder's files of these kinds hold under its name.

    Every process reads by itself, and only what it needs.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        load(dict(tensors), storage_reader=_reader(folder, kinds), no_dist=True)


def read_like(
    folder: Path,
    names: Iterable[str],
    like: Mapping[str, Tensor],
    kinds: Collection[str] = _OF_TRAINING,
) -> dict[str, Tensor]:
    """The named tensors of a folder: sharded as `like[name]` where that is, and of its shape; else whole."""
    shapes = shapes_in(folder, kinds)
    found: dict[str, Tensor] = {}
    for name in names:
        shape, dtype = shapes[name]
        model = like.get(name)
        if isinstance(model, DTensor) and model.shape == shape:
            found[name] = torch.zeros_like(model, dtype=dtype, requires_grad=False)
        else:
            found[name] = torch.zeros(shape, dtype=dtype)
    read_into(folder, found, kinds)
    return found
