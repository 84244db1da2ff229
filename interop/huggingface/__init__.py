"""Hugging Face folders: configurations, weight names and files."""

from interop.huggingface.folder import read_folder

__all__ = ["read_folder"]
