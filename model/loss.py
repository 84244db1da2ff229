"""The training loss per target, computed in chunks; `train.py` divides their sum by the number of targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # target id that is excluded from the loss
# Rows × V per chunk of the output head: small enough for a CPU's cache, large enough for a GPU.
LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}


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


def chunked_nll(
    logits: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, vocab_size: int, z_loss: float | None
) -> Tensor:
    """`token_nll` of `targets` (B, K) in chunks, so that the N × V float32 logits are never materialized.

    Args:
        logits: the output head, hidden states (·, C) → (·, V).
        x: (B, K, C) hidden states.
    """

    def chunk(rows: Tensor, ids: Tensor) -> Tensor:
        return token_nll(logits(rows), ids, z_loss)

    rows, ids = x.flatten(0, 1), targets.flatten()
    size = max(1, LOGITS_AT_ONCE.get(x.device.type, 1 << 25) // vocab_size)
    if len(rows) <= size:
        return chunk(rows, ids).view(targets.shape).clone()  # no view: FSDP2 registers a hook on it
    parts = []
    for part in zip(rows.split(size), ids.split(size), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(chunk(*part))
    return torch.cat(parts).view(targets.shape).clone()
