"""Which weights learn by which rule, at which rate and with which decay; and the update itself.

Weight decay acts on matrices alone: the weights of linear layers, the untied head among them.  It leaves out
embeddings (a row is seen only when its token is, so decay would erase rare tokens; a tied head is one too),
norms and biases (vectors), and whatever a positional scheme learns, whose scale has a meaning.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from model import Transformer
from training.errors import TrainingError
from training.optimizer_settings import ROLES, AdamWRule, AdamWSettings, MuonSettings, OptimizerSettings
from training.together import Together

Named = tuple[str, nn.Parameter]


def clean_name(name: str) -> str:
    """A weight's own name, without the `module.` of DDP and the `_orig_mod.` of compile."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Clean names and parameters in the model's own order, a tied one once."""
    for name, parameter in model.named_parameters():
        yield clean_name(name), parameter


def role_of(name: str, parameter: Tensor) -> str:
    """One of ROLES for a weight."""
    parts = name.split(".")
    if "position" in parts:
        return "positions"
    if "embed" in parts:
        return "embeddings"
    if parts[0] == "head":
        return "head"
    return "matrices" if parameter.ndim >= 2 else "vectors"


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer of the settings, with one group per role; AdamW fused where every weight's device and
    dtype allow it.

    Groups carry `name` (their role), `names` (of their weights), `rate` (the name of their learning rate) and
    `factor` (times that rate), and come in the order of ROLES. The head is one of the matrices unless
    something sets it apart. Frozen weights are left out.

    A model under `mup`, m times as wide as its base, has matrices that learn at 1/m of their rate under AdamW
    (Yang et al. 2022, arXiv:2203.03466, table 8). What must not grow with m is the spectral norm of an update
    (Yang et al. 2023, arXiv:2310.17813): Muon's does not under "original", and grows as √m under
    "match_rms_adamw". Rate times weight decay stays what it was.
    """
    weights = [(name, weight) for name, weight in named_weights(model) if weight.requires_grad]
    if not weights:
        raise TrainingError("the model has no weight to train: every one is frozen")
    width = model.settings.width_ratio if isinstance(model, Transformer) else 1.0
    if isinstance(settings, AdamWSettings):
        return _adamw(_groups(weights, settings, factor=1 / width, head_apart=width != 1), settings)
    matrices = [(name, weight) for name, weight in weights if role_of(name, weight) == "matrices"]
    others = [(name, weight) for name, weight in weights if role_of(name, weight) != "matrices"]
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        factor = 1.0 if settings.adjust == "original" else width**-0.5
        parts.append(_muon([_group("matrices", matrices, "lr", settings.weight_decay, factor)], settings))
    if others:
        parts.append(_adamw(_groups(others, settings.adamw, "adamw_lr", head_apart=True), settings.adamw))
    return Together(parts)


def _adamw(groups: list[dict], settings: AdamWRule) -> torch.optim.AdamW:
    weights = [weight for group in groups for weight in group["params"]]
    fused = all(weight.device.type in ("cpu", "cuda") and weight.is_floating_point() for weight in weights)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def _muon(groups: list[dict], settings: MuonSettings) -> torch.optim.Muon:
    return torch.optim.Muon(
        groups,
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        ns_steps=settings.iterations,
        adjust_lr_fn=settings.adjust,
    )


def _groups(
    weights: Iterable[Named],
    settings: AdamWRule,
    rate: str = "lr",
    factor: float = 1.0,
    head_apart: bool = False,
) -> list[dict]:
    """AdamW's groups; `rate` is the name of the learning rate of those that have none of their own, `factor`
    what that of matrices is multiplied by."""
    apart = head_apart or settings.of("head") != settings.of("matrices")
    by_role: dict[str, list[Named]] = {role: [] for role in ROLES}
    for name, weight in weights:
        role = role_of(name, weight)
        by_role["matrices" if role == "head" and not apart else role].append((name, weight))
    groups = []
    for role, chosen in by_role.items():
        own = settings.rate_of(role), settings.of(role).weight_decay
        decay = settings.weight_decay if role in ("matrices", "head") else 0.0
        if chosen:
            which = rate if own[0] is None else f"{role}_lr"
            decay = decay if own[1] is None else own[1]
            groups.append(_group(role, chosen, which, decay, factor if role == "matrices" else 1.0))
    return groups


def _group(role: str, weights: Iterable[Named], rate: str, weight_decay: float, factor: float) -> dict:
    names, params = zip(*weights, strict=True)
    return {
        "params": list(params),
        "name": role,
        "names": list(names),
        "rate": rate,
        "factor": factor,
        "weight_decay": weight_decay / factor,
    }


def set_learning_rates(optimizer: torch.optim.Optimizer, rates: Mapping[str, float]) -> None:
    """Give every group its learning rate (1/update), by the name of it that the group carries."""
    for group in optimizer.param_groups:
        group["lr"] = rates[group["rate"]] * group["factor"]


def gated_step(optimizer: torch.optim.Optimizer, broken: Tensor) -> None:
    """One update, but none where the flag `broken` (a bool scalar on the weights' device) is set: weights,
    moments and step counts are then as they were, to the bit. The host does not wait for the flag.

    Fused AdamW has a gate of its own, made for loss scaling. Any other optimizer steps and is given back what
    it had, which takes a copy of its weights and moments for that long.
    """
    for part in optimizer.parts if isinstance(optimizer, Together) else [optimizer]:
        if all(group.get("fused") for group in part.param_groups):
            part.found_inf = broken.float()  # type: ignore[attr-defined]
            part.step()
        else:
            _step_and_put_back(part, broken)


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


def who_learns_at(rate: str, model: nn.Module, settings: OptimizerSettings) -> str:
    """What a learning rate is for, in words; it may be for nothing."""
    count = learnt_by_positions(model)
    if rate == "positions_lr":
        if not count:
            return "unused, its positions learn nothing"
        return f"for the {count:,} numbers its positions learn"
    groups = [group for group in make_optimizer(model, settings).param_groups if group["rate"] == rate]
    if not groups:
        return "unused, the model has no such weights"
    count = sum(weight.numel() for group in groups for weight in group["params"])
    return f"for the {count:,} numbers of {', '.join(group['name'] for group in groups)}"
