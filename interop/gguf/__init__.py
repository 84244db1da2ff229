"""GGUF files, the format of llama.cpp."""

from interop.gguf.reading import read_gguf

__all__ = ["read_gguf"]
