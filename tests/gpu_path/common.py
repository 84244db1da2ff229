"""The torch release whose internals these tests patch, and models wide enough for a GPU's kernels."""

from __future__ import annotations

import pytest
import torch

from model import Transformer
from tests.model.zoo import CASES, build

PATCHED = "2.13"

needs_patched_torch = pytest.mark.skipif(
    torch.__version__.split("+")[0].rsplit(".", 1)[0] != PATCHED,
    reason=f"patches internals of torch {PATCHED}; this is torch {torch.__version__}",
)


def gpu_model(case: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> Transformer:
    """A model of a case with heads of 16 features, the least that FlexAttention takes on a GPU."""
    position = CASES[case]
    if case == "rope-longrope":  # its factors are those of ten rotated features
        position = {**position, "fraction": 0.625}
    return build(position, dtype=dtype, heads=4, kv_heads=2, head_dim=16, dim=32, layers=layers)
