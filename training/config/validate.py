"""Checks a tree of settings against its schema, with messages that name the nearest valid setting or choice.

`check` reports unknown keys and choices, wrong types and numbers out of range, and reads numbers such as
200M.  Constraints between settings are left to pydantic; `from_pydantic` converts its errors.
"""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import ValidationError

from training.config.schema import SUFFIXED, SchemaNode, leaves
from training.config.yaml_io import kind_of

FEW = 12  # settings of a group that are listed
_POWERS = {"k": 3, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
# Names in other codebases, where spelling alone would suggest the wrong setting or choice.
ALIASES = {
    "training.tokens": "steps max_steps num_steps max_iters iterations epochs num_train_epochs",
    "training.batch_size": "per_device_train_batch_size global_batch_size",
    "training.micro_batch_size": "micro_batch device_batch_size gradient_accumulation_steps grad_accum",
    "training.grad_clip": "clip max_grad_norm gradient_clip_val",
    "training.precision": "dtype mixed_precision bf16 fp16",
    "training.optimizer.lr": "learning_rate max_lr",
    "training.lr_schedule.warmup": "warmup_steps warmup_iters warmup_ratio num_warmup_steps",
    "training.lr_schedule.min_lr_ratio": "final min_lr",
    "train_length": "block_size seq_len seq_length max_seq_len context_length max_position_embeddings",
    "model.dim": "n_embd d_model hidden_size embed_dim",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "groups n_kv_heads num_kv_heads num_key_value_heads",
    "model.ffn_dim": "hidden intermediate_size mlp_dim d_ff",
    "model.position.theta": "rope_theta rope_base",
    "model.position.scaling": "rope_scaling",
    "model.tie_embeddings": "tied tie_word_embeddings tie_weights",
    "training.log_interval": "log_every logging_steps",
    "training.num_threads": "threads",
    "rope": "rotary rotary_emb roformer",
    "none": "nope no_pe",
    "learned": "absolute wpe",
    "sinusoidal": "sincos vaswani",
    "t5": "relative relative_bias",
}
_OURS = {alias: name for name, aliases in ALIASES.items() for alias in aliases.split()}
_OUT_OF_RANGE = {
    "exclusiveMinimum": lambda value, limit: value <= limit,
    "minimum": lambda value, limit: value < limit,
    "exclusiveMaximum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value > limit,
}


@dataclass(frozen=True)
class SettingsProblem:
    """One problem at `path`; `text` starts with the dotted name."""

    path: tuple
    text: str


def closest(name: object, known: Iterable[object], cutoff: float) -> str | None:
    """The one of `known` that `name` probably means: by its name in another codebase or by spelling."""
    names = [str(one) for one in known]
    if (ours := _OURS.get(str(name))) in names:
        return ours
    return next(iter(difflib.get_close_matches(str(name), names, n=1, cutoff=cutoff)), None)


def check(root: SchemaNode, tree: dict) -> tuple[dict, list[SettingsProblem]]:
    """A copy of `tree` with suffixed numbers read and invalid values left out, and the problems."""
    checker = _Checker(root)
    return checker.group(root, tree, ()), checker.problems


class _Checker:
    def __init__(self, root: SchemaNode):
        self.root = root
        self.problems: list[SettingsProblem] = []

    def reject(self, path: tuple, text: str) -> None:
        self.problems.append(SettingsProblem(path, text))

    def group(self, node: SchemaNode, tree: dict, path: tuple, kind: SchemaNode | None = None) -> dict:
        """The settings of a group; `kind` is the setting of which the group is one choice."""
        kept = {}
        for key, value in tree.items():
            field = node.fields.get(key)
            if field is None:
                owners = [name for name, one in kind.choices.items() if key in one.fields] if kind else []
                self.reject((*path, key), self.unknown(node, (*path, key), tree.get("name"), owners))
            else:
                before = len(self.problems)
                value = self.value(field, value, (*path, key))
                if len(self.problems) == before or isinstance(value, (dict, list)):
                    kept[key] = value
        return kept

    def value(self, node: SchemaNode, value: object, path: tuple) -> object:
        if isinstance(value, dict):
            return self.mapping(node, value, path)
        if isinstance(value, list) and node.items is not None:
            return [self.value(node.items, item, (*path, i)) for i, item in enumerate(value)]
        if node.is_group_only and not (value is None and node.null):
            self.reject(path, _no_choice(node, value, path) if node.choices else _no_group(node, value, path))
            return value
        return self.scalar(node, value, path)

    def mapping(self, node: SchemaNode, value: dict, path: tuple) -> object:
        if node.choices:
            if "name" not in value and node.group is None and len(node.choices) == 1:
                return self.group(next(iter(node.choices.values())), value, path)
            if (chosen := _chosen(node, value)) is not None:
                return self.group(chosen, value, path, node)
            if node.group is None:
                self.reject((*path, "name"), _unknown_choice(path, value, list(node.choices)))
                return value
        if node.group is not None:
            return self.group(node.group, value, path)
        if node.values is not None:
            return {key: self.value(node.values, item, (*path, key)) for key, item in value.items()}
        return self.scalar(node, value, path)

    def scalar(self, node: SchemaNode, value: object, path: tuple) -> object:
        start = f"{_dotted(path)} = {_show(value)}: "
        is_numeric = bool({"integer", "number"} & set(node.types)) and "string" not in node.types
        if is_numeric and isinstance(value, str) and (match := re.match(SUFFIXED, value)):
            number = Decimal(match[1].replace("_", "")) * 10 ** _POWERS[match[2]]
            value = int(number) if number == int(number) else float(number)
        if isinstance(value, float) and not math.isfinite(value):
            self.reject(path, f"{start}must be a finite number")
        elif not _fits(node, value):
            if node.types == ["string"] and isinstance(value, (bool, int, float)):
                self.reject(path, f"{start}must be text; put it between quotes")
                return value
            close = difflib.get_close_matches(str(value), map(str, node.literals), n=1, cutoff=0.6)
            guess = f"; did you mean {close[0]}?" if close else ""
            got = "" if isinstance(value, (str, int, float)) and value != "" else f", not {kind_of(value)}"
            limits = f", {node.range_text}" if node.range else ""
            self.reject(path, f"{start}must be {_a(node.type_text)}{limits}{got}{guess}")
        elif any(_is_beyond(value, key, limit) for key, limit in node.range):
            self.reject(path, f"{start}out of range, must be {node.range_text}")
        return value

    def unknown(self, node: SchemaNode, path: tuple, name: object, owners: list[str]) -> str:
        """The message for an unknown key; `owners` are the other choices of this kind that have it."""
        *above, key = path
        if owners:
            fix = f"choose {_dotted((*above, 'name'))}={owners[0]} first"
            if inside := [leaf for leaf in leaves(node) if leaf.rsplit(".", 1)[-1] == key]:
                fix = f"with {name} it is {_dotted((*above, inside[0]))}"
            return f"{_dotted(path)} belongs to {', '.join(owners)}, not to {name}; {fix}"
        return f"{_dotted(path)} is not a setting; {self.nearest(node, tuple(above), key)}"

    def nearest(self, node: SchemaNode, path: tuple, key: str) -> str:
        """The end of that message: the nearest setting, or all settings of the group."""
        everywhere = list(dict.fromkeys(leaves(self.root)))
        if _OURS.get(key) in everywhere:
            return f"did you mean {_OURS[key]}?"
        if key in ("threads", "num_threads") and not path:
            return "set the environment variable OMP_NUM_THREADS"
        siblings = [one for one in node.fields if one != "name"]
        prefix = _dotted(path) + "." if path else ""
        if close := difflib.get_close_matches(key, siblings, n=1, cutoff=0.75):
            return f"did you mean {prefix}{close[0]}?"
        if path and len(siblings) <= FEW:  # small enough to list: suggest nothing from elsewhere
            everywhere = [name for name in everywhere if name.startswith(prefix)]
        if same := [name for name in everywhere if name.rsplit(".", 1)[-1] == key]:
            return f"did you mean {same[0]}?" + (f" (or {', '.join(same[1:3])})" if len(same) > 1 else "")
        if close := difflib.get_close_matches(key, siblings, n=1, cutoff=0.5):
            return f"did you mean {prefix}{close[0]}?"
        by_last_key = {name.rsplit(".", 1)[-1]: name for name in reversed(everywhere)}
        if close := difflib.get_close_matches(key, by_last_key, n=1, cutoff=0.7):
            return f"did you mean {by_last_key[close[0]]}?"
        here = f"of {_dotted(path)}" if path else "at the top level"
        return f"the settings {here} are {', '.join(siblings)}"


def _fits(node: SchemaNode, value: object) -> bool:
    """Whether a value that is neither a group nor a mapping of a known kind has an allowed type."""
    if value is None or isinstance(value, (dict, list)):
        return node.is_any or (value is None and node.null)
    if node.is_any or any(type(one) is type(value) and one == value for one in node.literals):
        return True
    if isinstance(value, bool):
        return "boolean" in node.types
    if isinstance(value, str):
        return "string" in node.types
    return "number" in node.types or ("integer" in node.types and value == int(value))  # pyright: ignore


def _is_beyond(value: object, key: str, limit: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and _OUT_OF_RANGE[key](value, limit)


def _chosen(node: SchemaNode, value: dict) -> SchemaNode | None:
    name = value.get("name")
    return node.choices.get(name) if isinstance(name, str) else None


def _no_choice(node: SchemaNode, value: object, path: tuple) -> str:
    """The message for another value where a choice by name is required."""
    names, dotted = list(node.choices), _dotted(path)
    if value in names:
        return f"{dotted} = {value}: a choice is written {dotted}.name={value} (in YAML: {{name: {value}}})"
    close = closest(value, names, 0.6)
    guess = f"did you mean {dotted}.name={close}? " if close else f"write {dotted}.name=NAME; "
    null = " or null" if node.null else ""
    return f"{dotted} = {_show(value)}: must be a choice by name{null}; {guess}known: {', '.join(names)}"


def _no_group(node: SchemaNode, value: object, path: tuple) -> str:
    """The message for another value where a group of settings is required.  It suggests the first setting of
    the group that accepts the value."""
    group = node.group
    assert group is not None
    keys, dotted = list(group.fields), _dotted(path)
    listed = f" ({', '.join(keys)})" if len(keys) <= FEW else ""
    start = f"{dotted} = {_show(value)}: must be a group of settings{listed}{' or null' if node.null else ''}"
    fitting = [key for key, field in group.fields.items() if _accepts(field, value)] if listed else []
    if any(isinstance(part, int) for part in path):  # an item of a list, which no override can set
        inside = f"{fitting[0]}: {_show(value)}" if fitting else f"{keys[0]}: VALUE"
        return f"{start}; write {{{inside}}}"
    if fitting:
        return f"{start}; write {dotted}.{fitting[0]}={_show(value)}"
    if any("default" not in field.spec for field in group.fields.values()) or not listed:
        return f"{start}; write {dotted}.{keys[0]}=VALUE and so on"
    return f"{start}; write {dotted}.{keys[0]}=VALUE and so on, or {dotted}={{}} for its defaults"


def _accepts(node: SchemaNode, value: object) -> bool:
    checker = _Checker(node)
    checker.value(node, value, ("",))
    return not checker.problems and not node.is_group_only


def _unknown_choice(path: tuple, value: dict, names: list[str]) -> str:
    dotted, listed = _dotted(path), ", ".join(names)
    if "name" not in value:
        return f"{dotted} needs a name, one of {listed}"
    name = value["name"]
    close = closest(name, names, 0.5)
    guess = f"did you mean {close}? " if close else ""
    return f"{dotted}.name = {_show(name)} is unknown; {guess}known: {listed}"


def from_pydantic(
    root: SchemaNode, tree: dict, error: ValidationError, known: Iterable[SettingsProblem]
) -> list[SettingsProblem]:
    """The errors of pydantic, one for each setting, without those that follow from `known` problems."""
    found: dict[tuple, SettingsProblem] = {}
    paths = [problem.path for problem in known]
    for item in error.errors(include_url=False):
        path, node = _locate(root, tree, item["loc"])
        if path in found or any(path[: len(k)] == k or k[: len(path)] == path for k in paths):
            continue
        found[path] = SettingsProblem(path, _message(_dotted(path), node, item))
    return list(found.values())


def _locate(root: SchemaNode, tree: Any, loc: tuple) -> tuple[tuple, SchemaNode | None]:
    """The path of an error and its setting.  pydantic's `loc` also holds the names of union members."""
    path, node, current = [], root, tree
    for i, part in enumerate(loc):
        inside = part in current if isinstance(current, dict) else False
        inside |= isinstance(current, list) and isinstance(part, int) and part < len(current)
        chosen = _chosen(node, current) if node and isinstance(current, dict) else None
        group = chosen or (node and (node.group or node))
        field = group.fields.get(part) if group else None
        if inside or (i == len(loc) - 1 and field is not None):
            path.append(part)
            current = current[part] if inside else None
            node = field or (node and (node.values or node.items))
    return tuple(path), node


def _message(dotted: str, node: SchemaNode | None, item: Any) -> str:
    value, context = item["input"], item.get("ctx", {})
    if item["type"] == "missing":
        return f"{dotted} must be given: {(node and node.description) or 'it has no default'}"
    if item["type"] in ("value_error", "assertion_error"):
        reason = str(context["error"])
        return f"{dotted}: {reason}" if dotted and dotted not in reason else reason
    start = f"{dotted} = {_show(value)}: " if dotted else f"{_show(value)}: "
    if item["type"] in ("too_short", "too_long"):
        least, most = context.get("min_length"), context.get("max_length")
        bound = f"at least {least}" if item["type"] == "too_short" else f"at most {most}"
        return f"{start}must hold {bound} items, not {context['actual_length']}"
    return f"{start}{item['msg'][0].lower()}{item['msg'][1:]}"


def _dotted(path: tuple) -> str:
    return ".".join(str(part) for part in path)


def _a(types: str) -> str:
    """The types with an article: `a whole number`, `text`, `one of a, b or c`."""
    if types.startswith(("whole", "number", "list", "mapping", "path")):
        return f"a {types}"
    if types.startswith(("a ", "text", "true or false")) or " or " not in types:
        return types
    return f"one of {types}"


def _show(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        inside = ", ".join(f"{key}: {_show(item)}" for key, item in value.items())
        return f"{{{inside}}}" if len(inside) < 60 else "{...}"
    text = str(value) if not isinstance(value, str) else value or "''"
    return text if len(text) <= 80 else text[:77] + "..."
