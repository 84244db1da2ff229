"""Positional schemes. To add one, add a file to `schemes/` and an entry to `SCHEMES`."""

from model.position.interface import (
    Accumulate,
    AttentionContext,
    AttentionPlan,
    ContentPlan,
    ExtrasCache,
    HeadGeometry,
    PositionalScheme,
    PositionSettings,
)
from model.position.schemes import (
    absolute,
    alibi,
    content_rotation,
    cope,
    dape,
    fire,
    fope,
    fox,
    hyperbolic,
    kerple,
    learned_rope,
    path,
    pope,
    relative_logits,
    rope,
    sandwich,
    shaw,
    stick_breaking,
    t5,
    transformer_xl,
    wall,
    xpos,
)

SCHEMES: dict[str, tuple[type[PositionSettings], type[PositionalScheme]]] = {
    # added to tokens
    "none": (absolute.NoneSettings, absolute.NoPE),
    "integer": (absolute.IntegerSettings, absolute.IntegerEncoding),
    "unit_interval": (absolute.UnitIntervalSettings, absolute.UnitIntervalEncoding),
    "binary": (absolute.BinarySettings, absolute.BinaryEncoding),
    "sine": (absolute.SineSettings, absolute.SineEncoding),
    "sinusoidal": (absolute.SinusoidalSettings, absolute.Sinusoidal),
    "learned": (absolute.LearnedSettings, absolute.Learned),
    # rotations and decays of queries and keys
    "rope": (rope.RopeSettings, rope.Rope),
    "p_rope": (rope.PRopeSettings, rope.PRope),
    "he_xu": (rope.HeXuSettings, rope.HeXu),
    "learned_rope": (learned_rope.LearnedRopeSettings, learned_rope.LearnedRope),
    "xpos": (xpos.XPosSettings, xpos.XPos),
    "fope": (fope.FopeSettings, fope.Fope),
    "pope": (pope.PopeSettings, pope.Pope),
    "hyperbolic": (hyperbolic.HyperbolicSettings, hyperbolic.Hyperbolic),
    # biases of pairs
    "alibi": (alibi.AlibiSettings, alibi.Alibi),
    "hard_alibi": (alibi.HardAlibiSettings, alibi.HardAlibi),
    "t5": (t5.T5Settings, t5.T5),
    "kerple": (kerple.KerpleSettings, kerple.Kerple),
    "sandwich": (sandwich.SandwichSettings, sandwich.Sandwich),
    "fire": (fire.FireSettings, fire.Fire),
    # weights of pairs
    "cope": (cope.CopeSettings, cope.Cope),
    "shaw": (shaw.ShawSettings, shaw.Shaw),
    "transformer_xl": (transformer_xl.TransformerXLSettings, transformer_xl.TransformerXL),
    "dape": (dape.DapeSettings, dape.Dape),
    "stick_breaking": (stick_breaking.StickBreakingSettings, stick_breaking.StickBreaking),
    # content-dependent
    "fox": (fox.FoxSettings, fox.Fox),
    "wall": (wall.WallSettings, wall.Wall),
    "relative_logits": (relative_logits.RelativeLogitsSettings, relative_logits.RelativeLogits),
    "path": (path.PathSettings, path.PathAttention),
    "selective_rope": (content_rotation.SelectiveRopeSettings, content_rotation.SelectiveRope),
    "carope": (content_rotation.CaropeSettings, content_rotation.Carope),
}

__all__ = [
    "SCHEMES",
    "Accumulate",
    "AttentionContext",
    "AttentionPlan",
    "ContentPlan",
    "ExtrasCache",
    "HeadGeometry",
    "PositionSettings",
    "PositionalScheme",
]
