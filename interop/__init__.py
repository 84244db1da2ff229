"""Checkpoints of other codebases. No pickle is read and no code of a checkpoint is run."""

from errors import InteropError
from interop.build import ImportedModel, build_model
from interop.checkpoint import ForeignCheckpoint, StoredTensor
from interop.huggingface import read_folder

__all__ = [
    "ForeignCheckpoint",
    "ImportedModel",
    "InteropError",
    "StoredTensor",
    "build_model",
    "read_folder",
]
