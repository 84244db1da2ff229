"""AdamW over named parameter groups, and the one place that knows which weights decay.

Weight decay acts on matrices alone: the weights of linear layers, the untied head among them.  It leaves out
embeddings (a row is seen only when its token is, so decay would erase rare tokens; a tied head is one too),
norms and biases (vectors), and whatever a positional scheme learns, whose scale has a meaning.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.errors import TrainingError
from training.optimizer_settings import AdamWSettings

ROLES = ("matrices", "embeddings", "vectors", "positions")


def clean_name(name: str) -> str:
    """A weight's own name, without the `module.` of DDP and the `_orig_mod.` of compile."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Clean names and parameters in the model's own order, a tied one once."""
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter


def role_of(name: str, parameter: Tensor) -> str:
    """One of ROLES for a weight; only "matrices" decay."""
    parts = name.split(".")
    if "position" in parts:
        return "positions"
    if "embed" in parts:
        return "embeddings"
    return "matrices" if parameter.ndim >= 2 else "vectors"


def make_optimizer(model: nn.Module, settings: AdamWSettings) -> torch.optim.AdamW:
    """AdamW with one group per role, fused where every weight's device and dtype allow it.

    Groups carry `name` (their role) and `names` (of their weights) and come in the order of ROLES; frozen
    weights are left out.  What positions learn may have a peak rate of its own.
    """
    weights = [(name, weight) for name, weight in named_weights(model) if weight.requires_grad]
    if not weights:
        raise TrainingError("the model has no weight to train: every one is frozen")
    groups = []
    for role in ROLES:
        chosen = [(name, weight) for name, weight in weights if role_of(name, weight) == role]
        if chosen:
            groups.append(
                {
                    "params": [weight for _, weight in chosen],
                    "name": role,
                    "names": [name for name, _ in chosen],
                    "weight_decay": settings.weight_decay if role == "matrices" else 0.0,
                }
            )
    fused = all(weight.device.type in ("cpu", "cuda") and weight.is_floating_point() for _, weight in weights)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, positions: float | None = None) -> None:
    """Give every group its learning rate (1/update); `positions`, if given, to what positions learn."""
    for group in optimizer.param_groups:
        group["lr"] = positions if positions is not None and group.get("name") == "positions" else rate


def gated_step(optimizer: torch.optim.Optimizer, broken: Tensor) -> None:
    """One update, but none where the flag `broken` (a bool scalar on the weights' device) is set: weights,
    moments and step counts are then as they were, to the bit. The host does not wait for the flag.

    Fused AdamW has a gate of its own, made for loss scaling. Any other optimizer steps and is given back what
    it had, which takes a copy of its weights and moments for that long.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = broken.float()  # type: ignore[attr-defined]
        optimizer.step()
    else:
        _step_and_put_back(optimizer, broken)


@torch.no_grad()
def _step_and_put_back(optimizer: torch.optim.Optimizer, broken: Tensor) -> None:
    weights = [w for group in optimizer.param_groups for w in group["params"] if w.grad is not None]
    before = [(w.clone(), {key: x.clone() for key, x in optimizer.state[w].items()}) for w in weights]
    optimizer.step()
    for weight, (kept, moments) in zip(weights, before, strict=True):
        _put_back(weight, kept, broken)
        for key, moment in optimizer.state[weight].items():
            _put_back(moment, moments.get(key), broken)


def _put_back(x: Tensor, kept: Tensor | None, broken: Tensor) -> None:
    """`kept` into `x` where `broken`; zeros where there was nothing yet, as a first step begins with."""
    own = x.to_local() if isinstance(x, DTensor) else x
    old = kept.to_local() if isinstance(kept, DTensor) else kept
    own.copy_(torch.where(broken, torch.zeros_like(own) if old is None else old, own))


def learnt_by_positions(model: nn.Module) -> int:
    """How many numbers the positional schemes learn."""
    weights = named_weights(model)
    return sum(w.numel() for name, w in weights if w.requires_grad and role_of(name, w) == "positions")
