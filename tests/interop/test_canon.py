"""Canon models in the released format, against a second implementation.

`PublishedModel` was written for this test after reading modeling_llama_canon.py and canon_helper.py
of facebookresearch/PhysicsLM4 (huggingface/); it shares no code with them or with our model. The
released files themselves require an older transformers.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from errors import InteropError
from interop.build import build_model
from interop.checkpoint import read_folder
from interop.export.export_folder import write_model
from interop.export.native import choose_class
from model import TokenPositions
from tests.interop.export.exported import CONTROLS
from tests.model.zoo import close

WIDTH, HEADS, GROUPS, DIM, HIDDEN, VOCAB, LAYERS = 24, 4, 2, 6, 40, 29, 2
LENGTH = 17
CONFIG = {
    "model_type": "LlamaCanon",
    "architectures": ["LlamaCanonForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": DIM,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "canon_set": "ABCD",
    "canon_kernel": 4,
    "canon_bias": False,
    "canon_activation": False,
    "canon_residual": True,
    "qk_norm": True,
    "rope_dim": None,
    "rope_version": "huggingface",
}
VARIANTS = {
    "released": {"rope_dim": 4, "partial_rotary_factor": 4 / 6, "rope_version": "lingua"},
    "huggingface": {},
    "partial": {"rope_dim": 2, "canon_kernel": 3, "qk_norm": False},
    "A and C": {"canon_set": "AC", "rope_version": "lingua", "attention_bias": True},
    "B": {"canon_set": "B", "mlp_bias": True},
    "D": {"canon_set": "D", "qk_norm": False, "tie_word_embeddings": True},
}


def shapes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of the released class."""
    q, kv = HEADS * DIM, GROUPS * DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    for i in range(LAYERS):
        layer = {
            "input_layernorm.weight": (WIDTH,),
            "post_attention_layernorm.weight": (WIDTH,),
            "self_attn.q_proj.weight": (q, WIDTH),
            "self_attn.k_proj.weight": (kv, WIDTH),
            "self_attn.v_proj.weight": (kv, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, q),
            "mlp.gate_proj.weight": (HIDDEN, WIDTH),
            "mlp.up_proj.weight": (HIDDEN, WIDTH),
            "mlp.down_proj.weight": (WIDTH, HIDDEN),
        }
        if config["qk_norm"]:
            layer |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
        biased = ["mlp"] if config.get("mlp_bias") else []
        biased += ["self_attn"] if config.get("attention_bias") else []
        for name in [name for name in layer if name.split("_")[0].split(".")[0] in biased]:
            layer[name.replace("weight", "bias")] = layer[name][:1]
        if config.get("attention_bias"):
            for name, size in (("q", q), ("k", kv), ("v", kv), ("o", WIDTH)):
                layer[f"self_attn.{name}_proj.bias"] = (size,)
            layer = {k: v for k, v in layer.items() if "_norm.bias" not in k}
        sizes = {"A": WIDTH, "C": WIDTH, "self_attn.B": q + 2 * kv, "mlp.D": 2 * HIDDEN}
        for place, size in sizes.items():
            if place[-1] in config["canon_set"]:
                name = f"{place[:-1]}canon{place[-1]}.weight"
                layer[name] = (size, 1, config["canon_kernel"])
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def weights_of(config: dict) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for name, shape in shapes_of(config).items():
        drawn = torch.randn(shape, generator=generator)
        scale = 1.0 if len(shape) == 1 or "embed" in name else 1.4 * math.prod(shape[1:]) ** -0.5
        tensors[name] = 1 + 0.3 * drawn if "norm" in name else scale * drawn
    return tensors


