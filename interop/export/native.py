"""The class of transformers that represents a model exactly, with its config.json and weights.

A class qualifies if the model's settings, written as config.json of the class, are read back as the
same model. Models without such a class are exported with a generated modeling file.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from errors import InteropError
from interop.export.described import (
    ClassChoice,
    DescribedModel,
    NotRepresentable,
    RopeTable,
    resolved_mixer,
)
from interop.huggingface.config import family_keys, read_config
from interop.huggingface.families import CONVERSIONS, FAMILIES, FULL, SLIDING, Family, Keys
from interop.huggingface.weight_names import by_part, joined, to_half
from model import Transformer
from model.mixers import MIXERS
from model.mixers.mixer import LayerKind
from model.position.temperature import FixedTemperature, Ministral3Temperature

# logit of a sink without weight; finite in every dtype except float16, where it is −inf
NO_SINK = -1e9


def choose_class(model: Transformer, published: bool = False) -> ClassChoice:
    """The class of transformers that represents a model exactly.

    Args:
        published: choose a class of released models that transformers does not have.
    """
    try:
        ours = DescribedModel.of_model(model)
    except NotRepresentable as reason:
        return ClassChoice(None, str(reason))
    nearest: tuple[str, list[str]] | None = None
    names = [name for name, family in FAMILIES.items() if (family.code is not None) == published]
    for model_type, native_rope in itertools.product(names, (True, False)):
        config = write_config(ours, model_type, native_rope)
        if config is None:
            continue
        try:
            theirs = DescribedModel.of_shape(read_config(config, "config.json"))
        except InteropError:
            continue
        differing = ours.differences(theirs)
        if not differing:
            return ClassChoice(model_type, "", config, ours, theirs)
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = model_type, differing
    if nearest is None:
        return ClassChoice(None, "no class has these mixers, or none without attention")
    name, differing = nearest
    return ClassChoice(None, f"the nearest class, {name}, differs in {', '.join(differing)}")


def write_config(
    model: DescribedModel, model_type: str, native_rope: bool
) -> dict[str, Any] | None:
    """The entries of config.json that describe a model, for the settings that the class has. None
    if the class lacks one of its mixers, or if the model has no attention.

    Args:
        native_rope: write frequencies by the scaling method of the same name, not by a list of
            divisors.
    """
    family = FAMILIES[model_type]
    types = family.types_of(model.kinds)
    if types is None or not {FULL, SLIDING} & set(types):  # required by transformers' cache
        return None
    s = model.shape.model
    by_type = dict(zip(types, model.kinds, strict=True))
    first = by_type.get(SLIDING) or by_type.get(FULL) or model.kinds[0]
    values = {name: getattr(s, name) for name in type(s).model_fields} | _own(first)
    entries: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": model.shape.vocab_size,
        "max_position_embeddings": model.shape.train_length,
        **_written(family_keys(family), values),
    }
    if family.settings.get("activation") == "gelu_tanh":
        entries["hidden_activation"] = "gelu_pytorch_tanh"
    else:
        entries["hidden_act"] = "silu"
    for name, kind in by_type.items():
        entries |= _written(family.type_of(name).keys, values | _own(kind))
    windows = [kind.position.window for kind in model.kinds if kind.position.window]
    if "sliding_window" in family.defaults:
        # some classes require a number even if no layer has a window
        without = model.shape.train_length if family.layer_types is not None else None
        entries["sliding_window"] = windows[0] if windows else without
    if "use_sliding_window" in family.defaults:
        entries["use_sliding_window"] = bool(windows)
    has_types = len(family.types) > 1 or "sliding_window" in family.defaults
    if has_types and family.layer_types is not None and family.lists_types:
        entries["layer_types"] = types
    if "original_max_position_embeddings" in family.defaults:
        entries["original_max_position_embeddings"] = model.shape.original
    if family.interleaved:
        layouts = {table.layout for table in model.tables if table is not None}
        entries[family.interleaved] = layouts == {"interleaved"}
    entries["rope_parameters"] = _rope_parameters(model, family, types, native_rope)
    thetas = [0.0 if table is None else table.theta for table in model.tables]
    return entries | family.own_entries(types, model.kinds, thetas)


def _own(kind: LayerKind) -> dict[str, Any]:
    """The settings of one kind of layers that a config.json may contain."""
    own: dict[str, Any] = {
        "heads": kind.heads,
        "kv_heads": kind.kv_heads,
        "head_dim": kind.head_dim,
        "attention_multiplier": kind.attention_scale,
    }
    for key, value in resolved_mixer(kind).items():
        own[f"mixer.{key}"] = value
    return own


def _written(keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    entries = {}
    for ours, key in keys.items():
        value = values.get(ours)
        if conversion := CONVERSIONS.get(key):
            entries[conversion.name] = conversion.write(value, values)
        else:
            entries[key] = value
    entries.pop("", None)  # drops settings that follow from other settings
    return entries


def _rope_parameters(
    model: DescribedModel, family: Family, types: Sequence[str], native: bool
) -> dict[str, Any]:
    every = list(range(len(types)))
    if not family.by_type:
        return _rotary_settings(model, family, every, native)
    by_type: dict[str, Any] = {}
    for name in (FULL, SLIDING):
        layers = [i for i in every if types[i] == name] or every
        by_type[name] = _rotary_settings(model, family, layers, native)
    # They read `truncate` beside the nested form.
    truncated = [own.pop("truncate") for own in by_type.values() if "truncate" in own]
    if truncated:
        by_type["truncate"] = truncated[0]
    return by_type


def _rotary_settings(
    model: DescribedModel, family: Family, layers: Sequence[int], native: bool
) -> dict[str, Any]:
    """The rotary settings of these layers, from the first layer with positions."""
    rotated = [i for i in layers if model.tables[i] is not None]
    if not rotated:
        return {"rope_type": "default", "rope_theta": 10_000.0}
    kind = model.kinds[rotated[0]]
    table = model.tables[rotated[0]]
    assert table is not None
    parameters = table.parameters(model.shape.original, native)
    if family.partial:
        dims = 2 * len(table.frequencies)
        share = dims / kind.head_dim
        if int(kind.head_dim * share) != dims:
            share = (dims + 0.5) / kind.head_dim  # + 0.5: rounding must not lose a pair
        parameters.setdefault("partial_rotary_factor", share)
    temperature = kind.position.temperature
    if isinstance(temperature, Ministral3Temperature):
        parameters |= {
            "llama_4_scaling_beta": temperature.beta,
            "original_max_position_embeddings": temperature.length or model.shape.original,
        }
    return parameters


def weights(
    model: Transformer, state: Mapping[str, Tensor], choice: ClassChoice
) -> dict[str, Tensor]:
    """The weights by their names in transformers, with factors folded in and rows of queries and
    keys in the layout of transformers."""
    ours = choice.ours
    theirs = choice.theirs
    assert choice.model_type and ours and theirs
    family = FAMILIES[choice.model_type]
    own = by_part(state, model)
    own = {name: weight for name, weight in own.items() if not name.startswith("position.")}
    if model.settings.width_ratio != 1:
        own["norm.weight"] = own["norm.weight"] / model.settings.width_ratio
    for i, (kind, table) in enumerate(zip(ours.kinds, ours.tables, strict=True)):
        layer = f"layers.{i}"
        prefix = f"{layer}.attention."
        scale = own.pop(f"{prefix}position.scale", None)
        target = theirs.kinds[i]
        if MIXERS[kind.mixer.name][1].has_attention_weights:
            factor = _factor(kind, scale) / _factor(target, None)
            if (factor - 1).abs().max() > 1e-12:
                _multiply_queries(own, prefix, kind, factor)
        their_table = theirs.tables[i]
        if table is not None and their_table is not None and table.layout != their_table.layout:
            _to_half(own, prefix, kind, table)
        if target.position.sink_logit == "learned" and f"{prefix}position.sink" not in own:
            value = 0.0 if kind.position.sink_logit == "zero" else NO_SINK
            own[f"{prefix}position.sink"] = own["norm.weight"].new_full((kind.heads,), value)
        if theirs.shape.model.layer_scale:
            own.setdefault(f"{layer}.scale", own["norm.weight"].new_ones(1))
    named, left = family.weight_map(model.settings, own)
    assert not left, f"{choice.model_type} has no {left}"
    heads = theirs.shape.model.heads
    return {
        name: joined(name, [own[part] for part in parts], heads, family.one_plus_norms)
        for name, parts in named.items()
    }


def _factor(kind: LayerKind, scale: Tensor | None) -> Tensor:
    """(H,) float64 constant factors on q·k; `scale` is the learned temperature."""
    temperature = kind.position.temperature
    factor = torch.full((kind.heads,), kind.attention_scale, dtype=torch.float64)
    if scale is not None:
        return factor * scale.cpu().double()
    if isinstance(temperature, FixedTemperature):
        return factor * torch.tensor(temperature.value, dtype=torch.float64)
    return factor


def _multiply_queries(own: dict[str, Tensor], prefix: str, kind: LayerKind, factor: Tensor) -> None:
    """Multiply the weights that compute the queries by factors (H,)."""
    names = [f"{prefix}wq.weight", f"{prefix}wq.bias"]
    if kind.mixer.name == "attention" and kind.qk_norm:
        names = [f"{prefix}q_norm.weight"]
        factor = factor[:1]
    for name in names:
        if name in own:
            weight = own[name]
            by_row = factor.repeat_interleave(len(weight) // len(factor))
            if weight.ndim == 2:
                by_row = by_row[:, None]
            own[name] = (weight.double() * by_row).to(weight.dtype)


def _to_half(own: dict[str, Tensor], prefix: str, kind: LayerKind, table: RopeTable) -> None:
    rotated = 2 * len(table.frequencies)
    has_shared_norms = kind.qk_norm is True  # norm weights of one head
    rows = {
        "wq": (kind.heads, 0),
        "wk": (kind.kv_heads, 0),
        "q_norm": (1 if has_shared_norms else kind.heads, 0),
        "k_norm": (1 if has_shared_norms else kind.kv_heads, 0),
    }
    if kind.mixer.name == "latent":  # the rotated slice follows the unrotated features
        rows = {
            "wq": (kind.heads, kind.mixer.unrotated_dim),
            "w_down": (1, kind.mixer.rank),
        }
    for module, (heads, start) in rows.items():
        for name in (f"{prefix}{module}.weight", f"{prefix}{module}.bias"):
            if name in own:
                own[name] = to_half(own[name], heads, rotated, start)
