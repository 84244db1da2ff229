"""Where the harness finds its packages and our tasks. This module imports neither the harness nor torch."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from errors import InteropError

# for `--include_path` and TaskManager(include_path=...)
TASKS = Path(__file__).resolve().parent / "tasks"
SHADOWED = ("evaluate", "lm_eval")  # packages with the name of one of our scripts


def prefer_installed() -> None:
    """Make `import evaluate` and `import lm_eval` find the installed packages, not our scripts of that name.

    Works wherever the directories of the scripts are on `sys.path`. The packages are executed when they are
    first used.

    Raises:
        InteropError: a package is not installed.
    """
    for name in SHADOWED:
        if hasattr(sys.modules.get(name), "__path__"):
            continue  # the package
        path = [entry for entry in sys.path if not (Path(entry or ".") / f"{name}.py").is_file()]
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            raise InteropError(
                f"the package {name} is not installed; install it with `pip install -e '.[harness]'`"
            )
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
