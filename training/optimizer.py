"""Parameter groups with their optimizer, learning rate and weight decay; and the update.

Weight decay applies to matrices only: the weights of linear layers, including an untied head. It
excludes embeddings and a tied head (a row has gradients only when its token occurs, so decay would
erase rare tokens), norms and biases (vectors), and parameters of positional schemes, whose scale
has a meaning.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from model import Transformer
from run_directory.training_settings import AdamWBase, MuonSettings, OptimizerSettings
from run_directory.weights import named_weights, own_part

ROLES = ("matrices", "head", "embeddings", "vectors", "positions", "positional matrices")


def role_of(name: str, parameter: Tensor) -> str:
    """The role of a parameter by its name, one of ROLES; all positional ones are `positions`."""
    parts = name.split(".")
    if "position" in parts:
        return "positions"
    if "embed" in parts:
        return "embeddings"
    if parts[0] == "head":
        return "head"
    is_depthwise = "convolution" in parts  # its rows are filters of one channel
    return "matrices" if parameter.ndim >= 2 and not is_depthwise else "vectors"


def parameter_groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """One group of parameters per role, in the order of ROLES.

    Groups have the keys `name` (the role), `names` (of the parameters), `rate` (the name of the
    learning rate) and `factor` (a multiplier of that rate). The head is in the group of the
    matrices unless they have options of their own. Frozen parameters are excluded.

    In a model with `mup`, m times as wide as its base, the learning rate of matrices under AdamW is
    multiplied by 1/m (Yang et al. 2022, arXiv:2203.03466, table 8), also of positional matrices
    whose input is as wide as the model. The spectral norm of an update
    must not grow with m (Yang et al. 2023, arXiv:2310.17813): under Muon it is constant with
    "original" and grows as √m with "match_rms_adamw". The product of learning rate and weight decay
    does not change.
    """
    width = model.settings.width_ratio if isinstance(model, Transformer) else 1.0
    muon = settings if isinstance(settings, MuonSettings) else None
    adamw: AdamWBase = settings.adamw if isinstance(settings, MuonSettings) else settings
    is_head_apart = muon is not None or width != 1
    wide = positional_matrices(model) if width != 1 else set()
    by_role: dict[str, dict[str, nn.Parameter]] = {role: {} for role in ROLES}
    for name, weight in named_weights(model).items():
        role = "positional matrices" if id(weight) in wide else role_of(name, weight)
        by_role["matrices" if role == "head" and not is_head_apart else role][name] = weight
    groups = []
    for role, weights in by_role.items():
        factor = 1 / width if role in ("matrices", "positional matrices") else 1.0
        if muon is not None and role == "matrices":
            rate = "lr"
            decay = muon.weight_decay
            factor = 1.0 if muon.adjust == "original" else width**-0.5
        else:
            rate = "lr" if muon is None else "adamw_lr"
            if role.startswith("position") and adamw.positions_lr is not None:
                rate = "positions_lr"
            decay = adamw.weight_decay if role in ("matrices", "head") else 0.0
        groups.append(
            {
                "params": list(weights.values()),
                "name": role,
                "names": list(weights),
                "rate": rate,
                "factor": factor,
                "weight_decay": decay / factor,
            }
        )
    return [group for group in groups if group["params"]]


def positional_matrices(model: nn.Module) -> set[int]:
    """The `id` of the weights of positional schemes whose input is as wide as the model."""
    weights = [
        getattr(module, name)
        for module in model.modules()
        for name in getattr(module, "projections", ())
    ]
    return {id(weight) for weight in weights if weight is not None}


class Optimizer:
    """AdamW, or Muon for matrices and AdamW for all other parameters. AdamW is fused if the device
    of every parameter allows it.

    Attributes:
        groups: the groups of `parameter_groups`, with their options.
        weights: all parameters that it updates.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings):
        groups = parameter_groups(model, settings)
        self.parts: list[torch.optim.Optimizer] = []
        adamw: AdamWBase = settings.adamw if isinstance(settings, MuonSettings) else settings
        if isinstance(settings, MuonSettings):
            matrices = [group for group in groups if group["name"] == "matrices"]
            groups = [group for group in groups if group["name"] != "matrices"]
            if matrices:
                self.parts.append(
                    torch.optim.Muon(
                        matrices,
                        lr=settings.lr,
                        momentum=settings.momentum,
                        nesterov=settings.nesterov,
                        ns_steps=settings.iterations,
                        adjust_lr_fn=settings.adjust,
                    )
                )
        if groups:
            devices = {weight.device.type for group in groups for weight in group["params"]}
            fused = devices <= {"cpu", "cuda"}
            betas = adamw.betas
            options = {"lr": adamw.lr, "betas": betas, "eps": adamw.eps, "fused": fused}
            self.parts.append(torch.optim.AdamW(groups, **options))
        self.groups = [group for part in self.parts for group in part.param_groups]
        self.weights: list[nn.Parameter] = [w for group in self.groups for w in group["params"]]

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        """Set the learning rate (1/update) of every group, by the group's `rate`."""
        for group in self.groups:
            group["lr"] = rates[group["rate"]] * group["factor"]

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip the gradients of all parameters to a global norm of `max_norm`; None leaves them
        unchanged.

        Returns:
            () the norm before clipping; for sharded gradients, the norm over all shards.
        """
        grads = [weight.grad for weight in self.weights if weight.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if hasattr(norm, "full_tensor"):  # the gradients are sharded
            norm = norm.full_tensor()  # type: ignore[operator]
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self.weights, max_norm, norm)
        return norm

    def step(self, skip: Tensor) -> None:
        """Apply one update, unless the flag `skip` (a bool scalar on the parameters' device) is
        set: parameters, moments and step counts are then unchanged, bit for bit. Does not
        synchronize with the device.

        Fused AdamW supports such a flag, intended for loss scaling. Any other optimizer steps and
        is then restored, which temporarily needs a copy of its parameters and moments.
        """
        for part in self.parts:
            if all(group.get("fused") for group in part.param_groups):
                part.found_inf = skip.float()  # type: ignore[attr-defined]
                part.step()
            else:
                _step_and_put_back(part, skip)

    def describe(self, rate: str) -> str:
        """The parameters that a learning rate applies to; there may be none."""
        groups = [group for group in self.groups if group["rate"] == rate]
        if not groups:
            return "(unused: the model has no such parameters)"
        count = sum(weight.numel() for group in groups for weight in group["params"])
        return f"for {count:,} parameters ({', '.join(group['name'] for group in groups)})"

    def saved_tensors(self) -> dict[str, Tensor]:
        """Its moments and step counts as `key/parameter name`."""
        return {
            f"{key}/{name}": value.detach()
            for name, (part, _, weight) in self._by_name().items()
            for key, value in part.state[weight].items()
        }

    def _by_name(self) -> dict[str, tuple[torch.optim.Optimizer, dict[str, Any], nn.Parameter]]:
        """The optimizer, group and parameter of each name."""
        return {
            name: (part, group, weight)
            for part in self.parts
            for group in part.param_groups
            for name, weight in zip(group["names"], group["params"], strict=True)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load `saved_tensors`. Options and the dtype of moments keep the values of the settings,
        which a fork may change."""
        owners = self._by_name()
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            part, group, weight = owners[name]
            if kind != "step":
                value = value.to(weight.device, weight.dtype)
            elif group.get("fused"):  # otherwise step counts are on the CPU
                value = value.to(weight.device)
            part.state[weight][kind] = value


@torch.no_grad()
def _step_and_put_back(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Apply an update and, if `skip`, restore weights and state; state that this step created
    becomes 0."""
    weights = [w for group in optimizer.param_groups for w in group["params"] if w.grad is not None]
    before = [(w.clone(), *map(torch.clone, optimizer.state[w].values())) for w in weights]
    optimizer.step()
    for weight, kept in zip(weights, before, strict=True):
        tensors = (weight, *optimizer.state[weight].values())
        for x, old in zip_longest(tensors, kept):
            own = own_part(x)
            earlier = torch.zeros_like(own) if old is None else own_part(old)
            own.copy_(torch.where(skip, earlier, own))
