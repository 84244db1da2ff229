"""Logit temperatures: factors on q that depend on the number of visible keys, are constant, or are
learned.

A modifier for any scheme, applied to queries, so it needs no kernel and does not affect the cache:
logit = factor_n · q_n·k_m·scale + bias. n is the number of visible keys of a query, including its
own: min(order + 1, window + sinks), or order + 1 for temperatures that ignore the window.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from errors import ModelError
from model.attention.mask import no_autocast
from model.position.table import on_device
from model.token_positions import TokenPositions
from settings.fields import StrictSettings, setting

Scale = Annotated[float, Field(gt=0)]


class Temperature(StrictSettings):
    """Base class of temperatures."""

    learned: ClassVar[bool] = False  # has parameters of each head and layer
    depends_on_length: ClassVar[bool] = False  # depends on the declared length
    ignores_window: ClassVar[bool] = False  # counts all earlier tokens, visible or not
    initial: ClassVar[float] = 1.0  # initial value of a learned temperature's parameter
    by_head: ClassVar[list[float] | None] = None  # constant factors per query head

    name: str

    def factor(
        self,
        count: Tensor,
        original_length: int,
        lengths: Tensor,
    ) -> Tensor | None:
        """Factors on q.

        Args:
            count: (B or 1, T) float64, number of visible keys of each query, including its own.
            original_length: L0.
            lengths: (B or 1, 1) float64, declared length of each row.

        Returns:
            (B or 1, T or 1) float64, or None for no change.
        """
        return None

    def query_factors(
        self,
        positions: TokenPositions,
        max_visible: int | None,
        original_length: int,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """(B or 1, H or 1, T or 1) factors on the queries of a pass, or None. Runs eagerly.

        Args:
            max_visible: the largest number of keys that a query attends to; None: unlimited.
        """
        if self.by_head is not None:
            return on_device(tuple(self.by_head), positions.device, dtype)[None, :, None]
        if type(self).factor is Temperature.factor:
            return None
        # padding has negative order and attends to itself
        count = positions.order.clamp(min=0).double() + 1
        if max_visible is not None and not self.ignores_window:
            count = count.clamp(max=max_visible)
        lengths = on_device(positions.lengths, count.device, torch.float64)[:, None]
        factor = self.factor(count, original_length, lengths)
        return None if factor is None else factor.to(dtype)[:, None]

    def describe(self, length: int, original_length: int) -> str:
        """The name and all settings that differ from their defaults, e.g. `temperature fixed value
        1.2`."""
        changed = self.model_dump(exclude_defaults=True, exclude={"name"})
        given = [f"{key} {value}" for key, value in changed.items()]
        return " ".join(["temperature", self.name, *given])


class NoTemperature(Temperature):
    """Logits are q·k/√D."""

    name: Literal["none"] = "none"


class FixedTemperature(Temperature):
    """A constant factor λ, or one per head: UniformScale and HeadScale of Wang et al. 2024
    (arXiv:2404.12224), for NoPE beyond the trained length, with λ chosen beforehand."""

    name: Literal["fixed"] = "fixed"
    value: Scale | list[Scale] = setting(1.0, "λ, or a list with one per query head")

    @property
    def by_head(self):
        return self.value if isinstance(self.value, list) else None

    def factor(self, count, original_length, lengths):
        assert not isinstance(self.value, list)  # or `by_head` has them
        return torch.full_like(count, self.value)


class LogNTemperature(Temperature):
    """max(1, ln n / ln L0). Su 2021 (kexue.fm/archives/8823); Chiang and Cholak 2022
    (arXiv:2202.12172)."""

    name: Literal["log_n"] = "log_n"
    length: int | None = setting(None, "L0; null: the original length", ge=2)
    clip: bool = setting(True, "at least 1; use false when training from scratch")

    def factor(self, count, original_length, lengths):
        value = count.log() / math.log(self.length or original_length)
        return value.clamp(min=1.0) if self.clip else value


class Llama4Temperature(Temperature):
    """1 + α·ln(1 + ⌊n / N⌋), on Llama 4's layers without positions; n = position + 1."""

    name: Literal["llama4"] = "llama4"
    alpha: float = setting(0.1, "α", ge=0)
    length: int = setting(8192, "N: the factor is 1 below this many keys", ge=1)

    def factor(self, count, original_length, lengths):
        return 1 + self.alpha * torch.log1p((count / self.length).floor())


