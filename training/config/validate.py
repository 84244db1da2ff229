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

from training.config.schema import LIMITS, SUFFIXED, SchemaNode, leaves, walk
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
    "training.lr_schedule": "lr_scheduler scheduler lr_scheduler_type",
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
# Names of earlier versions, by the end of their path.
RENAMED = {
    "training.schedule": "training.lr_schedule",
    "training.changes": "training.stages",
    "checkpoint.every": "training.checkpoint.interval",
    "checkpoint.keep_every": "training.checkpoint.keep_interval",
    "validation.every": "training.validation.interval",
    "samples.every": "training.samples.interval",
    "lasts": "duration",
    "words": "overrides",
    "rules": "methods",
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

    def reject(self, path: tuple, value: Any, text: str) -> Any:
        self.problems.append(SettingsProblem(path, text))
        return value

    def group(self, node: SchemaNode, tree: dict, path: tuple, kind: SchemaNode | None = None) -> dict:
        """The settings of a group; `kind` is the setting of which the group is one choice."""
        kept = {}
        for key, value in tree.items():
            if (field := node.fields.get(key)) is None:
                owners = [name for name, one in kind.choices.items() if key in one.fields] if kind else []
                self.reject((*path, key), value, self.unknown(node, path, key, tree.get("name"), owners))
                continue
            before = len(self.problems)
            value = self.value(field, value, (*path, key))
            if len(self.problems) == before or isinstance(value, (dict, list)):
                kept[key] = value
        return kept

    def value(self, node: SchemaNode, value: Any, path: tuple) -> Any:
        if isinstance(value, list) and node.items is not None:
            return [self.value(node.items, item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, dict):
            name = value.get("name")
            chosen = node.choices.get(name) if isinstance(name, str) else None
            if chosen is not None:
                return self.group(chosen, value, path, node)
            if "name" not in value and len(node.choices) == 1 and node.group is None:
                return self.group(next(iter(node.choices.values())), value, path)
            if node.group is not None:
                return self.group(node.group, value, path)
            if node.choices:
                known, dotted = ", ".join(node.choices), _dotted((*path, "name"))
                if "name" not in value:
                    return self.reject((*path, "name"), value, f"{dotted} is missing; known: {known}")
                guess = _guess(closest(name, node.choices, 0.5))
                text = f"{dotted} = {_show(name)} is unknown; {guess}known: {known}"
                return self.reject((*path, "name"), value, text)
            if node.values is not None:
                return {key: self.value(node.values, item, (*path, key)) for key, item in value.items()}
        elif node.is_group_only and not (value is None and node.null):
            return self.reject(path, value, _no_group(node, value, path))
        return self.scalar(node, value, path)

    def scalar(self, node: SchemaNode, value: Any, path: tuple) -> Any:
        start = f"{_dotted(path)} = {_show(value)}: "
        value = _number(node, value)
        if isinstance(value, float) and not math.isfinite(value):
            return self.reject(path, value, f"{start}must be a finite number")
        if not _fits(node, value):
            if node.types == ["string"] and isinstance(value, (bool, int, float)):
                return self.reject(path, value, f"{start}must be text; put it between quotes")
            close = difflib.get_close_matches(str(value), map(str, node.literals), n=1, cutoff=0.6)
            got = "" if isinstance(value, (str, int, float)) and value != "" else f", not {kind_of(value)}"
            limits = f", {node.range_text}" if node.range else ""
            text = f"{start}must be {_a(node.type_text)}{limits}{got}"
            return self.reject(path, value, f"{text}; did you mean {close[0]}?" if close else text)
        if _is_outside(node, value):
            return self.reject(path, value, f"{start}out of range, must be {node.range_text}")
        return value

    def unknown(self, node: SchemaNode, path: tuple, key: str, name: object, owners: list[str]) -> str:
        """The message for an unknown key; `owners` are the other choices of this kind that have it."""
        dotted, group = _dotted((*path, key)), _dotted(path)
        if owners:
            fix = f"choose {group}.name={owners[0]} first"
            if inside := [leaf for leaf in leaves(node) if leaf.rsplit(".", 1)[-1] == key]:
                fix = f"with {name} it is {group}.{inside[0]}"
            return f"{dotted} belongs to {', '.join(owners)}, not to {name}; {fix}"
        start = f"{dotted} is not a setting; "
        siblings = [_dotted((*path, one)) for one in node.fields if one != "name"]
        names = [*siblings, *leaves(self.root)]
        renamed = (new for old, new in RENAMED.items() if f".{dotted}".endswith(f".{old}"))
        ours = next(renamed, _OURS.get(key, ""))
        if ours in names or (ours := f"{group}.{ours}") in siblings:
            return f"{start}did you mean {ours}?"
        if key in ("threads", "num_threads") and not path:
            return f"{start}set the environment variable OMP_NUM_THREADS"
        if path and len(siblings) <= FEW:  # few enough to list: suggest nothing from elsewhere
            names = [one for one in names if one.startswith(f"{group}.")] or siblings

        def likeness(one: str) -> float:
            ratio = difflib.SequenceMatcher(None, key, one.rsplit(".", 1)[-1]).ratio()
            return ratio + 0.2 * (one in siblings)

        if names and likeness(best := max(names, key=likeness)) >= 0.7:
            return f"{start}did you mean {best}?"
        where = f"of {group}" if path else "at the top level"
        return f"{start}the settings {where} are {', '.join(one for one in node.fields if one != 'name')}"


def _number(node: SchemaNode, value: Any) -> Any:
    """The number that a text such as 200M stands for in a numeric setting; other values unchanged."""
    is_numeric = {"integer", "number"} & set(node.types) and "string" not in node.types
    match = re.match(SUFFIXED, value) if is_numeric and isinstance(value, str) else None
    if match is None:
        return value
    number = Decimal(match[1].replace("_", "")) * 10 ** _POWERS[match[2]]
    return int(number) if number == int(number) else float(number)


def _is_outside(node: SchemaNode, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and any(LIMITS[key][1](value, limit) for key, limit in node.range)


def _fits(node: SchemaNode, value: Any) -> bool:
    """Whether a value that is neither a group nor a mapping of a known kind has an allowed type."""
    if value is None or isinstance(value, (dict, list)):
        return node.is_any or (value is None and node.null)
    if node.is_any or any(type(one) is type(value) and one == value for one in node.literals):
        return True
    for kind, name in ((bool, "boolean"), (str, "string")):
        if isinstance(value, kind):
            return name in node.types
    return "number" in node.types or ("integer" in node.types and value == int(value))


def _no_group(node: SchemaNode, value: Any, path: tuple) -> str:
    """The message for another value where a choice by name or a group of settings is required."""
    dotted, null = _dotted(path), " or null" if node.null else ""
    if node.choices:
        close = closest(value, node.choices, 0.6)
        guess = f"did you mean {dotted}.name={close}? " if close else f"write {dotted}.name=NAME; "
        known = ", ".join(node.choices)
        return f"{dotted} = {_show(value)}: must be a choice by name{null}; {guess}known: {known}"
    assert node.group is not None
    fields = node.group.fields
    listed = f" ({', '.join(fields)})" if len(fields) <= FEW else ""
    numbers = {key: _number(field, value) for key, field in fields.items() if not field.is_group_only}
    fits = [
        key for key, one in numbers.items() if _fits(fields[key], one) and not _is_outside(fields[key], one)
    ]
    key, example = (fits[0], _show(value)) if fits and listed else (next(iter(fields)), "VALUE")
    # No override can set an item of a list.
    is_item = any(isinstance(part, int) for part in path)
    fix = f"{{{key}: {example}}}" if is_item else f"{dotted}.{key}={example}"
    return f"{dotted} = {_show(value)}: must be a group of settings{listed}{null}; write {fix}"


def from_pydantic(
    root: SchemaNode, tree: dict, error: ValidationError, known: Iterable[SettingsProblem]
) -> list[SettingsProblem]:
    """The errors of pydantic, one for each setting, without those that follow from `known` problems."""
    found: dict[tuple, SettingsProblem] = {}
    paths = [problem.path for problem in known]
    for item in error.errors(include_url=False):
        path = _path(tree, item["loc"], is_missing=item["type"] == "missing")
        if path in found or any(path[: len(k)] == k or k[: len(path)] == path for k in paths):
            continue
        found[path] = SettingsProblem(path, _message(root, _dotted(path), item))
    return list(found.values())


def _path(tree: Any, loc: tuple, is_missing: bool) -> tuple:
    """The path of an error.  pydantic's `loc` also holds the names of union members."""
    path, current = [], tree
    for part in loc[:-1] if is_missing else loc:
        in_list = isinstance(current, list) and isinstance(part, int) and part < len(current)
        if in_list or (isinstance(current, dict) and part in current):
            path.append(part)
            current = current[part]
    return (*path, loc[-1]) if is_missing else tuple(path)


def _message(root: SchemaNode, dotted: str, item: Any) -> str:
    context = item.get("ctx", {})
    if item["type"] == "missing":
        about = next((node.description for name, node in walk(root) if name == dotted), "it has no default")
        return f"{dotted} must be given: {about}"
    if item["type"] in ("value_error", "assertion_error"):
        reason = str(context["error"])
        return f"{dotted}: {reason}" if dotted and dotted not in reason else reason
    start = f"{dotted} = {_show(item['input'])}: " if dotted else f"{_show(item['input'])}: "
    return f"{start}{item['msg'][0].lower()}{item['msg'][1:]}"


def _guess(close: str | None) -> str:
    return f"did you mean {close}? " if close else ""


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
