"""Libraries of the optional extras, imported when they are first needed."""

import importlib
from types import ModuleType

from errors import InteropError


def load_extra(name: str, extra: str = "interop") -> ModuleType:
    """Import a library of an optional extra of pyproject.toml. Raises InteropError if it is not
    installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InteropError(
            f"the package {name} is required but cannot be imported ({error}); install it with "
            f"`pip install -e '.[{extra}]'`"
        ) from error
