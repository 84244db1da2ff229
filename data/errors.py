"""The one error of this package that a user can cause and mend."""


class DataError(ValueError):
    """Bad text, shards, tokenizer or data settings; the message names the file or key and the mend."""
