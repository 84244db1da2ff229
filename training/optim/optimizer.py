"""Parameter groups with their optimizer, learning rate and weight decay; and the update.

Weight decay applies to matrices only: the weights of linear layers, including an untied head. It
excludes embeddings and a tied head (a row has gradients only when its token occurs, so decay would
erase rare tokens), norms and biases (vectors), and parameters of positional schemes, whose scale
has a meaning.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from errors import TrainingError
from model import Transformer
from run_directory.optimizer_settings import ROLES, AdamWBase, MuonSettings, OptimizerSettings
from run_directory.weights import named_weights
from training.optim.combined import CombinedOptimizer

Named = tuple[str, nn.Parameter]


def role_of(name: str, parameter: Tensor) -> str:
    """The role of a parameter, one of ROLES."""
    parts = name.split(".")
    if "position" in parts:
        return "positions"
    if "embed" in parts:
        return "embeddings"
    if parts[0] == "head":
        return "head"
    is_depthwise = "convolution" in parts  # its rows are filters of one channel
    return "matrices" if parameter.ndim >= 2 and not is_depthwise else "vectors"


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer of the settings, with one group per role; AdamW is fused where the device and
    dtype of every parameter allow it.

    Groups have the keys `name` (the role), `names` (of the parameters), `rate` (the name of the
    learning rate) and `factor` (a multiplier of that rate), and are in the order of ROLES. The head
    is in the group of the matrices unless it needs separate options. Frozen parameters are
    excluded.

    In a model with `mup`, m times as wide as its base, the learning rate of matrices under AdamW is
    multiplied by 1/m (Yang et al. 2022, arXiv:2203.03466, table 8). The spectral norm of an update
    must not grow with m (Yang et al. 2023, arXiv:2310.17813): under Muon it is constant with
    "original" and grows as √m with "match_rms_adamw". The product of learning rate and weight decay
    does not change.
    """
    width = model.settings.width_ratio if isinstance(model, Transformer) else 1.0
    muon = settings if isinstance(settings, MuonSettings) else None
    adamw: AdamWBase = settings.adamw if isinstance(settings, MuonSettings) else settings
    is_head_apart = muon is not None or width != 1 or adamw.of("head") != adamw.of("matrices")
    by_role: dict[str, list[Named]] = {role: [] for role in ROLES}
    for name, weight in named_weights(model):
        if weight.requires_grad:
            role = role_of(name, weight)
            by_role["matrices" if role == "head" and not is_head_apart else role].append(
                (name, weight)
            )
    groups = {}
    for role, weights in by_role.items():
        if not weights:
            continue
        factor = 1 / width if role == "matrices" else 1.0
        if muon is not None and role == "matrices":
            rate = "lr"
            decay = muon.weight_decay
            factor = 1.0 if muon.adjust == "original" else width**-0.5
        else:
            default = "lr" if muon is None else "adamw_lr"
            rate = default if adamw.rate_of(role) is None else f"{role}_lr"
            decay = adamw.of(role).weight_decay
            if decay is None:
                decay = adamw.weight_decay if role in ("matrices", "head") else 0.0
        names, params = zip(*weights, strict=True)
        groups[role] = {
            "params": list(params),
            "name": role,
            "names": list(names),
            "rate": rate,
            "factor": factor,
            "weight_decay": decay / factor,
        }
    if not groups:
        raise TrainingError("the model has no weight to train: all are frozen")
    if muon is None:
        return _adamw(list(groups.values()), adamw)
    parts: list[torch.optim.Optimizer] = []
    if "matrices" in groups:
        parts.append(
            torch.optim.Muon(
                [groups.pop("matrices")],
                lr=muon.lr,
                momentum=muon.momentum,
                nesterov=muon.nesterov,
                ns_steps=muon.iterations,
                adjust_lr_fn=muon.adjust,
            )
        )
    if groups:
        parts.append(_adamw(list(groups.values()), adamw))
    return CombinedOptimizer(parts)


def _adamw(groups: list[dict], settings: AdamWBase) -> torch.optim.AdamW:
    weights = [weight for group in groups for weight in group["params"]]
    fused = all(
        weight.device.type in ("cpu", "cuda") and weight.is_floating_point() for weight in weights
    )
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, rates: Mapping[str, float]) -> None:
    """Set the learning rate (1/update) of every group, by the group's `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = rates[group["rate"]] * group["factor"]


def clip_grad_norm(optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor:
    """Clip the gradients of all parameter groups to a global norm of `max_norm`.

    Args:
        max_norm: None leaves the gradients unchanged.

    Returns:
        () the norm before clipping; of sharded gradients, the norm over all shards.
    """
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    grads = [weight.grad for weight in parameters if weight.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    if isinstance(norm, DTensor):  # of sharded gradients, reduced or not
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm or float("inf"), norm)
    return norm


def guarded_step(optimizer: torch.optim.Optimizer, broken: Tensor) -> None:
    """Apply one update, unless the flag `broken` (a bool scalar on the parameters' device) is set:
    parameters, moments and step counts are then unchanged, bit for bit. Does not synchronize with
    the device.

    Fused AdamW supports such a flag, intended for loss scaling. Any other optimizer steps and is
    then restored, which temporarily needs a copy of its parameters and moments.
    """
    for part in optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
        if all(group.get("fused") for group in part.param_groups):
            part.found_inf = broken.float()  # type: ignore[attr-defined]
            part.step()
        else:
            _step_and_put_back(part, broken)


@torch.no_grad()
def _step_and_put_back(optimizer: torch.optim.Optimizer, broken: Tensor) -> None:
    weights = [w for group in optimizer.param_groups for w in group["params"] if w.grad is not None]
    before = [
        (w.clone(), {key: x.clone() for key, x in optimizer.state[w].items()}) for w in weights
    ]
    optimizer.step()
    for weight, (kept, moments) in zip(weights, before, strict=True):
        _put_back(weight, kept, broken)
        for key, moment in optimizer.state[weight].items():
            _put_back(moment, moments.get(key), broken)


def _put_back(x: Tensor, kept: Tensor | None, broken: Tensor) -> None:
    """Copy `kept` into `x` where `broken`; zeros for state that the first step created."""
    own = x.to_local() if isinstance(x, DTensor) else x
    old = kept.to_local() if isinstance(kept, DTensor) else kept
    own.copy_(torch.where(broken, torch.zeros_like(own) if old is None else old, own))


def count_positional(model: nn.Module) -> int:
    """The number of trainable parameters of the positional schemes."""
    weights = named_weights(model)
    return sum(
        w.numel() for name, w in weights if w.requires_grad and role_of(name, w) == "positions"
    )


def parameters_at_rate(
    rate: str,
    model: nn.Module,
    settings: OptimizerSettings,
) -> str:
    """A description of the parameters that a learning rate applies to; there may be none."""
    if rate == "positions_lr":
        count = count_positional(model)
        return (
            f"for {count:,} positional parameters" if count else "unused: no positional parameters"
        )
    groups = [
        group for group in make_optimizer(model, settings).param_groups if group["rate"] == rate
    ]
    if not groups:
        return "unused: the model has no such parameters"
    count = sum(weight.numel() for group in groups for weight in group["params"])
    return f"for {count:,} parameters: {', '.join(group['name'] for group in groups)}"
