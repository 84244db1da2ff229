"""Attention over the visible pairs of queries and keys: masks and kernels."""