class Ministral3Temperature(Temperature):
    """1 + β·ln(1 + ⌊(n − 1) / L0⌋): Llama 4's form by position instead of count, as in Ministral
    3."""

    ignores_window = True

    name: Literal["ministral3"] = "ministral3"
    beta: float = setting(0.1, "β", ge=0)
    length: int | None = setting(None, "L0; null: the original length", ge=1)

    def factor(self, count, original_length, lengths):
        blocks = ((count - 1) / (self.length or original_length)).floor()
        return 1 + self.beta * torch.log1p(blocks)


class InklingTemperature(Temperature):
    """1 + α·ln(max(n / N, 1)): Llama 4's form without steps, as in Inkling."""

    name: Literal["inkling"] = "inkling"
    alpha: float = setting(0.1, "α", ge=0)
    length: int | None = setting(None, "N; null: the original length", ge=1)

    def factor(self, count, original_length, lengths):
        share = count / (self.length or original_length)
        return 1 + self.alpha * share.clamp(min=1).log()


class PowerTemperature(Temperature):
    """(1 + n / N)^p, as in BEAM with N = 2048 and p = 0.1."""

    name: Literal["power"] = "power"
    exponent: float = setting(0.1, "p", ge=0)
    length: int = setting(2048, "N", ge=1)

    def factor(self, count, original_length, lengths):
        return (1 + count / self.length) ** self.exponent


class StretchTemperature(Temperature):
    """1 + c·ln(max(1, L / L0)), L the declared length: DroPE's inference temperature.

    Gelberg et al. 2025 (arXiv:2512.12167): c = 0.412 for models from scratch, 0.103 for SmolLM.
    """

    depends_on_length = True

    name: Literal["stretch"] = "stretch"
    c: float = setting(0.412, "c", ge=0)

    def factor(self, count, original_length, lengths):
        return 1 + self.c * (lengths / original_length).clamp(min=1).log()


class SsmaxTemperature(Temperature):
    """s_h·ln n, s_h learned per head and layer: scalable softmax. Nakanishi 2025
    (arXiv:2501.19399).

    The first token of a document has ln 1 = 0 and attends to itself whatever its logit.
    """

    learned = True

    name: Literal["ssmax"] = "ssmax"
    init: float = setting(0.43, "initial s_h", gt=0)

    def factor(self, count, original_length, lengths):
        return count.log()

    @property
    def initial(self):
        return self.init


class HeadTemperature(Temperature):
    """A learned factor λ_h per head and layer: HeadScale. Wang et al. 2024 (arXiv:2404.12224)."""

    learned = True

    name: Literal["head"] = "head"


class AdaptiveTemperature(Temperature):
    """δ + β·ln(n + 1)^γ, β = softplus(w·x) and γ = r·tanh(u·x) of the layer input x, w and u
    learned per head and layer: the scale of ASEntmax, with `weights: entmax`.

    Vasylenko et al. 2025 (arXiv:2506.16640); n + 1 as in their released code, while the paper has
    n. w and u start at 0.
    """

    learned = True

    name: Literal["adaptive"] = "adaptive"
    delta: float = setting(1.0, "δ", ge=0)
    gamma_range: float = setting(2.0, "r", gt=0)
    first_head: int = setting(
        0,
        "heads before this one have factor 1: those with ALiBi in NAPE",
        ge=0,
    )

    def factor(self, count, original_length, lengths):
        return (count + 1).log()

    def adapted(self, heads: int) -> int:
        """The number of heads whose factors differ from 1."""
        if self.first_head >= heads:
            raise ModelError(
                f"model.position.temperature.first_head = {self.first_head} leaves none of the "
                f"{heads} heads; set it below {heads}"
            )
        return heads - self.first_head

    def adapt(self, logs: Tensor, x: Tensor, weights: Tensor, heads: int) -> Tensor:
        """Factors (B, H, K) on the queries of inputs x (B, K, C).

        Args:
            logs: ln(n + 1), (B or 1, 1, K).
            weights: w and u of the adapted heads, (2, ·, C).
        """
        with no_autocast(x):
            # (2, 1, C, ·)
            projections = weights.to(logs.dtype).mT[:, None]
            slopes, exponents = (x.to(logs.dtype) @ projections).mT
        gamma = self.gamma_range * exponents.tanh()
        factors = self.delta + F.softplus(slopes) * logs**gamma
        return F.pad(factors, (0, 0, self.first_head, 0), value=1.0)


AnyTemperature = Annotated[
    NoTemperature
    | FixedTemperature
    | LogNTemperature
    | Llama4Temperature
    | Ministral3Temperature
    | InklingTemperature
    | PowerTemperature
    | StretchTemperature
    | SsmaxTemperature
    | HeadTemperature
    | AdaptiveTemperature,
    Field(discriminator="name"),
]
