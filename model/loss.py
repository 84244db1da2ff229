"""The training loss, per target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # target id that is excluded from the loss


def token_nll(logits: Tensor, ids: Tensor, z_loss: float | None = None) -> Tensor:
    """Negative log-likelihood in nats of each target; 0 for ignored targets.

    Args:
        logits: (N, V).
        ids: (N,).
        z_loss: coefficient of (ln Z)², Z the sum of exp logits. It adds to the gradients but not to the
            returned value, and keeps ln Z near 0 (PaLM, arXiv:2204.02311, section 5).

    Returns:
        (N,) float64 for float64 logits, otherwise float32.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    nll = F.cross_entropy(logits, ids, ignore_index=IGNORED, reduction="none")
    if z_loss is None:
        return nll
    more = z_loss * logits.logsumexp(-1) ** 2 * (ids != IGNORED)
    return nll + (more - more.detach())