class PublishedModel:
    """The released class on one sequence, in float64."""

    def __init__(self, config: dict, tensors: dict[str, Tensor]):
        self.config = config
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def __call__(self, tokens: Tensor) -> Tensor:
        """(t, V) logits of the tokens (t,)."""
        get = self.tensors.get
        x = get("model.embed_tokens.weight")[tokens]
        for i in range(LAYERS):
            own = f"model.layers.{i}."
            mixed = self.canon(own + "canonA", self.norm(own + "input_layernorm", x))
            x = x + self.attention(own + "self_attn.", mixed)
            normed = self.norm(own + "post_attention_layernorm", x)
            normed = self.canon(own + "canonC", normed)
            gate, up = (self.linear(f"{own}mlp.{name}_proj", normed) for name in ("gate", "up"))
            gate, up = self.canon(own + "mlp.canonD", torch.cat([gate, up], -1)).chunk(2, -1)
            x = x + self.linear(own + "mlp.down_proj", gate * gate.sigmoid() * up)
        head = get("lm_head.weight", get("model.embed_tokens.weight"))
        return self.norm("model.norm", x) @ head.T

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors.get(f"{name}.weight")
        if weight is None:
            return x
        size = x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return weight * x / size.sqrt()

    def canon(self, name: str, x: Tensor) -> Tensor:
        """A depthwise Conv1d over the sequence with zeros before it, and the residual."""
        weight = self.tensors.get(f"{name}.weight")
        if weight is None:
            return x
        padded = F.pad(x.T[None], (weight.shape[2] - 1, 0))
        return x + F.conv1d(padded, weight, groups=len(weight))[0].T

    def attention(self, own: str, x: Tensor) -> Tensor:
        q, k, v = (self.linear(f"{own}{name}_proj", x) for name in "qkv")
        whole = torch.cat([self.norm(own + "q_norm", q), self.norm(own + "k_norm", k), v], -1)
        sizes = [HEADS * DIM, GROUPS * DIM, GROUPS * DIM]
        q, k, v = self.canon(own + "canonB", whole).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(0, 1) for part in (q, k, v))
        q, k = self.rotated(q), self.rotated(k)
        k, v = (part.repeat_interleave(HEADS // GROUPS, 0) for part in (k, v))
        logits = q @ k.mT / math.sqrt(DIM)
        hidden = torch.ones(logits.shape[1:]).triu(1).bool()
        mixed = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return self.linear(own + "o_proj", mixed.transpose(0, 1).flatten(1))

    def rotated(self, x: Tensor) -> Tensor:
        count = self.config["rope_dim"] or DIM
        turned, rest = x[..., :count], x[..., count:]
        exponents = torch.arange(count // 2).double() * 2 / count
        angle = torch.arange(x.shape[1])[:, None] * self.config["rope_theta"] ** -exponents
        if self.config["rope_version"] == "lingua":
            pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
        else:
            pairs = torch.complex(*turned.chunk(2, -1))
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        parts = [pairs.real, pairs.imag]
        if self.config["rope_version"] == "lingua":
            return torch.cat([torch.stack(parts, -1).flatten(-2), rest], -1)
        return torch.cat([*parts, rest], -1)


def folder_of(path, config: dict) -> dict[str, Tensor]:
    path.mkdir()
    tensors = weights_of(config)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return tensors


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_released_format(name, tmp_path):
    """Logits whole, left-padded and token by token; the folder that is written is the one read."""
    config = CONFIG | VARIANTS[name]
    published = PublishedModel(config, folder_of(tmp_path / "first", config))
    first = build_model(read_folder(tmp_path / "first"))
    model = first.model.double()
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([published(row) for row in tokens])
    assert expected.std() > 0.3
    close(model(tokens), expected, atol=1e-10)
    padded = model(tokens, TokenPositions.left_padded([LENGTH, 9], LENGTH))
    close(padded[1, -9:], published(tokens[1, -9:]), atol=1e-10)
    cache = model.make_cache(2, LENGTH)
    parts = [model(part, cache=cache) for part in tokens.split([6, *[1] * (LENGTH - 6)], dim=1)]
    close(torch.cat(parts, dim=1), expected, atol=1e-10)

    assert choose_class(first.model).model_type is None  # transformers does not have it
    model.float()
    choice = choose_class(model, published=True)
    assert choice.model_type == "LlamaCanon", choice.reason
    (tmp_path / "second").mkdir()
    write_model(model, choice, tmp_path / "second", CONTROLS)
    written = json.loads((tmp_path / "second" / "config.json").read_text())
    given = {key: value for key, value in config.items() if value is not None}
    given = {"rope_dim": DIM} | given
    for key in ("partial_rotary_factor", "canon_bias", "canon_activation", "canon_residual"):
        given.pop(key, None)  # follows from rope_dim, or has the default
    assert {key: written.get(key) for key in given} == given
    stored = load_file(tmp_path / "second" / "model.safetensors")
    torch.testing.assert_close(stored, weights_of(config), rtol=0, atol=0)


@pytest.mark.parametrize(
    "change", [{"canon_bias": True}, {"canon_activation": True}, {"canon_residual": False}], ids=str
)
def test_other_convolutions_are_refused(change, tmp_path):
    folder_of(tmp_path / "first", CONFIG | change)
    with pytest.raises(InteropError, match=next(iter(change))):
        build_model(read_folder(tmp_path / "first"))
