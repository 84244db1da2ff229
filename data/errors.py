"""The error class of the data package."""


class DataError(ValueError):
    """Invalid text, shards, tokenizer or data settings. The message explains the fix."""
