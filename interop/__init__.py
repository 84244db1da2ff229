"""Other people's checkpoints. No pickle is read and no code of a folder is run."""

from errors import InteropError
from interop.huggingface import ImportedModel, read_folder

__all__ = ["ImportedModel", "InteropError", "read_folder"]
