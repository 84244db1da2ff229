"""Values of settings as text for messages."""


def kind_of(value: object) -> str:
    """The type of a parsed value, as text for a message."""
    if value is None:
        return "null"
    names = {
        bool: "true/false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
    }
    return names.get(type(value), "a mapping" if isinstance(value, dict) else type(value).__name__)


def show(value: object, limit: int = 80) -> str:
    """A parsed value as short text for a message."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        inside = ", ".join(f"{key}: {show(item)}" for key, item in value.items())
        return f"{{{inside}}}" if len(inside) < 60 else "{...}"
    text = str(value) if value != "" else "''"
    return text if len(text) <= limit else text[: limit - 3] + "..."
