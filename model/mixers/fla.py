"""Kernels of flash-linear-attention (0.6) for the recurrence, on GPUs where it is installed.

They compute in bfloat16 with a state in float32. The plain form is `chunked` in
`model/mixers/recurrence.py`. The kernel without decay has run on a GPU (docs/benchmarks/gpu); tests
replace the kernels.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from model.mixers.recurrence import Inputs, RecurrentState

# by delta rule, and whether decay differs between channels; None: no decay
FLA_KERNELS = {
    (True, None): "delta_rule",
    (True, False): "gated_delta_rule",
    (True, True): "kda",
    (False, None): "simple_gla",
    (False, False): "simple_gla",
    (False, True): "gla",
}


IS_INSTALLED = find_spec("fla") is not None


# Dynamo cannot trace the import of fla, and fla's kernels are not traced either.
@torch.compiler.disable()
def fla_outputs(inputs: Inputs, before: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
    """See `chunked`; of one document."""
    decay = inputs.without_padding(None).log_decay

    def by_token(x: Tensor) -> Tensor:  # (B, H, T, ·) → (B, T, H, ·)
        return x.transpose(1, 2).bfloat16()

    name = FLA_KERNELS[inputs.is_delta, None if decay is None else decay.shape[-1] > 1]
    tensors = {"v": by_token(inputs.v)}
    if inputs.is_delta:
        tensors["beta"] = by_token(inputs.beta)
    else:
        tensors["v"] = by_token(inputs.v * inputs.beta[..., None])
    if decay is not None:
        by_channel = decay.shape[-1] > 1
        tensors["g"] = (decay if by_channel else decay[..., 0]).transpose(1, 2)
    kernel = getattr(import_module(f"fla.ops.{name}"), f"chunk_{name}")
    out, memory = kernel(
        q=by_token(inputs.q),
        k=by_token(inputs.k),
        **tensors,
        scale=1.0,
        initial_state=None if before is None else before.memory,
        output_final_state=True,
    )
    return out.transpose(1, 2).to(inputs.v.dtype), RecurrentState(memory, None)
