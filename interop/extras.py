"""Libraries of the optional extra `interop`, imported when they are first needed."""

import importlib
from types import ModuleType

from errors import InteropError


def load_extra(name: str) -> ModuleType:
    """Import a library of the extra `interop`. Raises InteropError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InteropError(
            f"the package {name} is required but cannot be imported ({error}); install it with "
            "`pip install -e '.[interop]'`"
        ) from error
