"""KERPLE: learned penalties that grow with the logarithm or a power of distance."""

from typing import Literal

import torch
from torch import Tensor

from model.attention.mask import precise
from model.position.distance_bias import DistanceBias, DistanceSettings
from model.position.interface import SharableSettings, uniform
from settings.fields import setting

SMALLEST = 1e-2  # minimum of all learned parameters, as in the released code

LARGEST_POWER = 2.0  # beyond it the kernel is no longer conditionally positive definite

# For each form and parameter: range of its uniform initialization (low, high), and its maximum.
RANGES: dict[str, dict[str, tuple[float, float, float | None]]] = {
    "log": {"r1": (0.0, 2.0, None), "r2": (0.0, 1.0, None)},
    "power": {"r1": (0.0, 1.0, None), "r2": (0.0, 2.0, LARGEST_POWER)},
    "log3": {"r1": (0.0, 2.0, None), "r2": (0.0, 1.0, None), "r3": (1.0, 1.0, LARGEST_POWER)},
}


class KerpleSettings(DistanceSettings, SharableSettings):
    """A learned penalty per head that grows with the logarithm or a power of distance (Chi et al.
    2022)."""

    name: Literal["kerple"] = "kerple"
    form: Literal["log", "power", "log3"] = setting(
        "log",
        "r1·ln(1 + r2·d), r1·d^r2 or r1·ln(1 + r2·d^r3)",
    )
    shared: bool = setting(True, "share the learned parameters between all layers")


def power_of(d: Tensor, exponent: Tensor) -> Tensor:
    """d^exponent for d ≥ 0 and exponents above 0: exactly 0 at 0, with a finite gradient there."""
    beyond = d > 0
    return torch.where(beyond, torch.where(beyond, d, 1.0) ** exponent, 0.0)


class Kerple(DistanceBias):
    """log: −r1·ln(1 + r2·d); power: −r1·d^r2; log3: −r1·ln(1 + r2·d^r3), with d = |i − j| / s.

    Chi et al. 2022 (arXiv:2205.09921): the logarithmic, power and 3-parameter-log kernels. Per head
    r1, r2, r3 ≥ 1e-2, and the exponents (r2 of power, r3 of log3) are at most 2. As in the released
    code, the parameters themselves are clamped to these ranges before each training pass, so that
    clamped parameters still get gradients. Initialized as in the released code: log r1 ~ U(0, 2),
    r2 ~ U(0, 1); power r1 ~ U(0, 1) and the exponent ~ U(0, 2). log3, which has no released code,
    is initialized as log: r3 = 1.
    """

    settings: KerpleSettings

    def setup(self):
        super().setup()
        self._ranges = RANGES[self.settings.form]
        for name, (low, high, _) in self._ranges.items():
            self.register_parameter(name, self.learned((self.geometry.heads,), uniform(low, high)))

    def tables(self, positions, dtype):
        if self.training and torch.is_grad_enabled():
            for name, (_, _, largest) in self._ranges.items():
                # `.data` avoids autograd's version check: the backward of another pass may be
                # pending.
                self.get_parameter(name).data.clamp_(SMALLEST, largest)
        return super().tables(positions, dtype)

    def _values(self) -> list[Tensor]:
        # Clamp before the cast: a parameter at its limit must get a gradient.
        return [
            precise(self.get_parameter(name).clamp(SMALLEST, largest))
            for name, (_, _, largest) in self._ranges.items()
        ]

    def bias(self, context):
        stretch = context.tables[0]
        r1, r2, *more = self._values()
        form = self.settings.form

        def bias(row, h, d):
            d = d.abs()
            if form == "log":
                return -r1[h] * torch.log1p(r2[h] * d / stretch[row])
            d = d / stretch[row]
            if form == "power":
                return -r1[h] * power_of(d, r2[h])
            return -r1[h] * torch.log1p(r2[h] * power_of(d, more[0][h]))

        return bias
