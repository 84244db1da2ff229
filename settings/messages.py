"""Messages for invalid settings, which name the nearest valid setting or choice."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from settings.fields import Accepted, accepted, leaves, show

MAX_LISTED = 12  # settings of a group that a message lists
# Names in other codebases, where spelling alone would suggest the wrong setting or choice.
ALIASES = {
    "training.tokens": "steps max_steps num_steps max_iters iterations epochs num_train_epochs",
    "training.batch_size": "per_device_train_batch_size global_batch_size",
    "training.micro_batch_size": (
        "micro_batch device_batch_size gradient_accumulation_steps grad_accum"
    ),
    "training.grad_clip": "clip max_grad_norm gradient_clip_val",
    "training.precision": "dtype mixed_precision bf16 fp16",
    "training.optimizer.lr": "learning_rate max_lr",
    "training.lr_schedule": "schedule lr_scheduler scheduler lr_scheduler_type",
    "training.lr_schedule.warmup": "warmup_steps warmup_iters warmup_ratio num_warmup_steps",
    "training.lr_schedule.min_lr_ratio": "final min_lr",
    "train_length": (
        "block_size seq_len seq_length max_seq_len context_length max_position_embeddings"
    ),
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


def nearest(name: object, known: Iterable[str], cutoff: float = 0.7) -> str:
    """The one of `known` that `name` probably means, by its name in another codebase or by the
    spelling of its last part: `lr`, `learning_rate` and `lrr` mean training.optimizer.lr. '' for
    none."""
    by_end: dict[str, str] = {}
    for full in known:
        by_end.setdefault(full.rpartition(".")[2], full)
    if (alias := _BY_ALIAS.get(str(name), "")) in by_end.values():
        return alias
    close = difflib.get_close_matches(str(name), by_end, n=1, cutoff=cutoff)
    return by_end[close[0]] if close else ""


def problems_of(
    cls: type[BaseModel],
    tree: dict,
    error: ValidationError,
) -> list[tuple[tuple, str]]:
    """The errors of pydantic as (path in the tree, message), one for each setting."""
    problems: dict[tuple, str] = {}
    for item in error.errors(include_url=False):
        place = _Place(cls, tree, Accepted(group=cls))
        for i, part in enumerate(item["loc"], 1):
            is_missing = item["type"] == "missing" and i == len(item["loc"])
            if place.accepts and part in place.accepts.choices and place.choice is None:
                place = replace(place, choice=part)
            elif is_missing or place.contains(part):  # others are names of union members
                place = place.below(part)
        problems.setdefault(place.path, _message(place, item))
    # Of a union, pydantic reports every member: the innermost problem is the one to fix.
    return [
        (path, text)
        for path, text in problems.items()
        if not any(path == other[: len(path)] and path != other for other in problems)
    ]


@dataclass(frozen=True)
class _Place:
    """A value in a tree of settings.

    Attributes:
        accepts: what is accepted there; None for an unknown key.
        choice: the name of the choice that the value is.
        group: the settings class of the last key.
        siblings: the choices of which `group` is one, by name.
    """

    root: type[BaseModel]
    value: Any
    accepts: Accepted | None
    path: tuple = ()
    choice: str | None = None
    group: Any = None
    siblings: dict[str, type[BaseModel]] = field(default_factory=dict)

    @property
    def dotted(self) -> str:
        return ".".join(str(part) for part in self.path)

    def contains(self, key: object) -> bool:
        """Whether the value has such a key or index."""
        if isinstance(self.value, list):
            return isinstance(key, int) and key < len(self.value)
        return isinstance(self.value, dict) and key in self.value

    def below(self, key: Any) -> "_Place":
        """The place of a key or an item of the value."""
        assert self.accepts is not None
        path = (*self.path, key)
        value = self.value[key] if self.contains(key) else None
        if self.accepts.inner is not None:
            return _Place(self.root, value, self.accepts.inner, path)
        siblings = self.accepts.choices if self.choice else {}
        group: Any = siblings[self.choice] if self.choice else self.accepts.group
        accepts = accepted(group, key) if key in group.model_fields else None
        return _Place(self.root, value, accepts, path, None, group, siblings)


def _message(place: _Place, item: Any) -> str:
    kind = item["type"]
    dotted = place.dotted
    accepts = place.accepts
    if kind in ("value_error", "assertion_error"):
        reason = str(item["ctx"]["error"])
        return f"{dotted}: {reason}" if dotted and dotted not in reason else reason
    if accepts is None:
        return _unknown(place)
    if kind == "missing" and isinstance(place.path[-1], int):
        return f"{dotted} is missing"
    if kind == "missing":
        description = place.group.model_fields[place.path[-1]].description
        return f"{dotted} must be given: {description or 'it has no default'}"
    if kind.startswith("union_tag"):
        return f"{dotted}.name{_unknown_choice(place.value, accepts)}"
    if accepts.is_group_only and not isinstance(place.value, dict):
        reason = _group_required(place, accepts)
    elif kind == "finite_number":
        reason = "must be a finite number"
    elif kind.endswith(("_type", "_parsing", "literal_error", "int_from_float")):
        reason = _wrong_type(accepts, place.value)
    elif kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        reason = f"out of range, must be {accepts.limits_text}"
    else:
        reason = item["msg"][0].lower() + item["msg"][1:]
    return f"{dotted} = {show(place.value)}: {reason}"


def _wrong_type(accepts: Accepted, value: Any) -> str:
    """The message for a value of another type, or another text than those allowed."""
    if accepts.types == [str] and isinstance(value, (bool, int, float)):
        return "expected text; put it between quotes"
    limits = f", {accepts.limits_text}" if accepts.limits else ""
    kind = {list: ", not a list", dict: ", not a mapping"}.get(type(value), "")
    close = nearest(value, map(str, accepts.literals), 0.6)
    guess = f"; did you mean {close}?" if close else ""
    if accepts.numeric and (size := re.fullmatch(r"([\d.]+) ?([kKMGT])i?B", str(value))):
        guess = f"; write {size[1]}{size[2]}"
    return f"expected {accepts.type_text}{limits}{kind}{guess}"


def _unknown_choice(value: dict, accepts: Accepted) -> str:
    known = f"known: {', '.join(accepts.choices)}"
    if "name" not in value:
        return f" is missing; {known}"
    close = nearest(value["name"], accepts.choices, 0.5)
    guess = f"did you mean {close}? " if close else ""
    return f" = {show(value['name'])} is unknown; {guess}{known}"


def _group_required(place: _Place, accepts: Accepted) -> str:
    """The message for another value where a choice by name or a group of settings is required."""
    null = " or null" if accepts.null else ""
    if accepts.group is None:
        close = nearest(place.value, accepts.choices, 0.6)
        guess = f"did you mean {place.dotted}.name={close}? " if close else ""
        return f"must be a choice by name{null}; {guess}known: {', '.join(accepts.choices)}"
    names = ", ".join(accepts.group.model_fields)
    first = next(iter(accepts.group.model_fields))
    # No override can set an item of a list.
    is_item = any(isinstance(part, int) for part in place.path)
    fix = f"{{{first}: VALUE}}" if is_item else f"{place.dotted}.{first}=VALUE"
    return f"must be a group of settings ({names}){null}; write {fix}"


def _unknown(place: _Place) -> str:
    """The message for a key that is no setting."""
    *path, key = place.path
    group = ".".join(str(part) for part in path)
    dotted = place.dotted
    owners = [name for name, cls in place.siblings.items() if key in cls.model_fields]
    if owners:
        name = place.group.model_fields["name"].default
        inside = [leaf for leaf in leaves(place.group) if leaf.rpartition(".")[2] == key]
        fix = f"choose {group}.name={owners[0]} first"
        if inside:
            fix = f"with {name} it is {group}.{inside[0]}"
        return f"{dotted} belongs to {', '.join(owners)}, not to {name}; {fix}"
    fields = [name for name in place.group.model_fields if name != "name"]
    siblings = [f"{group}.{name}" if group else name for name in fields]
    others = leaves(place.root)
    if group and len(fields) <= MAX_LISTED:  # few enough to list: suggest nothing from elsewhere
        others = [name for name in others if name.startswith(f"{group}.")]
    fix = f"the settings {f'of {group}' if group else 'at the top level'} are {', '.join(fields)}"
    if close := nearest(key, siblings, 0.6) or nearest(key, others):
        fix = f"did you mean {close}?"
    return f"{dotted} is not a setting; {fix}"
