"""Attention: masks, kernels, the softmax mixer, and windows shared by several processes."""
