"""Tensors on the disk, and the weights of a model by name.

Files are safetensors: one of each kind (model.safetensors), or one per process of a sharded model
(model-00001-of-00002.safetensors), whose header stores the offset of each shard in the format of
torch.distributed.checkpoint. Any number of processes reads them. No pickle is written or read.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from errors import TrainingError
from run_directory.process_group import ProcessGroup

_OFFSETS = "DCP_SHARDING_INFO"  # header key of the offsets of the shards, as JSON
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, whose class takes a second to import."""
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, or all of an unsharded one, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[operator]


def own_row(tensor: Tensor) -> int:
    """The first row of this process's shard in the whole tensor. FSDP2 shards the first dimension,
    in parts of equal size; the last ones may be smaller or empty."""
    if not is_sharded(tensor):
        return 0
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    rows = -(-len(tensor) // mesh.size())
    return min(mesh.get_local_rank() * rows, len(tensor))


def whole_name(name: str) -> str:
    """`model.safetensors` for `model-00001-of-00002.safetensors`; other names unchanged."""
    return _PART.sub("", name)


def write_tensors(
    folder: Path, kind: str, tensors: Mapping[str, Tensor], group: ProcessGroup
) -> Path | None:
    """Write this process's file of a `kind`: its shard of every sharded tensor and, on rank 0, all
    other tensors. If none is sharded, only rank 0 writes a file."""
    parts = {}
    offsets = {}
    is_split = any(map(is_sharded, tensors.values()))
    if not is_split and group.rank > 0:
        return None
    for name, tensor in tensors.items():
        own = own_part(tensor).detach()
        if own.numel() if is_sharded(tensor) else group.rank == 0:
            parts[name] = own.cpu().contiguous()
            offset = [own_row(tensor), *[0] * tensor.ndim][: tensor.ndim]
            offsets[name] = {"saved_offsets": offset}
    file = folder / f"{kind}.safetensors"
    header = None
    if is_split:
        file = folder / f"{kind}-{group.rank + 1:05d}-of-{group.world:05d}.safetensors"
        # A single key: safetensors writes several in random order, and equal trainings must give
        # equal bytes.
        header = {_OFFSETS: json.dumps(offsets, sort_keys=True)}
    save_file(parts, file, header)
    return file


def flaw(tensor: Tensor, kind: str) -> str | None:
    """The reason why a tensor must not be saved in a checkpoint file of this kind, as text; None if
    it is usable."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = tensor.aminmax()  # NaN if any number is NaN
    largest = max(-low.item(), high.item())
    if not math.isfinite(largest):
        return "is not finite"
    # Norms and attention scores square the activations: above this limit they overflow for any
    # input.
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    if kind != "optimizer" and largest > torch.finfo(wide).max ** 0.5:
        return f"has numbers of {largest:.0e}, whose squares are not finite"
    return None


def _pieces(folder: Path, kind: str) -> Iterator[tuple[str, Tensor, int]]:
    """The name, content (mapped from the file) and first row of every shard in a folder's files of
    a kind."""
    for file in sorted(folder.iterdir()):
        if whole_name(file.name) != f"{kind}.safetensors":
            continue
        with safe_open(file, framework="pt") as stored:
            offsets = json.loads((stored.metadata() or {}).get(_OFFSETS, "{}"))
            for name in stored.keys():  # noqa: SIM118  (not a mapping)
                offset = offsets[name]["saved_offsets"] if offsets else []
                yield name, stored.get_tensor(name), offset[0] if offset else 0


def shapes_in(folder: Path, kind: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape (unsharded) and dtype of every tensor in a folder's files of a kind."""
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, piece, row in _pieces(folder, kind):
        shape = piece.shape
        if shape:
            known = shapes[name][0][0] if name in shapes else 0
            shape = torch.Size([max(known, row + len(piece)), *shape[1:]])
        shapes[name] = shape, piece.dtype
    return shapes


@torch.no_grad()
def read_into(folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> None:
    """Fill each tensor, sharded or not, with the tensor of the same name in a folder's files of a
    kind. Every process reads independently, and only what it needs."""
    for name, piece, row in _pieces(folder, kind):
        if name not in tensors:
            continue
        own = own_part(tensors[name])
        if not piece.ndim:
            own.copy_(piece)
            continue
        first = own_row(tensors[name])
        begin = max(row, first)
        end = max(begin, min(row + len(piece), first + len(own)))
        own[begin - first : end - first].copy_(piece[begin - row : end - row])


def read_like(folder: Path, kind: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a kind, on the CPU. A tensor named `key/weight` is sharded like the weight in
    `like`, if that is sharded and has the same shape."""
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in shapes_in(folder, kind).items():
        model = like.get(name.partition("/")[2])
        if model is not None and is_sharded(model) and model.shape == shape:
            tensors[name] = torch.zeros_like(model, dtype=dtype, requires_grad=False)
        else:
            tensors[name] = torch.zeros(shape, dtype=dtype)
    read_into(folder, kind, tensors)
    return tensors


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of DDP (`module.`) and torch.compile
    (`_orig_mod.`)."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by clean name, in the model's order; tied ones once, under their first name."""
    return {clean_name(name): weight for name, weight in model.named_parameters()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All weights and persistent buffers by clean name; tied ones once."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {
        clean_name(name): tensor
        for name, tensor in model.state_dict().items()
        if name not in parameters
    }
    return {name: weight.detach() for name, weight in named_weights(model).items()} | buffers


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy the weights of a checkpoint into a model of the same shapes.

    Raises TrainingError naming weights that are missing, unknown or of another shape.
    """
    own = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
    stored = shapes_in(folder, "model")
    wrong = [f"{name} is missing" for name in weights_of(model) if name not in stored]
    for name, (shape, dtype) in stored.items():
        if name not in own:
            wrong.append(f"{name} is unknown to the model")
        elif shape != own[name].shape:
            wrong.append(f"{name} has shape {tuple(shape)}, in the model {tuple(own[name].shape)}")
        elif dtype.is_floating_point != own[name].is_floating_point():
            wrong.append(f"{name} is stored as {dtype}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise TrainingError(f"{folder} does not fit the settings: {'; '.join(wrong[:3])}{more}")
    read_into(folder, "model", own)
