"""Models in released formats that no class of transformers has, against a second implementation:
Canon layers, and RoPE++, a `llama` configuration with `rope_config`.

`ReleasedModel` was written for this test after reading modeling_llama_canon.py and canon_helper.py
of facebookresearch/PhysicsLM4 and modeling_llama_rope_pp.py of OpenMOSS/rope_pp; it shares no code
with them or with our model. The released files themselves require an older transformers.
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
from tests.files import table
from tests.interop.export.exported import CONTROLS
from tests.model.zoo import close

LENGTH = 17
TABLE = table("interop/released.yaml")
CONFIGS = {
    name: TABLE[kind] | changes
    for kind, cases in TABLE["cases"].items()
    for name, changes in cases.items()
}
WIDTH, HEADS, GROUPS, DIM, HIDDEN, VOCAB, LAYERS = 24, 4, 2, 6, 40, 29, 2
# projected queries, key/value heads and heads of outputs
SIZES = {
    None: (HEADS, GROUPS, HEADS),
    "imag1": (HEADS // 2, GROUPS // 2, HEADS),
    "imag2": (HEADS, GROUPS, 2 * HEADS),
}


def sizes_of(config: dict) -> tuple[int, int, int]:
    return SIZES[config.get("rope_config", {}).get("imag_mode")]


def shapes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of the released class."""
    q, kv, out = (DIM * heads for heads in sizes_of(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    attention = {"q": (q, WIDTH), "k": (kv, WIDTH), "v": (kv, WIDTH), "o": (WIDTH, out)}
    mlp = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    canon = {"A": WIDTH, "C": WIDTH, "self_attn.B": q + 2 * kv, "mlp.D": 2 * HIDDEN}
    for i in range(LAYERS):
        layer = {"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)}
        for part, key, matrices in (
            ("self_attn", "attention_bias", attention),
            ("mlp", "mlp_bias", mlp),
        ):
            for name, shape in matrices.items():
                layer[f"{part}.{name}_proj.weight"] = shape
                if config.get(key):
                    layer[f"{part}.{name}_proj.bias"] = shape[:1]
        if config.get("qk_norm"):
            layer |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
        for place, size in canon.items():
            if place[-1] in config.get("canon_set", ""):
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


class ReleasedModel:
    """The released classes on one sequence, in float64."""

    def __init__(self, config: dict, tensors: dict[str, Tensor]):
        self.config = config
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.is_lingua = config.get("rope_version") == "lingua"

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
        """RoPE++: heads 2h and 2h + 1 are real and imaginary parts of complex products."""
        queries, groups, heads = sizes_of(self.config)
        q, k, v = (self.linear(f"{own}{name}_proj", x) for name in "qkv")
        whole = torch.cat([self.norm(own + "q_norm", q), self.norm(own + "k_norm", k), v], -1)
        sizes = [queries * DIM, groups * DIM, groups * DIM]
        q, k, v = self.canon(own + "canonB", whole).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(0, 1) for part in (q, k, v))
        k = k.repeat_interleave(queries // groups, 0)
        v = v.repeat_interleave(heads // groups, 0)
        (q, plain_q), (k, plain_k) = self.rotated(q), self.rotated(k)
        products = q @ k.mT.conj()
        logits = products.real + plain_q @ plain_k.mT
        if heads > queries:
            logits = torch.stack([logits, products.imag], 1).flatten(0, 1)
        hidden = torch.ones(logits.shape[1:]).triu(1).bool()
        weights = (logits / math.sqrt(DIM)).masked_fill(hidden, -math.inf).softmax(-1)
        return self.linear(own + "o_proj", (weights @ v).transpose(0, 1).flatten(1))

    def rotated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rotated features as complex pairs, and the others."""
        count = self.config.get("rope_dim") or DIM
        turned, rest = x[..., :count], x[..., count:]
        exponents = torch.arange(count // 2).double() * 2 / count
        angle = torch.arange(x.shape[1])[:, None] * self.config["rope_theta"] ** -exponents
        parts = turned.unflatten(-1, (-1, 2)).unbind(-1) if self.is_lingua else turned.chunk(2, -1)
        return torch.complex(*parts) * torch.polar(torch.ones_like(angle), angle), rest


def folder_of(path, config: dict) -> dict[str, Tensor]:
    path.mkdir()
    tensors = weights_of(config)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return tensors


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_released_format(name, tmp_path):
    """Logits whole, left-padded and token by token; the Canon folder that is written is the one
    read."""
    config = CONFIGS[name]
    released = ReleasedModel(config, folder_of(tmp_path / "first", config))
    first = build_model(read_folder(tmp_path / "first"))
    model = first.model.double()
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([released(row) for row in tokens])
    assert expected.std() > 0.3
    close(model(tokens), expected, atol=1e-10)
    padded = model(tokens, TokenPositions.left_padded([LENGTH, 9], LENGTH))
    close(padded[1, -9:], released(tokens[1, -9:]), atol=1e-10)
    cache = model.make_cache(2, LENGTH)
    parts = [model(part, cache=cache) for part in tokens.split([6, *[1] * (LENGTH - 6)], dim=1)]
    close(torch.cat(parts, dim=1), expected, atol=1e-10)

    assert choose_class(first.model).model_type is None  # transformers does not have it
    choice = choose_class(model.float(), published=True)
    if config["model_type"] == "llama":
        assert choice.model_type is None
        return
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


@pytest.mark.parametrize(("kind", "changes", "named"), TABLE["refused"], ids=str)
def test_other_forms_are_refused(kind, changes, named, tmp_path):
    folder_of(tmp_path / "first", TABLE[kind] | changes)
    with pytest.raises(InteropError, match=named):
        build_model(read_folder(tmp_path / "first"))
