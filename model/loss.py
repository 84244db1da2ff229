"""Negative log-likelihood of targets, in chunks of tokens: `summed_nll` for training, which
`train.py` divides by the number of targets, and `token_nll` for evaluation."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # target id that is excluded from the loss
# Factor on hidden states in products that exceed float16, whose largest number is 65,504.
SHRINK = 2.0**-7
# Rows × V per chunk of the output head: small enough for a CPU's cache, large enough for a GPU.
LOGITS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 27}


@dataclass(frozen=True, eq=False)  # Dynamo of torch < 2.13 cannot trace a hash of its fields
class OutputHead:
    """Logits of hidden states: x · Wᵀ / divisor, and with a cap c · tanh(· / c).

    Args:
        weight: (V, C).
        divisor: divisor of the logits.
        cap: soft bound of the logits' absolute value (Gemma 2, arXiv:2408.00118, section 2).
    """

    weight: Tensor
    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(…, C) hidden states → (…, V) logits."""
        out = F.linear(x, self.weight)
        if self.divisor != 1:
            out = out / self.divisor
        return out if self.cap is None else self.cap * torch.tanh(out / self.cap)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with x: the autocast dtype, or the dtype of x without
    autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def token_nll(head: OutputHead, x: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target; 0 for ignored targets. Logits are computed
    chunk by chunk; with gradients, all are kept.

    Args:
        x: (B, K, C) hidden states.
        targets: (B, K).

    Returns:
        (B, K) float64 for float64 logits, otherwise float32.
    """
    parts = [nll(head(rows), ids) for rows, ids in chunks(x, targets, len(head.weight))]
    return torch.cat(parts).view(targets.shape).clone()  # no view: FSDP2 registers a hook on it


def summed_nll(
    head: OutputHead,
    x: Tensor,
    targets: Tensor,
    z_loss: float | None,
) -> Tensor:
    """The sum of `token_nll`, () float32 or float64, for training. Each chunk's logits are turned
    into gradients at once, so that they are neither stored nor computed again (arXiv:2410.10989,
    section 3.2).

    Args:
        z_loss: coefficient of (ln Z)², Z the sum of exp logits. It adds to the gradients but not to
            the returned value, and keeps ln Z near 0 (PaLM, arXiv:2204.02311, section 5).
    """
    if not torch.is_grad_enabled():
        return token_nll(head, x, targets).sum()
    return _SummedNLL.apply(
        x,
        head.weight,
        targets,
        head.divisor,
        head.cap,
        z_loss,
    )


def nll(logits: Tensor, ids: Tensor) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, ids, ignore_index=IGNORED, reduction="none")


def chunks(
    x: Tensor,
    targets: Tensor,
    vocab_size: int,
) -> list[tuple[Tensor, Tensor]]:
    """Chunks of rows (n, C) and targets (n,), small enough for their logits to exist at once."""
    size = max(1, LOGITS_AT_ONCE.get(x.device.type, 1 << 25) // vocab_size)
    rows = x.flatten(0, 1)
    ids = targets.flatten()
    return (
        [(rows, ids)]
        if len(rows) <= size
        else [*zip(rows.split(size), ids.split(size), strict=True)]
    )


class _SummedNLL(torch.autograd.Function):
    """The gradients are computed in the forward pass for an upstream gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        divisor: float,
        cap: float | None,
        z_loss: float | None,
    ) -> Tensor:
        dtype = product_dtype(weight)
        with torch.autocast(x.device.type, enabled=False):
            head = OutputHead(weight.to(dtype), divisor, cap)
            grad_weight = torch.zeros_like(weight)
            grads = []
            losses = []
            for rows, ids in chunks(x.to(dtype), targets, len(weight)):
                logits = head(rows)
                log_p = (logits if dtype == torch.float64 else logits.float()).log_softmax(-1)
                valid = (ids != IGNORED)[:, None]
                at = torch.where(valid, ids[:, None], 0)
                log_p_target = log_p.gather(-1, at)
                losses.append(torch.where(valid, -log_p_target, 0.0))
                if z_loss is not None:
                    log_z = logits.gather(-1, at) - log_p_target
                p = log_p.exp_()
                if z_loss is not None:
                    p.mul_(1 + 2 * z_loss * log_z)
                p_target = p.gather(-1, at) - 1
                for part, capped in ((p, logits), (p_target, logits.gather(-1, at))):
                    if cap is not None:
                        part.mul_(1 - (capped / cap) ** 2)
                    if divisor != 1:
                        part.div_(divisor)
                # Compiled for a GPU, an addition to p would store p in float32.
                grad = p.to(dtype).scatter_(-1, at, p_target.to(dtype))
                grads.append((grad @ head.weight) * valid)
                rows = rows * valid
                if dtype == torch.float16:
                    grad_weight.add_(grad.T @ (rows * SHRINK), alpha=1 / SHRINK)
                elif dtype == weight.dtype:
                    grad_weight.addmm_(grad.T, rows)
                else:
                    grad_weight.add_(grad.T @ rows)
        ctx.save_for_backward(torch.cat(grads).view(x.shape).to(x.dtype), grad_weight)
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        (grad,) = upstream
        return (
            grad_x * grad.to(grad_x.dtype),
            grad_weight * grad.to(grad_weight.dtype),
            None,
            None,
            None,
            None,
        )
