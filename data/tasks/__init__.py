"""Synthetic tasks: items with one right answer, made from a seed and an index alone."""
