"""Checks a tree of settings against its schema, with messages that name the nearest valid setting or choice.

`check` reports unknown keys and choices, wrong types and numbers out of range, and reads numbers such as
200M.  Constraints between settings are left to pydantic; `from_pydantic` converts its errors.
"""

import difflib
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal
from typing import Any, NamedTuple

from pydantic import ValidationError

from settings.schema import LIMITS, SUFFIXED, SchemaNode, leaves, walk
from settings.yaml_io import kind_of, show

MAX_LISTED = 12  # settings of a group that a message lists
_SUFFIX_POWERS = {"k": 3, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
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
_BY_ALIAS = {alias: name for name, aliases in ALIASES.items() for alias in aliases.split()}
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


class SettingsProblem(NamedTuple):
    """One problem at `path`; `text` starts with the dotted name."""

    path: tuple
    text: str


def closest(name: object, known: Iterable[object], cutoff: float) -> str | None:
    """The one of `known` that `name` probably means: by its name in another codebase or by spelling."""
    names = [str(one) for one in known]
    if (alias := _BY_ALIAS.get(str(name))) in names:
        return alias
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

    def group(
        self, node: SchemaNode, tree: dict, path: tuple, kind: SchemaNode | None = None
    ) -> dict:
        """The valid settings of a group; `kind` is the setting of which the group is one choice."""
        kept = {}
        for key, value in tree.items():
            if (field := node.fields.get(key)) is None:
                owners = (
                    [name for name, one in kind.choices.items() if key in one.fields]
                    if kind
                    else []
                )
                self.reject((*path, key), self.unknown(node, path, key, tree.get("name"), owners))
                continue
            before = len(self.problems)
            value = self.value(field, value, (*path, key))
            if len(self.problems) == before or isinstance(value, (dict, list)):
                kept[key] = value
        return kept

    def value(self, node: SchemaNode, value: Any, path: tuple) -> Any:
        problem = None
        if isinstance(value, list) and node.items is not None:
            return [self.value(node.items, item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, dict) and (node.choices or node.group or node.values):
            name = value.get("name")
            if isinstance(name, str) and name in node.choices:
                return self.group(node.choices[name], value, path, node)
            only = (
                [*node.choices.values()] if len(node.choices) == 1 and "name" not in value else []
            )
            if group := node.group or next(iter(only), None):
                return self.group(group, value, path)
            if node.values is not None and not node.choices:
                return {
                    key: self.value(node.values, item, (*path, key)) for key, item in value.items()
                }
            path = (*path, "name")
            close = closest(name, node.choices, 0.5)
            guess = f"did you mean {close}? " if close else ""
            text = f" = {show(name)} is unknown; {guess}" if "name" in value else " is missing; "
            problem = f"{text}known: {', '.join(node.choices)}"
        elif (
            not isinstance(value, dict) and node.is_group_only and not (value is None and node.null)
        ):
            problem = f" = {show(value)}: {_group_required(node, value, path)}"
        else:
            given = value
            (value, reason) = _read_scalar(node, value)
            problem = f" = {show(given)}: {reason}" if reason else None
        if problem is not None:
            self.reject(path, _dotted(path) + problem)
        return value

    def unknown(
        self, node: SchemaNode, path: tuple, key: str, name: object, owners: list[str]
    ) -> str:
        """The message for an unknown key; `owners` are the other choices of this kind that have it."""
        dotted = _dotted((*path, key))
        group = _dotted(path)
        if owners:
            inside = [leaf for leaf in leaves(node) if leaf.rsplit(".", 1)[-1] == key]
            fix = (
                f"with {name} it is {group}.{inside[0]}"
                if inside
                else f"choose {group}.name={owners[0]} first"
            )
            return f"{dotted} belongs to {', '.join(owners)}, not to {name}; {fix}"
        start = f"{dotted} is not a setting; "
        fields = [one for one in node.fields if one != "name"]
        siblings = [_dotted((*path, one)) for one in fields]
        names = [*siblings, *leaves(self.root)]
        renamed = (new for old, new in RENAMED.items() if f".{dotted}".endswith(f".{old}"))
        alias = next(renamed, _BY_ALIAS.get(key, ""))
        if alias in names or (alias := f"{group}.{alias}") in siblings:
            return f"{start}did you mean {alias}?"
        if key in ("threads", "num_threads") and not path:
            return f"{start}set the environment variable OMP_NUM_THREADS"
        # few enough to list: suggest nothing from elsewhere
        if path and len(siblings) <= MAX_LISTED:
            names = [one for one in names if one.startswith(f"{group}.")] or siblings

        def similarity(one: str) -> float:
            ratio = difflib.SequenceMatcher(None, key, one.rsplit(".", 1)[-1]).ratio()
            return ratio + 0.2 * (one in siblings)

        if names and similarity(best := max(names, key=similarity)) >= 0.7:
            return f"{start}did you mean {best}?"
        return f"{start}the settings {f'of {group}' if path else 'at the top level'} are {', '.join(fields)}"


def _read_scalar(node: SchemaNode, value: Any) -> tuple[Any, str | None]:
    """A value that is no group, with a text such as 200M read as a number, and why it is not allowed."""
    is_text_allowed = "string" in node.types
    is_numeric = not is_text_allowed and {"integer", "number"} & set(node.types)
    if is_numeric and isinstance(value, str) and (match := re.match(SUFFIXED, value)):
        number = Decimal(match[1].replace("_", "")) * 10 ** _SUFFIX_POWERS[match[2]]
        value = int(number) if number == int(number) else float(number)
    if isinstance(value, float) and not math.isfinite(value):
        return value, "must be a finite number"
    if not _fits(node, value):
        if node.types == ["string"] and isinstance(value, (bool, int, float)):
            return value, "must be text; put it between quotes"
        close = difflib.get_close_matches(str(value), map(str, node.literals), n=1, cutoff=0.6)
        got = (
            ""
            if isinstance(value, (str, int, float)) and value != ""
            else f", not {kind_of(value)}"
        )
        allowed = f", {node.range_text}" if node.range else ""
        types = node.type_text
        if types.startswith(("whole", "number", "list", "mapping", "path")):
            types = f"a {types}"
        elif not types.startswith(("a ", "text", "true or false")) and " or " in types:
            types = f"one of {types}"
        return value, f"must be {types}{allowed}{got}" + (
            f"; did you mean {close[0]}?" if close else ""
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value, None
    is_outside = any(LIMITS[key][1](value, limit) for key, limit in node.range)
    return value, f"out of range, must be {node.range_text}" if is_outside else None


def _fits(node: SchemaNode, value: Any) -> bool:
    """Whether a value that is neither a group nor a mapping of a known kind has an allowed type."""
    if value is None or isinstance(value, (dict, list)):
        return node.is_any or (value is None and node.null)
    if node.is_any or any(type(one) is type(value) and one == value for one in node.literals):
        return True
    if isinstance(value, (bool, str)):
        return ("boolean" if isinstance(value, bool) else "string") in node.types
    return "number" in node.types or ("integer" in node.types and value == int(value))


def _group_required(node: SchemaNode, value: Any, path: tuple) -> str:
    """The message for another value where a choice by name or a group of settings is required."""
    dotted = _dotted(path)
    null = " or null" if node.null else ""
    if node.choices:
        close = closest(value, node.choices, 0.6)
        guess = f"did you mean {dotted}.name={close}?" if close else f"write {dotted}.name=NAME;"
        return f"must be a choice by name{null}; {guess} known: {', '.join(node.choices)}"
    assert node.group is not None
    fields = node.group.fields
    key = next(iter(fields))
    example = "VALUE"
    listed = ""
    if len(fields) <= MAX_LISTED:
        listed = f" ({', '.join(fields)})"
        plain = [one for one in fields if not fields[one].is_group_only]
        fits = [one for one in plain if _read_scalar(fields[one], value)[1] is None]
        key, example = (fits[0], show(value)) if fits else (key, example)
    # No override can set an item of a list.
    is_item = any(isinstance(part, int) for part in path)
    fix = f"{{{key}: {example}}}" if is_item else f"{dotted}.{key}={example}"
    return f"must be a group of settings{listed}{null}; write {fix}"


def from_pydantic(
    root: SchemaNode, tree: dict, error: ValidationError, known: Iterable[SettingsProblem]
) -> list[SettingsProblem]:
    """The errors of pydantic, one for each setting, without those that follow from `known` problems."""
    found: dict[tuple, SettingsProblem] = {}
    paths = [problem.path for problem in known]
    errors: list[Any] = error.errors(include_url=False)
    for item in errors:
        path = ()
        current = tree
        is_missing = item["type"] == "missing"
        for part in item["loc"][:-1] if is_missing else item["loc"]:  # also names of union members
            with suppress(KeyError, IndexError, TypeError):
                current = current[part]
                path = (*path, part)
        path += item["loc"][-1:] if is_missing else ()
        if path in found or any(path[: len(k)] == k or k[: len(path)] == path for k in paths):
            continue
        dotted = _dotted(path)
        message = item["msg"][0].lower() + item["msg"][1:]
        text = (
            f"{dotted} = {show(item['input'])}: {message}"
            if dotted
            else f"{show(item['input'])}: {message}"
        )
        if is_missing:
            about = (node.description for name, node in walk(root) if name == dotted)
            text = f"{dotted} must be given: {next(about, 'it has no default')}"
        elif item["type"] in ("value_error", "assertion_error"):
            reason = str(item["ctx"]["error"])
            text = f"{dotted}: {reason}" if dotted and dotted not in reason else reason
        found[path] = SettingsProblem(path, text)
    return list(found.values())


def _dotted(path: tuple) -> str:
    return ".".join(str(part) for part in path)
