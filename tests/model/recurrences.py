"""Random inputs of the recurrence, and reference implementations of other projects."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.mixers.recurrence import Inputs

B, H, T, K, V = 2, 3, 83, 5, 7
# decay, delta rule
FORMS = {
    "linear": ("none", False),
    "retnet": ("constant", False),
    "mamba2": ("head", False),
    "gla": ("channel", False),
    "deltanet": ("none", True),
    "gated_deltanet": ("head", True),
    "kda": ("channel", True),
}
every_form = pytest.mark.parametrize("form", FORMS)


def inputs(
    form: str,
    tokens: int = T,
    decay: float = 1.0,
    document: Tensor | None = None,
    seed: int = 0,
) -> Inputs:
    """Random tokens with unit keys, β in (0, 1), log decays in (−`decay`, 0) and values that need
    gradients, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(function: Callable, *shape: int) -> Tensor:
        return function(*shape, generator=generator, dtype=torch.float64)

    kind, is_delta = FORMS[form]
    shape = {
        "none": None,
        "constant": (1, H, 1, 1),
        "head": (B, H, tokens, 1),
        "channel": (B, H, tokens, K),
    }[kind]
    tensors = {
        "q": draw(torch.randn, B, H, tokens, K),
        "k": F.normalize(draw(torch.randn, B, H, tokens, K), dim=-1),
        "v": draw(torch.randn, B, H, tokens, V),
        "beta": draw(torch.rand, B, H, tokens),
        "log_decay": None if shape is None else -decay * draw(torch.rand, *shape),
    }
    for x in tensors.values():
        if x is not None:
            x.requires_grad_()
    return Inputs(**tensors, is_delta=is_delta, document=document)


def tensors_of(x: Inputs) -> list[Tensor]:
    """The tensors of the tokens that have gradients."""
    return [each for each in (x.q, x.k, x.v, x.beta, x.log_decay) if each is not None]


def part(x: Inputs, start: int, stop: int) -> Inputs:
    """The tokens start, ..., stop − 1."""

    def of(each: Tensor | None) -> Tensor | None:
        is_constant = each is None or each.shape[2] == 1
        return each if is_constant else each[:, :, start:stop]

    return Inputs(
        q=x.q[:, :, start:stop],
        k=x.k[:, :, start:stop],
        v=x.v[:, :, start:stop],
        beta=x.beta[:, :, start:stop],
        log_decay=of(x.log_decay),
        is_delta=x.is_delta,
        document=None if x.document is None else x.document[:, start:stop],
    )


def difference(x: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected number."""
    return ((x - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()


def fla(name: str) -> ModuleType:
    """`naive.py` of an operation of flash-linear-attention, loaded by path: importing the package
    would choose its kernels. Skips the test where it is not installed."""
    pytest.importorskip("einops")
    package = importlib.util.find_spec("fla")
    if package is None or package.origin is None:
        pytest.skip("flash-linear-attention is not installed")
    path = Path(package.origin).parent / "ops" / name / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
