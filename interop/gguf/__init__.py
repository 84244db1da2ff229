"""GGUF files, the format of llama.cpp, in and out."""

from interop.gguf.reading.checkpoint import read_gguf
from interop.gguf.writing.writer import write_gguf

__all__ = ["read_gguf", "write_gguf"]
