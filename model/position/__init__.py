"""Positional schemes. To add one, add its classes to `schemes/` and an entry to `SCHEMES`."""

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
    biases,
    content_based,
    pair_weights,
    rope,
    rotations,
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
    "learned_rope": (rotations.LearnedRopeSettings, rotations.LearnedRope),
    "clex": (rotations.ClexSettings, rotations.Clex),
    "xpos": (rotations.XPosSettings, rotations.XPos),
    "fope": (rotations.FopeSettings, rotations.Fope),
    "pope": (rotations.PopeSettings, rotations.Pope),
    "hyperbolic": (rotations.HyperbolicSettings, rotations.Hyperbolic),
    # biases of pairs
    "alibi": (biases.AlibiSettings, biases.Alibi),
    "hard_alibi": (biases.HardAlibiSettings, biases.HardAlibi),
    "t5": (biases.T5Settings, biases.T5),
    "kerple": (biases.KerpleSettings, biases.Kerple),
    "sandwich": (biases.SandwichSettings, biases.Sandwich),
    "fire": (biases.FireSettings, biases.Fire),
    # weights of pairs
    "cope": (pair_weights.CopeSettings, pair_weights.Cope),
    "shaw": (pair_weights.ShawSettings, pair_weights.Shaw),
    "transformer_xl": (pair_weights.TransformerXLSettings, pair_weights.TransformerXL),
    "dape": (pair_weights.DapeSettings, pair_weights.Dape),
    "stick_breaking": (pair_weights.StickBreakingSettings, pair_weights.StickBreaking),
    # content-dependent
    "fox": (content_based.FoxSettings, content_based.Fox),
    "grape_a": (content_based.GrapeASettings, content_based.GrapeA),
    "grape_ap": (content_based.GrapeApSettings, content_based.GrapeAp),
    "wall": (content_based.WallSettings, content_based.Wall),
    "relative_logits": (content_based.RelativeLogitsSettings, content_based.RelativeLogits),
    "path": (content_based.PathSettings, content_based.PathAttention),
    "selective_rope": (content_based.SelectiveRopeSettings, content_based.SelectiveRope),
    "carope": (content_based.CaropeSettings, content_based.Carope),
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
