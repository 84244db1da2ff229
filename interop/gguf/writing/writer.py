"""Export of a model and its tokenizer to a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data import Tokenizer
from data.files import sync
from errors import InteropError
from interop.extras import load_extra
from interop.gguf.writing.plan import Plan, make_plan
from interop.gguf.writing.vocabulary import tokenizer_metadata
from interop.gguf.writing.weights import tensors
from model import Transformer

StorageType = Literal["F32", "F16", "BF16", "Q8_0"]
FLOAT32 = "F32"  # of vectors, which llama.cpp does not quantize


def write_gguf(
    model: Transformer,
    tokenizer: Tokenizer,
    path: Path,
    dtype: StorageType = "F32",
    about: dict[str, str] | None = None,
    *,
    add_bos: bool | None = None,
) -> Plan:
    """Write a GGUF file that llama.cpp loads.

    Args:
        path: the file, which must not exist yet. It appears only when it is complete.
        dtype: type of matrices. Vectors are float32; a matrix whose rows are not a multiple of 32 numbers,
            the block of Q8_0, is stored in F16 instead.
        about: `general.*` keys: name, description, source.url and others.
        add_bos: whether documents begin with BOS; None: as the tokenizer does.

    Raises:
        InteropError: llama.cpp has no architecture or tokenizer that computes the same, the file exists, or
            it cannot be written.
    """
    plan = make_plan(model)
    vocabulary = tokenizer_metadata(tokenizer, model.vocab_size)
    if add_bos is not None:
        vocabulary["add_bos_token"] = add_bos
    gguf = load_extra("gguf")
    check_path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(draft, plan.architecture)
    for key, value in (about or {}).items():
        _add(writer, f"general.{key}", value)
    _add(writer, "general.file_type", int(gguf.LlamaFileType[_FILE_TYPES[dtype]]))
    _add(writer, "general.quantization_version", int(gguf.GGML_QUANT_VERSION))
    for key, value in plan.metadata.items():
        _add(writer, f"{plan.architecture}.{key}", value)
    for key, value in vocabulary.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    for name, tensor in tensors(model, plan).items():
        values = np.ascontiguousarray(tensor.numpy())
        kind = gguf.GGMLQuantizationType[_kind(dtype, values)]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        sync(draft)
        os.replace(draft, path)
    except OSError as error:
        raise InteropError(f"{path} cannot be written: {error}") from error
    finally:
        writer.close()
        draft.unlink(missing_ok=True)
    return plan


def check_path(path: Path) -> None:
    """Raise InteropError if a file cannot be created there."""
    if path.exists():
        raise InteropError(f"{path} already exists; choose another name or move it")
    if not path.absolute().parent.is_dir():
        raise InteropError(f"{path}: its folder does not exist; create it first")


_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}


def _kind(dtype: str, values: np.ndarray) -> str:
    if values.ndim < 2:
        return FLOAT32
    return "F16" if dtype == "Q8_0" and values.shape[-1] % 32 else dtype


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
