"""Settings of the test suite: one thread, quiet third-party libraries, reproducible fuzzing.

Two folders stay in the temporary directory, `pytest-of-USER` and `torchinductor_USER`, which are
empty after tests that pass. pytest and torch make them, and another run that is under way may be
using them.
"""

import os
from collections.abc import Callable
from pathlib import Path

# Scripts that tests start import this tree, whatever is installed.
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
# Before torch starts its threads: the suite runs beside others, and sums must not depend on the
# core count.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors; these come from inside other packages, on their import."""
    # Loading Inductor or Dynamo imports torch.jit code that torch itself has deprecated.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script:DeprecationWarning:torch")
    # Eager FlexAttention is what its tests on the CPU mean to run.
    config.addinivalue_line(
        "filterwarnings", "ignore:flex_attention called without torch.compile:UserWarning"
    )


# Derandomised: a failure on one machine is a failure on all, and the suite takes the same time each
# run.
settings.register_profile("sextant", deadline=None, derandomize=True, max_examples=12)
settings.load_profile("sextant")


@pytest.fixture(autouse=True)
def _process_state():
    """Tests that draw without a generator of their own draw the same numbers in any order of tests,
    and keep subnormal numbers, which the scripts flush in their own process."""
    torch.manual_seed(0)
    torch.set_flush_denormal(False)


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled yet: the number of graphs of one function is limited."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def call(monkeypatch):
    """call(main, *words): the `main` of a script with these words of a command line."""

    def call(main: Callable, *words: object):
        monkeypatch.setattr("sys.argv", ["script.py", *map(str, words)])
        return main()

    return call
