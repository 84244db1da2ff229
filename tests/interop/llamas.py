"""Small Llamas made by transformers, an independent implementation, with no two sizes equal."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,  # not hidden_size / heads
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**changes) -> LlamaForCausalLM:
    """Weights large enough for attention and norms to matter, and norms that are not all ones."""
    model = LlamaForCausalLM(LlamaConfig(**(SMALL | changes))).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * drawn if weight.ndim == 1 else 2 * drawn * weight.shape[1] ** -0.5)
    return model
