"""Attention: masks, kernels, and the token mixers (softmax and linear attention)."""
