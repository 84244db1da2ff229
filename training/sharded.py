"""Tensors of which every process holds a part, on the disk: a file from each, read by any number of them.

Files are safetensors, with the place of each part in the header as torch.distributed.checkpoint notes it
there; its own reader puts the parts together again, also from a whole file. No pickle is written or read.
"""

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")


class Group(Protocol):
    """The processes that hold the parts."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def gather(self, value: Any) -> list[Any]: ...


class Alone:
    """One process that holds everything."""

    rank, world = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


ALONE = Alone()


def whole_name(name: str) -> str:
    """`model.safetensors` of `model-00001-of-00002.safetensors`; other names as they are."""
    return _PART.sub("", name)


def is_sharded(names: Iterable[str]) -> bool:
    """Whether these files of a checkpoint are those of several processes."""
    return any(_PART.search(name) for name in names)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def write_part(folder: Path, kind: str, tensors: Mapping[str, Tensor], rank: int, world: int) -> Path:
    """This process's file of the `kind`: its part of every sharded tensor, on rank 0 also all others."""
    parts, offsets = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            part = tensor.to_local()
        elif rank == 0:
            part, offset = tensor, (0,) * tensor.ndim
        else:
            continue
        if part.numel():
            parts[name], offsets[name] = part.detach().cpu().contiguous(), {"saved_offsets": list(offset)}
    file = folder / f"{kind}-{rank + 1:05d}-of-{world:05d}.safetensors"
    save_file(parts, file, {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)})
    return file


class _Files(FileSystem):
    """Files of weights and moments; means of weights, which have their names, are read by themselves."""

    def ls(self, path: str | os.PathLike) -> list[str]:
        kinds = ("model.safetensors", "optimizer.safetensors")
        return [file for file in super().ls(path) if whole_name(Path(file).name) in kinds]


def _reader(folder: Path) -> HuggingFaceStorageReader:
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _Files()
    return reader


def shapes_in(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Whole shape and dtype of every tensor in a folder's safetensors files."""
    found = _reader(folder).read_metadata().state_dict_metadata
    return {
        name: (about.size, about.properties.dtype)
        for name, about in found.items()
        if isinstance(about, TensorStorageMetadata)
    }


def is_weight(name: str) -> bool:
    """Whether a tensor of a checkpoint is a weight; moments are named `key/weight`."""
    return "/" not in name


def read_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill each tensor, whole or sharded, with what a folder's files hold under its name.

    Every process reads by itself, and only what it needs.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        load(dict(tensors), storage_reader=_reader(folder), no_dist=True)


def read_like(folder: Path, names: Iterable[str], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The named tensors of a folder: sharded as `like[name]` where that is, and of its shape; else whole."""
    shapes = shapes_in(folder)
    found: dict[str, Tensor] = {}
    for name in names:
        shape, dtype = shapes[name]
        model = like.get(name)
        if isinstance(model, DTensor) and model.shape == shape:
            found[name] = torch.zeros_like(model, dtype=dtype, requires_grad=False)
        else:
            found[name] = torch.zeros(shape, dtype=dtype)
    read_into(folder, found)
    return found
