"""Hugging Face folders: configurations, weight names and files."""
