"""The weights of our model as tensors of a GGUF file."""

from __future__ import annotations

import torch
from torch import Tensor

from errors import InteropError
from interop.gguf.architectures import (
    ARCHITECTURES,
    LAYER,
    OUTER,
    QK_NORMS,
    ROPE_FREQS,
    ROPE_LONG,
    ROPE_SHORT,
)
from interop.gguf.writing.plan import Plan
from interop.huggingface.weights import LLAMA, PHI3, to_half, to_interleaved, weight_map
from interop.huggingface.weights import QK_NORMS as OUR_QK_NORMS
from model import Transformer
from model.position.temperature import FixedTemperature

_SINK = "attn_sinks.weight"
NO_SINK = -1e30  # the logit of a sink that takes no attention; granite_swa has one in every layer


def tensors(model: Transformer, plan: Plan) -> dict[str, Tensor]:
    """Every tensor of the file in float32, by its name.

    Scales that the architecture does not have are folded into neighboring weights, and rows of queries and
    keys are reordered to the architecture's layout.
    """
    state = {name: weight.detach().cpu().float() for name, weight in model.state_dict().items()}
    _fold(model, plan, state)
    for name in state:
        if name.split(".")[-2] in ("wq", "wk", "q_norm", "k_norm"):
            state[name] = _reordered(model, plan, name, state[name])
    layer = PHI3 if plan.architecture == "phi3" else LLAMA | OUR_QK_NORMS
    names = ARCHITECTURES["phi3"].layer if plan.architecture == "phi3" else LAYER | QK_NORMS
    found, _ = weight_map(layer, model.settings.layers, state)
    theirs = {their: name for name, their in OUTER.items()}
    for i in range(model.settings.layers):
        theirs |= {f"model.layers.{i}.{their}": f"blk.{i}.{name}" for name, their in names.items()}
    out = {
        theirs[their]: torch.cat([state[part] for part in parts]) for their, parts in found.items()
    }
    for i, block in enumerate(model.blocks if plan.architecture == "granite_swa" else []):
        sink = block.attention.position.sink_logits(torch.device("cpu"))
        absent = torch.full((model.settings.heads,), NO_SINK)
        out[f"blk.{i}.{_SINK}"] = absent if sink is None else sink.detach().cpu().float()
    if plan.divisors is not None:
        names = (ROPE_LONG, ROPE_SHORT) if plan.architecture == "phi3" else (ROPE_FREQS,)
        out |= dict.fromkeys(names, plan.divisors)
    return out


def _reordered(model: Transformer, plan: Plan, name: str, rows: Tensor) -> Tensor:
    """Rows of queries or keys, or the weight of their norm, in the layout of the file."""
    s = model.settings
    rotating = {choice.layout for choice in s.kinds.values() if hasattr(choice, "layout")}
    ours = rotating.pop() if rotating else plan.layout
    if ours == plan.layout or not plan.rotated:
        return rows
    heads = 1 if "_norm." in name else s.heads if ".wq." in name else s.kv_heads
    return (to_half if plan.layout == "half" else to_interleaved)(rows, heads, plan.rotated)


def _fold(model: Transformer, plan: Plan, state: dict[str, Tensor]) -> None:
    """Multiply weights by the model's scales that the file cannot state."""
    s = model.settings
    embedding = 1.0
    residual = 1.0
    logits = 1.0
    scale = 1.0
    if plan.folds_scales:
        embedding = s.embedding_multiplier
        residual = s.residual_multiplier
        logits = s.logit_divisor * s.width_ratio
        scale = s.attention_scale * s.head_dim**0.5
    if s.tie_embeddings:
        logits *= embedding
    _multiply(state, ("embed.weight",), embedding)
    _multiply(state, ("norm.weight",), 1 / logits)
    for i, block in enumerate(model.blocks):
        prefix = f"layers.{i}."
        own = [prefix + name for name in ("attention.wo.weight", "attention.wo.bias")]
        _multiply(state, [*own, prefix + "mlp.down.weight", prefix + "mlp.down.bias"], residual)
        factors = _query_factors(block.attention.position, s.heads) * scale
        if s.qk_norm:
            if (factors != factors[0]).any():
                raise InteropError(
                    "model.position.temperature: factors that differ between heads cannot be folded into the "
                    "weights of QK-norm; export to the Hugging Face format"
                )
            _multiply(state, [prefix + "attention.q_norm.weight"], float(factors[0]))
        elif (factors != 1).any():
            rows = factors.repeat_interleave(s.head_dim)
            for name in ("attention.wq.weight", "attention.wq.bias"):
                if prefix + name in state:
                    weight = state[prefix + name]
                    state[prefix + name] = weight * rows.view(-1, *[1] * (weight.ndim - 1)).to(
                        weight.dtype
                    )


def _multiply(state: dict[str, Tensor], names, factor: float) -> None:
    if factor != 1:
        for name in names:
            if name in state:
                state[name] = state[name] * factor


def _query_factors(modifiers, heads: int) -> Tensor:
    """(H,) float64, the constant or learned temperature of each head."""
    temperature = modifiers.settings.temperature
    if modifiers.scale is not None:
        return modifiers.scale.detach().cpu().double()
    if temperature.by_head is not None:
        return torch.tensor(temperature.by_head, dtype=torch.float64)
    value = temperature.value if isinstance(temperature, FixedTemperature) else 1.0
    return torch.ones(heads, dtype=torch.float64) * torch.tensor(value, dtype=torch.float64)
