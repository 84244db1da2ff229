"""A checkpoint of another codebase: a Hugging Face folder with config.json and safetensors, in one
file or in shards. Weights are read on demand."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from errors import InteropError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # the first existing file is used
DTYPES = ("F32", "F16", "BF16")  # dtypes that convert to float32 without loss


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read on demand.

    Attributes:
        file: the file that contains the tensor.
        shape: the shape in transformers: (out, in) for matrices.
        read: returns the tensor in float32, or in float64 if it is stored in float64; raises
            InteropError if it is damaged or cannot be converted.
    """

    file: Path
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """Configuration and weights of a Hugging Face folder.

    Attributes:
        name: name of the checkpoint in run names and model cards.
        config: the content of transformers' config.json.
        config_file: file of the configuration, for messages.
        tensors: every tensor, by its name in transformers
            (`model.layers.0.self_attn.q_proj.weight`). Rows of queries and keys have the order of
            transformers' Llama: pairs of rotated features in halves.
        tokenizer: path of tokenizer.json or tokenizer.model; None if the checkpoint has neither.
    """

    name: str
    config: dict[str, Any]
    config_file: str
    tensors: Mapping[str, StoredTensor]
    tokenizer: Path | None = None

    @property
    def files(self) -> list[Path]:
        """The files that contain the weights."""
        return sorted({tensor.file for tensor in self.tensors.values()})


def first_names(names: list[str]) -> str:
    """The first names of a list, for messages; foreign names may contain line breaks."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    first = [name if name.isprintable() else repr(name) for name in names[:3]]
    return f"{', '.join(first)}{more}"


def read_folder(folder: str | Path, name: str | None = None) -> ForeignCheckpoint:
    """Read a Hugging Face folder; weights are read on demand.

    Args:
        name: name of the checkpoint; None: the name of the folder.

    Raises:
        InteropError: no such folder, no config.json, weights only as a pickle, or missing or
            damaged shards.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InteropError(f"{folder} is not a folder; pass the folder that contains {CONFIG}")
    if not (folder / CONFIG).is_file():
        raise InteropError(f"{folder} contains no {CONFIG}; it is not a Hugging Face model folder")
    tokenizer = (folder / file for file in TOKENIZERS)
    return ForeignCheckpoint(
        name=name or folder.resolve().name,
        config=_json(folder / CONFIG),
        config_file=str(folder / CONFIG),
        tensors=_tensors(folder),
        tokenizer=next((file for file in tokenizer if file.is_file()), None),
    )


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if (folder / WEIGHTS).is_file():
        return _stored(folder / WEIGHTS)
    pickles = [path for end in ("bin", "pth", "pt") for path in sorted(folder.glob(f"*.{end}"))]
    if pickles:
        raise InteropError(
            f"{pickles[0]} is a pickle, which can run code and is never opened: convert it with "
            "transformers' save_pretrained, which writes safetensors"
        )
    raise InteropError(f"{folder} contains neither {WEIGHTS} nor {INDEX}")


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    index = _json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise InteropError(f"{folder / INDEX} has no weight_map")
    # An index is foreign input: it may name only files of this folder.
    present = {file.name: file for file in folder.glob("*.safetensors")}
    shards = sorted(set(map(str, index.values())))
    if missing := [name for name in shards if name not in present]:
        raise InteropError(
            f"{folder / INDEX} names {first_names(missing)}, which {folder} does not contain; "
            "download all shards"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in shards:
        tensors |= _stored(present[name])
    return tensors


def _stored(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file."""
    try:
        with safe_open(file, framework="pt") as tensors:
            stored = {}
            for name in tensors.keys():  # noqa: SIM118, not a dict
                shape = tuple(tensors.get_slice(name).get_shape())
                stored[name] = StoredTensor(file, shape, partial(_read, file, name))
            return stored
    except SafetensorError as error:
        raise InteropError(
            f"{file} is damaged or not a safetensors file ({error}); download it again"
        ) from error


def _read(file: Path, name: str) -> Tensor:
    """Read one tensor in float32. Tensors are read one at a time, so that a folder may be larger
    than half of the memory."""
    try:
        with safe_open(file, framework="pt") as tensors:
            dtype = tensors.get_slice(name).get_dtype()
            if dtype not in DTYPES:
                raise InteropError(
                    f"{file}: {name} is stored as {dtype}; only {', '.join(DTYPES)} can be imported"
                )
            return tensors.get_tensor(name).float()
    except SafetensorError as error:
        raise InteropError(f"{file}: {name} cannot be read ({error}); download it again") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InteropError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InteropError(f"{file} must contain a JSON object")
    return value
