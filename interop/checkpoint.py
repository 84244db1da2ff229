"""A checkpoint of another codebase, read on demand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read on demand.

    Attributes:
        file: the file that contains it.
        shape: its shape, as transformers has it: (out, in) for matrices.
        read: returns it in float32, or float64 if it is stored in float64; raises InteropError if
            it is damaged or cannot be converted.
    """

    file: Path
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """Configuration and weights of a Hugging Face folder.

    Attributes:
        name: what to call the checkpoint in run names and model cards.
        config: the content of transformers' config.json.
        config_file: where the configuration comes from, for messages.
        tensors: every tensor, by its name in transformers
            (`model.layers.0.self_attn.q_proj.weight`). Rows of queries and keys have the order of
            transformers' Llama: pairs of rotated features in halves.
        tokenizer: tokenizer.json or tokenizer.model, or None if the checkpoint has neither.
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
