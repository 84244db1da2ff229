"""A Llama of transformers whose arithmetic has the dtype of its weights."""

import torch
from torch import nn


class ExactAngles(nn.Module):
    """Rotary tables in float64, from the formula; transformers computes angles in float32."""

    def __init__(self, dims: int, theta: float):
        super().__init__()
        self.frequencies = theta ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)

    def forward(self, x, position_ids, **_):
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


class ExactNorm(nn.Module):
    """RMSNorm in the dtype of its input; transformers' computes in float32."""

    def __init__(self, weight, eps: float):
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x):
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt())


def with_exact_arithmetic(llama):
    """Replace the rotary tables and norms of a LlamaForCausalLM of plain RoPE; returns it."""
    config = llama.config
    llama.model.rotary_emb = ExactAngles(config.head_dim, config.rope_parameters["rope_theta"])
    for block in llama.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(block, name, ExactNorm(getattr(block, name).weight, config.rms_norm_eps))
    llama.model.norm = ExactNorm(llama.model.norm.weight, config.rms_norm_eps)
    return llama
