"""A Hugging Face folder of a plain Llama: config.json and safetensors, in one file or in shards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from errors import InteropError
from interop.config import ImportedShape, read_config
from interop.weights import DERIVED, shapes, theirs
from model import Transformer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")  # each becomes float32 without loss


@dataclass(frozen=True)
class ImportedModel:
    """A model read from elsewhere, with float32 weights."""

    model: Transformer
    shape: ImportedShape
    files: list[Path]  # what the weights were read from


def read_folder(folder: str | Path) -> ImportedModel:
    """Read a Hugging Face folder.

    Raises:
        InteropError: no such folder, weights only as a pickle, a config we would compute otherwise, or
            tensors that are missing, left over, damaged, or of another shape or type.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InteropError(f"{folder} is not a folder; pass the folder that contains {CONFIG}")
    if not (folder / CONFIG).is_file():
        raise InteropError(f"{folder} contains no {CONFIG}; it is not a Hugging Face model folder")
    shape = read_config(_json(folder / CONFIG), str(folder / CONFIG))
    where = _locate(folder)  # their name -> file
    names = theirs(shape.model)
    wanted = set(names.values())
    if missing := sorted(wanted - where.keys()):
        raise InteropError(f"{folder} lacks {_some(missing)}, which {CONFIG} calls for{_untied(missing)}")
    left = sorted(name for name in where.keys() - wanted if not DERIVED.fullmatch(name))
    tied_copy = shape.model.tie_embeddings and left == ["lm_head.weight"]
    if left and not tied_copy:
        raise InteropError(
            f"{folder} contains {_some(left)}, which a plain Llama of this {CONFIG} does not have"
        )
    model = Transformer(shape.model, shape.vocab_size, shape.train_length, shape.original_length)
    own, expected = model.state_dict(), shapes(shape.model, shape.vocab_size)
    for ours, their in names.items():
        own[ours].copy_(_tensor(where[their], their, expected[ours]))
    if tied_copy:
        head = _tensor(where["lm_head.weight"], "lm_head.weight", expected["embed.weight"])
        if not torch.equal(head, own["embed.weight"]):
            raise InteropError(
                f"{folder}: lm_head.weight differs from the embedding although {CONFIG} says "
                "tie_word_embeddings = true; one of them is wrong"
            )
    return ImportedModel(model.eval(), shape, sorted(set(where.values())))


def _locate(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by Hugging Face's names."""
    if (folder / INDEX).is_file():
        index = _json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise InteropError(f"{folder / INDEX} has no weight_map")
        where = {}
        for name, file in index.items():
            # An index is foreign input: it may not lead out of its folder.
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise InteropError(
                    f"{folder / INDEX}: {name} lies in {file!r}, not in a shard of this folder"
                )
            where[name] = folder / file
        for file in sorted(set(where.values())):
            if not file.is_file():
                raise InteropError(f"{file} is missing: {INDEX} names it; fetch all shards")
        for file in sorted(set(where.values())):
            held, listed = set(_names(file)), {name for name, at in where.items() if at == file}
            if held != listed:
                raise InteropError(f"{file} and {INDEX} disagree about {_some(sorted(held ^ listed))}")
        return where
    if (folder / WEIGHTS).is_file():
        return dict.fromkeys(_names(folder / WEIGHTS), folder / WEIGHTS)
    pickles = [path for end in ("bin", "pth", "pt") for path in sorted(folder.glob(f"*.{end}"))]
    if pickles:
        raise InteropError(
            f"{pickles[0]} is a pickle, which can run code and is never opened: convert it with "
            "transformers' save_pretrained, which writes safetensors"
        )
    raise InteropError(f"{folder} contains neither {WEIGHTS} nor {INDEX}")


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except SafetensorError as error:
        raise InteropError(
            f"{file} is damaged or not a safetensors file ({error}); fetch it again"
        ) from error


def _tensor(file: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """One tensor in float32; one at a time, so that a folder larger than memory's half can be read."""
    try:
        with safe_open(file, framework="pt") as tensors:
            about = tensors.get_slice(name)
            found, dtype = tuple(about.get_shape()), about.get_dtype()
            if found != shape:
                raise InteropError(f"{file}: {name} has shape {found}, {CONFIG} calls for {shape}")
            if dtype not in DTYPES:
                raise InteropError(
                    f"{file}: {name} is stored as {dtype}; only {', '.join(DTYPES)} can be imported"
                )
            return tensors.get_tensor(name).float()
    except SafetensorError as error:
        raise InteropError(f"{file}: {name} cannot be read ({error}); fetch it again") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InteropError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InteropError(f"{file} must hold a JSON object")
    return value


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _untied(missing: list[str]) -> str:
    return (
        ": if its head is the embedding, set tie_word_embeddings = true"
        if missing == ["lm_head.weight"]
        else ""
    )
