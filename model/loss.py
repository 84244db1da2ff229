"""What the model is trained to make small, target by target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that is not counted


def token_nll(logits: Tensor, ids: Tensor, z_loss: float | None = None) -> Tensor:
    """Negative log-likelihood in nats of each target, 0 where it is not counted.

    Args:
        logits: (N, V).
        ids: (N,).
        z_loss: gradients, though not the value, are those of NLL + z_loss · (ln Z)², Z the sum of exp logits:
            keeps ln Z near 0 (PaLM, arXiv:2204.02311, section 5).

    Returns:
        (N,) float64 where the logits are, else float32.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    nll = F.cross_entropy(logits, ids, ignore_index=IGNORED, reduction="none")
    if z_loss is None:
        return nll
    more = z_loss * logits.logsumexp(-1) ** 2 * (ids != IGNORED)
    return nll + (more - more.detach())
