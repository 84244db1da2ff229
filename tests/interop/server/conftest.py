"""A server of a small run on a free port."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx
import torch

from interop.server.serving import Limits
from run_directory.run import Run
from tests.byte_runs import byte_run
from tests.interop.server.running import serving

LENGTH = 32


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """A byte model with random float64 weights: rounding does not change which token is chosen."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    return Run.open(byte_run(folder, {"name": "rope"}, LENGTH, dtype=torch.float64)).load()


@pytest.fixture(scope="session")
def address(loaded):
    with serving(loaded, Limits(rows=8, queue=1000)) as (found, _):
        yield found


@pytest.fixture
def client(address):
    with httpx.Client(base_url=address, timeout=60) as found:
        yield found


@pytest.fixture
def complete(client):
    """Post a request; returns the parsed response."""

    def ask(**body):
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return ask
