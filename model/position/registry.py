"""Every positional scheme, by name. A new scheme is one file beside this one and one line here."""

from __future__ import annotations

from model.position.absolute import Learned, LearnedSettings, NoneSettings, Sinusoidal, SinusoidalSettings
from model.position.base import Position, PositionSettings
from model.position.bias import Alibi, AlibiSettings
from model.position.rotary import Rope, RopeSettings

SCHEMES: dict[str, tuple[type[PositionSettings], type[Position]]] = {
    "none": (NoneSettings, Position),
    "sinusoidal": (SinusoidalSettings, Sinusoidal),
    "learned": (LearnedSettings, Learned),
    "rope": (RopeSettings, Rope),
    "alibi": (AlibiSettings, Alibi),
}
