"""Every positional scheme, by name. A new scheme is one file beside this one and one line here."""

from __future__ import annotations

from model.position.absolute import (
    Learned,
    LearnedSettings,
    NoneSettings,
    NoPE,
    Sinusoidal,
    SinusoidalSettings,
)
from model.position.alibi import Alibi, AlibiSettings
from model.position.base import Position, PositionSettings
from model.position.cope import Cope, CopeSettings
from model.position.counting import (
    Binary,
    BinarySettings,
    Integer,
    IntegerSettings,
    Sine,
    SineSettings,
    UnitInterval,
    UnitIntervalSettings,
)
from model.position.dape import Dape, DapeSettings
from model.position.fire import Fire, FireSettings
from model.position.fope import Fope, FopeSettings
from model.position.fox import Fox, FoxSettings
from model.position.he_xu import HeXu, HeXuSettings
from model.position.hyperbolic import Hyperbolic, HyperbolicSettings
from model.position.kerple import Kerple, KerpleSettings
from model.position.learned_rope import LearnedRope, LearnedRopeSettings
from model.position.p_rope import PRope, PRopeSettings
from model.position.path import Path, PathSettings
from model.position.pope import Pope, PopeSettings
from model.position.rotary import Rope, RopeSettings
from model.position.sandwich import Sandwich, SandwichSettings
from model.position.shaw import Shaw, ShawSettings
from model.position.stick_breaking import StickBreaking, StickBreakingSettings
from model.position.t5 import T5, T5Settings
from model.position.transformer_xl import TransformerXL, TransformerXLSettings
from model.position.turning import Carope, CaropeSettings, SelectiveRope, SelectiveRopeSettings
from model.position.xpos import XPos, XPosSettings

SCHEMES: dict[str, tuple[type[PositionSettings], type[Position]]] = {
    "none": (NoneSettings, NoPE),
    "integer": (IntegerSettings, Integer),
    "unit_interval": (UnitIntervalSettings, UnitInterval),
    "binary": (BinarySettings, Binary),
    "sine": (SineSettings, Sine),
    "sinusoidal": (SinusoidalSettings, Sinusoidal),
    "learned": (LearnedSettings, Learned),
    "rope": (RopeSettings, Rope),
    "p_rope": (PRopeSettings, PRope),
    "he_xu": (HeXuSettings, HeXu),
    "learned_rope": (LearnedRopeSettings, LearnedRope),
    "xpos": (XPosSettings, XPos),
    "fope": (FopeSettings, Fope),
    "hyperbolic": (HyperbolicSettings, Hyperbolic),
    "pope": (PopeSettings, Pope),
    "alibi": (AlibiSettings, Alibi),
    "fox": (FoxSettings, Fox),
    "path": (PathSettings, Path),
    "selective_rope": (SelectiveRopeSettings, SelectiveRope),
    "carope": (CaropeSettings, Carope),
    "t5": (T5Settings, T5),
    "kerple": (KerpleSettings, Kerple),
    "sandwich": (SandwichSettings, Sandwich),
    "fire": (FireSettings, Fire),
    "cope": (CopeSettings, Cope),
    "dape": (DapeSettings, Dape),
    "shaw": (ShawSettings, Shaw),
    "transformer_xl": (TransformerXLSettings, TransformerXL),
    "stick_breaking": (StickBreakingSettings, StickBreaking),
}
