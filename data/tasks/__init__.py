"""Synthetic tasks. Each item has one correct answer and is a function of a seed and an index."""
