"""First weights, logits, losses and gradients of the conformance cases, for reference.py.

    PYTHONPATH=TREE python tests/reference/model_values.py OUT.npz [CASE ...]

The tree on the import path computes them; the cases are in model_cases.json. Sizes: B 2,
T 19 or the end of the model's table, V 37; float64.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from model import ModelSettings, TokenPositions, Transformer
from model.decoding import pack
from tests.model.zoo import without_pattern_scheme

TOKENS = 19
PIECES = (5, 1, 1, 4)  # tokens per pass through the cache; the rest follow one by one


def main(out: str, *names: str) -> None:
    torch.set_num_threads(1)
    stored = json.loads(Path(__file__).with_name("model_cases.json").read_text(encoding="utf-8"))
    values = {}
    for name in names or stored["cases"]:
        case = without_pattern_scheme(stored["cases"][name])
        settings = ModelSettings(**stored["sizes"], **case)
        model = Transformer(settings, stored["vocab_size"], stored["train_length"])
        for key, value in case_values(model).items():
            values[f"{name}/{key}"] = value.detach().numpy()
    np.savez_compressed(out, **values)


def case_values(model: Transformer) -> dict[str, torch.Tensor]:
    """First weights in float32; with other random weights, logits of several kinds of passes, the
    sum of the NLL and its gradient."""
    model.initialize(0)
    values = {f"first/{name}": weight.clone() for name, weight in model.named_parameters()}
    draw_weights(model)
    model.double().eval()
    length = min(TOKENS, model.limit or TOKENS)
    generator = torch.Generator().manual_seed(100)
    tokens = torch.randint(model.vocab_size, (2, length), generator=generator)
    with torch.no_grad():
        values["logits/plain"] = model(tokens, TokenPositions.plain(length))
        padded = TokenPositions.left_padded([length, length - 6], length)
        values["logits/padded"] = model(tokens, padded)[:, 6:]
        values["logits/cached"] = cached(model, tokens)
        if model.settings.mixer.name == "attention":
            values["logits/decoded"] = cached(pack(model), tokens)
    # a copy that is not packed
    model = model.to(torch.float64).train()
    positions = packed(length)
    targets = tokens.roll(-1, 1)
    targets[:, -2:] = -100
    values["logits/packed"] = model(tokens, positions)
    loss = model(tokens, positions, targets, reduction="sum")
    loss.backward()
    values["loss"] = loss
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            values[f"gradient/{name}"] = weight.grad
    return values


@torch.no_grad()
def draw_weights(model: Transformer) -> None:
    """Draw weights with which attention is far from uniform: every part of the model matters."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if name.endswith(".bias"):
            weight.copy_(drawn)
        elif weight.ndim == 1:
            weight.copy_(1 + 0.2 * drawn)
        elif name == "embed.weight":
            weight.copy_(drawn)
        elif name == "head.weight":
            weight.copy_(drawn * weight.shape[1] ** -0.5)
        elif name.startswith("position.") and "-" not in name.split(".")[1]:
            weight.copy_(drawn)
        else:
            weight.copy_(drawn * 1.3 * weight.shape[1] ** -0.5)


def packed(length: int) -> TokenPositions:
    """Rows of two documents."""
    first = length // 3
    order = torch.cat([torch.arange(first), torch.arange(length - first)])[None]
    document = torch.cat([torch.zeros(first), torch.ones(length - first)])[None].long()
    return TokenPositions(
        order=order,
        position=order,
        document=document,
        layout="packed",
        position_end=length - first,
        lengths=(length,),
        unit_steps=False,
    )


def cached(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """(B, T, V) logits of passes through a cache."""
    length = tokens.shape[1]
    cache = model.make_cache(tokens.shape[0], length)
    ends = list(torch.tensor(PIECES).cumsum(0).clamp(max=length).tolist())
    ends += range(ends[-1] + 1, length + 1)
    out = []
    for start, end in pairwise(dict.fromkeys([0, *ends])):
        positions = TokenPositions.plain(end - start, offset=start, length=length)
        out.append(model(tokens[:, start:end], positions, cache=cache))
    return torch.cat(out, dim=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
