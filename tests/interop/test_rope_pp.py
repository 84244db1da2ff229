"""RoPE++ models in the released format: a `llama` configuration with `rope_config`.

The reference was written for this test after reading modeling_llama_rope_pp.py of OpenMOSS/rope_pp;
it shares no code with it or with our model.
"""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from errors import InteropError
from interop.build import build_model
from interop.checkpoint import read_folder
from tests.model.zoo import close

WIDTH, HEADS, GROUPS, DIM, HIDDEN, VOCAB, LAYERS, THETA = 24, 4, 2, 6, 40, 29, 2, 500.0
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": DIM,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
}
# projected queries, key/value heads and heads of outputs
SIZES = {"imag1": (HEADS // 2, GROUPS // 2, HEADS), "imag2": (HEADS, GROUPS, 2 * HEADS)}


def folder_of(path, mode: str, **rope_config) -> dict[str, Tensor]:
    queries, groups, heads = SIZES[mode]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
    }
    for i in range(LAYERS):
        layer = {
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (queries * DIM, WIDTH),
            "self_attn.k_proj": (groups * DIM, WIDTH),
            "self_attn.v_proj": (groups * DIM, WIDTH),
            "self_attn.o_proj": (WIDTH, heads * DIM),
            "mlp.gate_proj": (HIDDEN, WIDTH),
            "mlp.up_proj": (HIDDEN, WIDTH),
            "mlp.down_proj": (WIDTH, HIDDEN),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        scale = 1.0 if "embed" in name else 1.4 * shape[-1] ** -0.5
        tensors[name] = 1 + 0.3 * drawn if len(shape) == 1 else scale * drawn
    path.mkdir()
    given = {"imag": True, "imag_mode": mode, **rope_config}
    (path / "config.json").write_text(json.dumps(CONFIG | {"rope_config": given}))
    save_file(tensors, path / "model.safetensors")
    return {name: tensor.double() for name, tensor in tensors.items()}


def logits_of(tensors: dict[str, Tensor], mode: str, tokens: Tensor) -> Tensor:
    """(t, V) logits; heads 2h and 2h + 1 are real and imaginary parts of complex products."""
    _, groups, heads = SIZES[mode]

    def normed(x: Tensor, name: str) -> Tensor:
        return tensors[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    x = tensors["model.embed_tokens.weight"][tokens]
    position = torch.arange(len(tokens)).double()
    angle = (position[:, None] - position)[..., None] * THETA ** -(
        torch.arange(DIM // 2).double() * 2 / DIM
    )
    turn = torch.polar(torch.ones_like(angle), angle)
    for i in range(LAYERS):
        own = f"model.layers.{i}."
        y = normed(x, own + "input_layernorm")
        q, k, v = (
            (y @ tensors[f"{own}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM))
            for name in "qkv"
        )
        q, k = (torch.complex(*part.chunk(2, -1)) for part in (q, k))
        k = k.repeat_interleave(q.shape[1] // groups, 1)
        v = v.repeat_interleave(heads // groups, 1)
        products = torch.einsum("nhc,mhc,nmc->hnm", q, k.conj(), turn)
        logits = torch.stack([products.real, products.imag], 1).flatten(0, 1) / math.sqrt(DIM)
        hidden = torch.ones(logits.shape[1:]).triu(1).bool()
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        mixed = torch.einsum("hnm,mhc->nhc", weights, v).flatten(1)
        x = x + mixed @ tensors[own + "self_attn.o_proj.weight"].T
        y = normed(x, own + "post_attention_layernorm")
        gate, up = (y @ tensors[f"{own}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ tensors[own + "mlp.down_proj.weight"].T
    return normed(x, "model.norm") @ tensors["lm_head.weight"].T


@pytest.mark.parametrize("mode", SIZES)
@torch.no_grad()
def test_released_format(mode, tmp_path):
    tensors = folder_of(tmp_path / "first", mode)
    model = build_model(read_folder(tmp_path / "first")).model.double()
    tokens = torch.randint(0, VOCAB, (17,), generator=torch.Generator().manual_seed(1))
    expected = logits_of(tensors, mode, tokens)
    assert expected.std() > 0.3
    close(model(tokens[None])[0], expected, atol=1e-10)
    cache = model.make_cache(1, 17)
    parts = [model(part[None], cache=cache)[0] for part in tokens.split([6, *[1] * 11])]
    close(torch.cat(parts), expected, atol=1e-10)


def test_scaled_models_are_refused(tmp_path):
    folder_of(tmp_path / "first", "imag2", yarn=True, factor=32)
    with pytest.raises(InteropError, match="rope_config"):
        build_model(read_folder(tmp_path / "first"))
