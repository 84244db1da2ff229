"""Messages for invalid settings, which name the nearest valid setting or choice."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from settings.fields import Accepted, accepted, leaves, show

MAX_LISTED = 12  # settings of a group that a message lists
# Names in other codebases for which spelling alone would suggest the wrong setting or choice.
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
    spelling of its last part: `lr`, `learning_rate` and `lrr` mean training.optimizer.lr. '' if
    there is none."""
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
    problems: dict[tuple, list[Any]] = {}
    for item in error.errors(include_url=False):
        problems.setdefault(_path_in(tree, item), []).append(item)
    # pydantic reports every member of a union: the innermost problem is the one to fix.
    return [
        (path, _message(cls, tree, path, items))
        for path, items in problems.items()
        if not any(path == other[: len(path)] and path != other for other in problems)
    ]


def _path_in(tree: Any, item: Any) -> tuple:
    """The keys and indices of an error's location, without the names of choices and of members of
    unions."""
    path = ()
    value = tree
    for i, part in enumerate(item["loc"], 1):
        is_index = isinstance(part, int) and isinstance(value, list) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]
            path = (*path, part)
        elif item["type"] == "missing" and i == len(item["loc"]):
            path = (*path, part)
    return path


def _found(cls: type[BaseModel], tree: Any, path: tuple) -> tuple[Any, Accepted]:
    """The value at a path below settings of a class, and what is accepted there."""
    value = tree
    accepts = Accepted(group=cls)
    for key in path:
        if accepts.inner is not None:
            accepts = accepts.inner
        else:
            accepts = accepted(_chosen(value, accepts), key)
        value = value[key]
    return value, accepts


def _chosen(value: Any, accepts: Accepted) -> Any:
    """The settings class that a value chooses by its `name`, or the only class; the first class if
    the value has no known name."""
    first = next(iter(accepts.choices.values()), accepts.group)
    return accepts.choices.get(value.get("name"), first)


def _message(cls: type[BaseModel], tree: dict, path: tuple, items: list[Any]) -> str:
    kind = items[0]["type"]
    dotted = ".".join(map(str, path))
    if kind in ("value_error", "assertion_error"):
        reason = str(items[0]["ctx"]["error"])
        return reason if dotted in reason else f"{dotted}: {reason}"
    if kind == "extra_forbidden":
        return _unknown(cls, tree, path)
    if kind == "missing":
        value, accepts = _found(cls, tree, path[:-1])
        field = _chosen(value, accepts).model_fields[path[-1]] if isinstance(value, dict) else None
        return f"{dotted} is missing" + (f": {field.description}" if field else "")
    value, accepts = _found(cls, tree, path)
    known = ", ".join(accepts.choices)
    if kind.startswith("union_tag"):
        close = nearest(value.get("name"), accepts.choices, 0.5)
        guess = f"did you mean {close}? " if close else ""
        return f"{dotted}.name = {show(value.get('name'))} is unknown; {guess}known: {known}"
    if accepts.is_group_only and accepts.choices and not isinstance(value, dict):
        close = nearest(value, accepts.choices, 0.6) or "CHOICE"
        return f"{dotted} = {show(value)}: write {dotted}.name={close}; known: {known}"
    if accepts.is_group_only and not isinstance(value, dict):
        names = ", ".join(accepts.group.model_fields)  # type: ignore[union-attr]
        return f"{dotted} = {show(value)}: must be a group of settings ({names})"
    # Each member of a union such as `int | Literal["auto"]` has a reason.
    reasons = [item["msg"].replace("Input should be", "must be") for item in items]
    return f"{dotted} = {show(value)}: {', or '.join(dict.fromkeys(reasons))}"


def _unknown(cls: type[BaseModel], tree: dict, path: tuple) -> str:
    """The message for a key that is no setting."""
    *above, key = path
    group = ".".join(map(str, above))
    dotted = ".".join(map(str, path))
    value, accepts = _found(cls, tree, tuple(above))
    chosen = _chosen(value, accepts)
    owners = [name for name, other in accepts.choices.items() if key in other.model_fields]
    if owners:
        name = value.get("name")
        inside = [leaf for leaf in leaves(chosen) if leaf.rpartition(".")[2] == key]
        fix = f"choose {group}.name={owners[0]} first"
        if inside:
            fix = f"with {name} it is {group}.{inside[0]}"
        return f"{dotted} belongs to {', '.join(owners)}, not to {name}; {fix}"
    fields = [name for name in chosen.model_fields if name != "name"]
    siblings = [f"{group}.{name}" if group else name for name in fields]
    others = leaves(cls)
    if group and len(fields) <= MAX_LISTED:  # few enough to list: suggest nothing from elsewhere
        others = [name for name in others if name.startswith(f"{group}.")]
    fix = f"the settings {f'of {group}' if group else 'at the top level'} are {', '.join(fields)}"
    if close := nearest(key, siblings, 0.6) or nearest(key, others):
        fix = f"did you mean {close}?"
    return f"{dotted} is not a setting; {fix}"
