"""A Hugging Face config.json as our settings, and the reverse. Configurations that our decoder
would compute differently are refused."""

import difflib
import itertools
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from errors import InteropError
from interop.huggingface.families import (
    CONVERSIONS,
    DIFFERENCES,
    FAMILIES,
    FULL,
    SLIDING,
    TABLE,
    Family,
    Keys,
)
from interop.huggingface.reader import UNLIMITED, ConfigReader, Stored, is_number, shown
from interop.huggingface.rope_config import RopeSource, read_rope, rope_parameters
from model import ModelSettings

GENERATED = "sextant"  # model_type of folders with a generated modeling file


@dataclass(frozen=True)
class ImportedShape:
    """The description of a model in a config.

    Attributes:
        family: the model family; None for a folder exported by us with a generated modeling file,
            whose weights have our names.
    """

    family: Family | None
    model: ModelSettings
    vocab_size: int
    train_length: int
    original_length: int | None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def original(self) -> int:
        """The length L0, which is the trained length if no scaling refers to L0."""
        return self.original_length or self.train_length


KEYS: Keys = TABLE["keys"]
OPTIONAL_KEYS: Keys = TABLE["optional_keys"]


def family_keys(family: Family) -> dict[str, str]:
    """The keys of a family's model settings, by setting."""
    optional = {ours: key for ours, key in OPTIONAL_KEYS.items() if key in family.defaults}
    return {**KEYS, **optional, **family.keys}


def read_config(config: dict[str, Any], file: str, stored: Stored = UNLIMITED) -> ImportedShape:
    """The model that a config describes.

    Args:
        config: the parsed config.json.
        file: name of the file, for messages.
        stored: the tensors and numbers in the weights, which limit every size.

    Raises:
        InteropError: a key is missing, invalid, or requires a computation that our decoder does not
            have; names the key.
    """
    if config.get("model_type") == GENERATED:
        family = None
        reader = ConfigReader(config, file, stored)
        settings = reader.get("settings")
        _check_sizes(ConfigReader({}, f"{file}: settings", stored), settings)
        train_length = reader.number("train_length", int)
        original_length = reader.number("original_length", int)
    else:
        family = _family(config, file)
        reader = ConfigReader(config, file, stored, family.defaults, family.computed)
        _refuse(reader, family)
        settings = _read(reader, family_keys(family)) | dict(family.settings)
        layers, original_length = _layers(reader, family, settings["head_dim"])
        settings |= _pattern(layers)
        if all("mixer" in layer for layer in layers):  # no layer scales q·k by it
            settings.pop("attention_multiplier", None)
        train_length = reader.number("max_position_embeddings", int)
    return ImportedShape(
        family=family,
        model=_settings(settings, f"{file}: settings" if family is None else file),
        vocab_size=reader.size("vocab_size"),
        train_length=train_length,
        original_length=original_length,
        bos_id=next(iter(_ids(reader, "bos_token_id")), None),
        eos_ids=_ids(reader, "eos_token_id"),
    )


def _settings(values: Any, file: str) -> ModelSettings:
    try:
        return ModelSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ": ".join(filter(None, [file, ".".join(map(str, first["loc"]))]))
        raise InteropError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error


def _check_sizes(reader: ConfigReader, settings: Any) -> None:
    """Compare the sizes in a generated folder's settings, including those of layer kinds, with the
    weights."""
    for key, value in settings.items() if isinstance(settings, dict) else ():
        _check_sizes(reader, value)
        if key in TABLE["sizes"] and isinstance(value, int | float):
            reader.check_size(key, value)


def _family(config: dict[str, Any], file: str) -> Family:
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        why = DIFFERENCES.get(model_type)
        near = difflib.get_close_matches(model_type, FAMILIES, n=1, cutoff=0.8)
        hint = f" ({why})" if why else f" (did you mean {near[0]}?)" if near else ""
        raise InteropError(
            f"{file}: model_type = {shown(model_type)} cannot be imported{hint}; supported: "
            f"{', '.join(FAMILIES)}"
        )
    architectures = config.get("architectures")
    if architectures in (None, []):
        return family
    if not isinstance(architectures, list) or family.architecture not in architectures:
        raise InteropError(
            f"{file}: architectures = {shown(architectures)} cannot be imported: a {model_type} "
            f"model must be {family.architecture}"
        )
    return family


def _refuse(reader: ConfigReader, family: Family) -> None:
    """Refuse keys that the family does not define, or whose values are not supported."""
    neutral = {key: x for key, x in TABLE["neutral"].items() if key not in reader.defaults}
    for key, accepted in (neutral | dict(family.accepted)).items():
        value = reader.get(key)
        if value not in accepted:
            hint = TABLE["hints"].get(
                key, f"{reader.get('model_type')} models with it are not supported"
            )
            raise InteropError(f"{reader.file}: {key} = {shown(value)} cannot be imported: {hint}")
    dim = reader.size("hidden_size")
    heads = reader.size("num_attention_heads")
    if family.divides and dim % heads:
        raise InteropError(
            f"{reader.file}: hidden_size = {dim} is not a multiple of num_attention_heads = {heads}"
        )


