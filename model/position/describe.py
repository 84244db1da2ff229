"""A scheme as it treats a sequence of some length, in a few words: `rope, yarn s=4 (matched), window 256`."""

from __future__ import annotations

from typing import Any

from model.position.base import PositionSettings


def describe_choice(choice: PositionSettings, length: int, original_length: int) -> str:
    """Its name, and what it does about length: settings that may change after training and are no default.

    Args:
        length: declared length L of the sequence, in tokens; what follows it is shown as it comes out.
        original_length: length that stretches are measured from.
    """
    fields = type(choice).model_fields
    own = [key for key in fields if key not in PositionSettings.model_fields]
    words = [choice.name]
    for key in [*own, "temperature"]:
        value = getattr(choice, key)
        if key in choice.test_time and value != fields[key].get_default(call_default_factory=True):
            words.append(_describe(key, value, length, original_length))
    if choice.window is not None:
        words.append(f"window {choice.window}")
        if choice.sinks:
            words.append(f"{choice.sinks} sink{'s' if choice.sinks > 1 else ''}")
    return ", ".join(words)


def _describe(key: str, value: Any, length: int, original_length: int) -> str:
    if hasattr(value, "describe"):
        return value.describe(length, original_length)
    if value is True:
        return key
    if value == "auto":
        return f"{key} s={max(1.0, length / original_length):g} (matched)"
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
