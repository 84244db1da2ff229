"""transformers' rotary parameters as our settings.

transformers 5 stores them in `rope_parameters`, for all layers or nested by layer type. Older
versions have `rope_theta` beside `rope_scaling`, in which `rope_type` was first called `type`.
`rope_scaling` overrides `rope_parameters`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from errors import InteropError
from interop.huggingface.families import FULL, SLIDING, Family
from interop.huggingface.reader import ConfigReader, shown
from model.position.scaling import plain_frequencies, ramp_ends

NESTED = (FULL, SLIDING)
_CURRENT = "rope_parameters"
_LEGACY = "rope_scaling"
# Kinds with the same parameters as our scaling methods.
FACTOR_KINDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
REFERS_TO_LENGTH = ("llama3", "yarn", "longrope")  # kinds whose frequencies depend on L0


@dataclass(frozen=True)
class RopeSource:
    """The rotary parameters of one layer type.

    Attributes:
        parameters: the keys of `rope_parameters`.
        config: the keys beside `rope_parameters`.
        head_dim: number of features of each head.
        family: the model's family.
        is_latent: whether the layers have latent attention.
    """

    parameters: ConfigReader
    config: ConfigReader
    head_dim: int
    family: Family
    is_latent: bool

    @property
    def train_length(self) -> int:
        return self.config.number("max_position_embeddings", int)

    @property
    def original_length(self) -> int:
        """L0. As in transformers, the key beside the parameters overrides the key inside them, but
        not inside parameters of layer types."""
        key = "original_max_position_embeddings"
        outside = None if self.family.by_type else self.config.number(key, int, None)
        return outside or self.parameters.number(key, int, self.train_length)

    @property
    def kind(self) -> Any:
        """The name of the kind of frequencies."""
        given = [self.parameters.get(key) for key in ("rope_type", "type")]
        kind = next((value for value in given if value is not None), "default")
        return "longrope" if kind == "su" else kind  # `su` was Phi-3's first name for longrope

    @property
    def share(self) -> float:
        """`partial_rotary_factor`; the key beside the parameters is the default."""
        inside = self.parameters.number("partial_rotary_factor", float, None)
        return inside or self.config.number("partial_rotary_factor", float, 1.0)

    @property
    def fraction(self) -> float:
        """The share of rotated features."""
        if self.kind == "proportional":
            return 1.0
        key = "partial_rotary_factor"
        share = self.share
        if share == 1:
            return 1.0
        if not self.family.partial or share > 1:
            limit = "at most 1" if self.family.partial else "1 in this family"
            raise InteropError(f"{self.config.file}: {key} must be {limit}, got {share}")
        if int(self.head_dim * share) % 2 or int(self.head_dim * share) < 2:
            raise InteropError(
                f"{self.config.file}: {key} {share} rotates {int(self.head_dim * share)} of "
                f"{self.head_dim} features, which is not a positive even number"
            )
        return share

    @property
    def dims(self) -> int:
        """The number of rotated features."""
        return int(self.head_dim * self.fraction)

    @property
    def theta(self) -> float:
        inside = self.parameters.number("rope_theta", float, None)
        return inside or self.config.number("rope_theta", float, 10_000.0)

    @property
    def factor(self) -> float:
        """The stretch factor; by default the ratio of the two lengths, as in transformers."""
        ratio = self.train_length / self.original_length
        return self.parameters.number("factor", float, ratio)


def rope_parameters(config: ConfigReader, by_type: bool) -> dict[str, ConfigReader]:
    """The rotary parameters by layer type; a single entry `""` if all layers share them."""
    if by_type:
        return _by_layer_type(config)
    key = _LEGACY if config.object(_LEGACY) else _CURRENT
    parameters = config.within(key)
    if any(name in parameters.values for name in NESTED):
        raise InteropError(
            f"{config.file}: {key} of {config.get('model_type')} cannot be nested by layer type: "
            "transformers does not read the inner parameters"
        )
    return {"": parameters}


def _nested(parameters: ConfigReader) -> dict[str, ConfigReader]:
    # transformers reads `truncate` only outside the nested parameters.
    truncate = {"truncate": parameters.get("truncate")}
    return {name: parameters.within(name).replaced(**truncate) for name in NESTED}


def _by_layer_type(config: ConfigReader) -> dict[str, ConfigReader]:
    """Rope parameters by layer type. In OLMo 3 and Gemma 3, `rope_scaling` applies to layers
    without windows, and `rope_parameters` are nested."""
    parameters = config.within(_CURRENT)
    if parameters.values and not any(name in parameters.values for name in NESTED):
        raise InteropError(
            f"{config.file}: {_CURRENT} of {config.get('model_type')} must have "
            f"{' and '.join(NESTED)}: transformers ignores {', '.join(parameters.values)} outside "
            "of them"
        )
    full, windowed = NESTED
    by_type = _nested(parameters)
    by_type[full] = by_type[full].replaced(**config.object(_LEGACY))
    if by_type[windowed].get("rope_theta") is not None:
        return by_type
    local = config.number("rope_local_base_freq", float, None)
    theta = config.number("rope_theta", float)
    if local is None and theta != config.defaults["rope_theta"]:
        raise InteropError(
            f"{config.file}: rope_theta = {theta:g} cannot be imported: transformers ignores it "
            f"in OLMo 3's layers with windows; set rope_theta in {_CURRENT}.{windowed}"
        )
    return by_type | {windowed: by_type[windowed].replaced(rope_theta=local or theta)}


def read_rope(source: RopeSource) -> tuple[dict[str, Any], int | None]:
    """Our settings of RoPE, and the length L0 to which the scaling refers; None if it refers to no
    length.

    Raises:
        InteropError: the kind is unknown, or transformers treats the parameters differently.
    """
    parameters = source.parameters
    known = source.family.rope_types or _KINDS
    if not isinstance(source.kind, str) or source.kind not in known:
        raise InteropError(
            f"{parameters.file}: rope_type {shown(source.kind)} cannot be imported; known: "
            f"{', '.join(known)}"
        )
    interleaved = source.family.interleaved
    is_interleaved = interleaved is not None and source.config.flag(interleaved)
    settings = {
        "name": "rope",
        "theta": source.theta,
        "layout": "interleaved" if is_interleaved else "half",
        **_temperature(source),
    }
    if source.kind == "proportional":
        settings |= {"name": "p_rope", "share": source.share}
    if source.config.object("rope_config").get("imag"):
        settings["imaginary"] = True
    settings["scaling"], original_length = _KINDS[source.kind](source)
    if source.fraction != 1:
        settings["fraction"] = source.fraction
    return settings, original_length


def _temperature(source: RopeSource) -> dict[str, Any]:
    """Factors on q·k among the rotary parameters: Ministral 3's, and DeepSeek's for yarn."""
    number = source.parameters.number
    if temperature := source.family.position.get("temperature"):
        length = source.original_length
        if source.kind not in REFERS_TO_LENGTH:  # transformers then reads only the key inside
            length = number("original_max_position_embeddings", int)
        beta = number("llama_4_scaling_beta", float)
        return {"temperature": temperature | {"beta": beta, "length": length}}
    if not source.is_latent or source.kind == "default":
        return {}
    if not source.parameters.get("mscale_all_dim"):
        return {}
    factor = max(1.0, number("factor", float))
    scale = 0.1 * number("mscale_all_dim", float) * math.log(factor) + 1
    return {"temperature": {"name": "fixed", "value": scale * scale}}


def _by_factors(source: RopeSource) -> tuple[dict[str, Any], int | None]:
    """transformers recomputes `dynamic` frequencies when a cached text grows, and keeps the old
    keys. Our frequencies are those of a full forward pass of the declared length."""
    keys = FACTOR_KINDS[source.kind]
    numbers = {key: source.parameters.number(key, float) for key in keys}
    lengths = {"dynamic": source.train_length, "llama3": source.original_length}
    return {"name": source.kind, **numbers}, lengths.get(source.kind)


def _proportional(source: RopeSource) -> tuple[dict[str, Any], None]:
    factor = source.parameters.number("factor", float, 1.0)
    return {"name": "none"} if factor == 1 else {"name": "linear", "factor": factor}, None


def _yarn(source: RopeSource) -> tuple[dict[str, Any], int]:
    number = source.parameters.number
    fast = number("beta_fast", float, 32.0)
    slow = number("beta_slow", float, 1.0)
    _check_ramp(source, fast, slow)
    settings = {
        "name": "yarn",
        "factor": source.factor,
        "beta_fast": fast,
        "beta_slow": slow,
        "ramp": "dim",
        "truncate": source.parameters.get("truncate") is None or source.parameters.flag("truncate"),
        "attention_factor": number("attention_factor", float, None),
    }
    # DeepSeek's form of the amplitude; transformers reads 0 as absent
    mscales = {key: source.parameters.get(key) for key in ("mscale", "mscale_all_dim")}
    if settings["attention_factor"] is None and all(mscales.values()):
        settings |= {key: number(key, float) for key in mscales}
    return settings, source.original_length


def _check_ramp(source: RopeSource, fast: float, slow: float) -> None:
    """Refuse a yarn ramp outside the rotated pairs, which transformers reverses."""
    if fast <= slow:
        return  # our settings refuse these values
    if source.dims < 4:
        raise InteropError(
            f"{source.parameters.file}: yarn requires at least 4 rotated features, got "
            f"{source.dims}"
        )
    frequencies = plain_frequencies(source.theta, source.dims)
    low, high = ramp_ends(frequencies, source.original_length, fast, slow)
    if high <= 0 or low > source.dims - 1:
        raise InteropError(
            f"{source.parameters.file}: yarn cannot be imported with "
            f"original_max_position_embeddings = {source.original_length}: no rotary pair "
            f"completes beta_slow = {slow:g} to beta_fast = {fast:g} rotations within it, and "
            "transformers then reverses the ramp"
        )


def _longrope(source: RopeSource) -> tuple[dict[str, Any], int]:
    """The list of divisors follows the declared length; transformers switches when a text crosses
    L0."""
    width, heads = (source.config.size(key) for key in ("hidden_size", "num_attention_heads"))
    if source.fraction != 1 and source.head_dim != width // heads:
        raise InteropError(
            f"{source.parameters.file}: longrope of a part of each head requires head_dim = "
            "hidden_size / num_attention_heads in transformers"
        )
    pairs = source.dims // 2
    lists = {}
    for key in ("short_factor", "long_factor"):
        divisors = source.parameters.numbers(key)
        if divisors is None or len(divisors) != pairs or 0 in divisors:
            raise InteropError(
                f"{source.parameters.file}: longrope requires {key}, a list of {pairs} numbers "
                "above 0, one per rotary pair"
            )
        lists[key] = divisors
    amplitude = source.parameters.number("attention_factor", float, None)
    if amplitude is None and source.factor <= 1:
        amplitude = 1.0
    factor = max(1.0, source.factor)
    return {
        "name": "longrope",
        "factor": factor,
        **lists,
        "attention_factor": amplitude,
    }, source.original_length


_KINDS: dict[str, Callable[[RopeSource], tuple[dict[str, Any], int | None]]] = {
    "default": lambda source: ({"name": "none"}, None),
    **dict.fromkeys(FACTOR_KINDS, _by_factors),
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