def _read(reader: ConfigReader, keys: Keys) -> dict[str, Any]:
    """The settings that these keys contain."""
    values: dict[str, Any] = {}
    for ours, key in keys.items():
        default = (None,) if ours in TABLE["nullable"] else ()
        if key in CONVERSIONS:
            values[ours] = CONVERSIONS[key].read(reader)
        elif ours in TABLE["flags"]:
            values[ours] = reader.flag(key)
        elif ours in TABLE["floats"]:
            values[ours] = reader.number(key, float, *default)
        else:
            values[ours] = reader.size(key, *default)
    return {ours: value for ours, value in values.items() if value is not None}


def _layers(
    reader: ConfigReader, family: Family, head_dim: int
) -> tuple[list[dict[str, Any]], int | None]:
    """The settings of each single layer, and L0."""
    types = _layer_types(reader, family)
    family.check(reader, types)
    window = reader.number("sliding_window", int, None)
    if SLIDING in types and window is None:
        raise InteropError(f"{reader.file}: layer_types has {SLIDING}, but sliding_window is null")
    thetas = family.thetas(reader)
    by_type = rope_parameters(reader, family.by_type) if None in thetas or any(thetas) else {}
    layers: list[dict[str, Any]] = []
    lengths = set()
    for name, theta in zip(types, thetas, strict=True):
        layer_type = family.type_of(name)
        values = _read(reader, layer_type.keys)
        layer = {key: value for key, value in values.items() if "." not in key}
        layer |= {**layer_type.settings, "position": {"name": "none"}}
        if len(layer_type.mixer) > 1 or values.keys() - layer.keys():
            own = {key.partition(".")[2]: value for key, value in values.items() if "." in key}
            layer["mixer"] = {**layer_type.mixer, **own}
        if name in (FULL, SLIDING):
            if theta != 0:
                parameters = by_type.get(name) or by_type[""]
                if theta is not None:
                    parameters = parameters.replaced(rope_theta=theta)
                own_dim = layer.get("head_dim", head_dim)
                is_latent = layer_type.mixer["name"] == "latent"
                source = RopeSource(parameters, reader, own_dim, family, is_latent)
                layer["position"], length = read_rope(source)
                lengths |= {length} - {None}
            layer["position"] = {**family.position, **layer["position"]}
            if name == SLIDING:
                layer["position"]["window"] = window
        layers.append(layer)
    if len(lengths) > 1:
        raise InteropError(
            f"{reader.file}: layers with different original lengths "
            f"({', '.join(map(str, sorted(lengths)))}) cannot be imported"
        )
    return layers, next(iter(lengths), None)


def _layer_types(reader: ConfigReader, family: Family) -> list[str]:
    """The type of each layer."""
    depth = reader.size("num_hidden_layers")
    given = reader.get("layer_types")
    if family.layer_types is None:
        return [FULL if reader.get("sliding_window") is None else SLIDING] * depth
    if given is None:
        types = family.default_types(reader)
    else:
        known = [FULL, *family.types]
        known += [SLIDING] if "sliding_window" in reader.defaults else []
        types = given if isinstance(given, list) else []
        types = [TABLE["old_types"].get(str(name), name) for name in types]
        if len(types) < depth or not all(name in known for name in types):
            raise InteropError(
                f"{reader.file}: layer_types must be {depth} times {' or '.join(known)}, got "
                f"{shown(given)}"
            )
    return [*types[: depth - 1], FULL] if family.last_is_full else types[:depth]


def _pattern(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of a single layer kind, or `kinds` and the `pattern` with the shortest
    period."""
    kinds: dict[str, dict[str, Any]] = {}
    names = []
    for layer in layers:
        position = layer["position"]
        stem = "nope" if position["name"] == "none" else "rope"
        stem += "_window" if "window" in position else ""
        stem = layer["mixer"]["name"] if "mixer" in layer else stem
        numbered = (f"{stem}{i}" for i in itertools.count(2))
        name = next(x for x in itertools.chain([stem], numbered) if kinds.get(x, layer) == layer)
        kinds[name] = layer
        names.append(name)
    if len(kinds) == 1:
        return layers[0]
    count = len(names)
    period = next(
        p for p in range(1, count + 1) if all(names[i] == names[i % p] for i in range(count))
    )
    return {"pattern": names[:period], "kinds": kinds}


def _ids(reader: ConfigReader, key: str) -> tuple[int, ...]:
    """The token ids of a key: null, one id or several."""
    value = reader.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_number(value, int) for value in values):
        raise InteropError(f"{reader.file}: {key} must be ids of tokens, got {shown(value)}")
    return tuple(values)
