"""Sextant runs in EleutherAI's lm-evaluation-harness. Requires the extra `harness`."""

import importlib
from pathlib import Path

# for `--include_path` and TaskManager(include_path=...)
TASKS = Path(__file__).with_name("tasks")


def register_model() -> None:
    """Add `sextant` to the models of the harness.

    The harness adds its own models only while its registry is empty, so they are imported first.
    """
    importlib.import_module("lm_eval.models")
    registry = importlib.import_module("lm_eval.api.registry")
    registry.model_registry.register("sextant", target="interop.harness.lm:SextantLM")
