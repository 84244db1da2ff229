"""One-line descriptions of positional schemes, e.g. `rope, yarn s=4 (matched), window 256`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.position.base import PositionSettings


def describe_positions(kinds: Mapping[str, PositionSettings], length: int, original_length: int) -> str:
    """The schemes of all layer kinds, as `describe_choice` writes them: `near = rope | far = none`."""
    found = {kind: describe_choice(choice, length, original_length) for kind, choice in kinds.items()}
    return (
        found["all"] if list(found) == ["all"] else " | ".join(f"{kind} = {s}" for kind, s in found.items())
    )


def describe_choice(choice: PositionSettings, length: int, original_length: int) -> str:
    """The name of a scheme and its test-time settings that differ from their defaults.

    Args:
        length: declared length L of the sequence in tokens; resolves factors that are `auto`.
        original_length: reference length of scaling factors.
    """
    fields = type(choice).model_fields
    own = [key for key in fields if key not in PositionSettings.model_fields]
    parts = [choice.name]
    for key in [*own, "temperature"]:
        value = getattr(choice, key)
        if key in choice.test_time and value != fields[key].get_default(call_default_factory=True):
            parts.append(_describe(key, value, length, original_length))
    if choice.window is not None:
        parts.append(f"window {choice.window}")
        if choice.sinks:
            parts.append(f"{choice.sinks} sink{'s' if choice.sinks > 1 else ''}")
    return ", ".join(parts)


def _describe(key: str, value: Any, length: int, original_length: int) -> str:
    if hasattr(value, "describe"):
        return value.describe(length, original_length)
    if value is True:
        return key
    if value == "auto":
        return f"{key} s={max(1.0, length / original_length):g} (matched)"
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
