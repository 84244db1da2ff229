"""A server of a small run on a free port."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx
import torch

from data.settings import DataSettings
from data.tokenizers import ByteTokenizer
from interop.server.serving import Limits
from model import ModelSettings, Transformer
from tests.interop.server.running import serving
from training.checkpoint.storage import save_checkpoint
from training.config.settings import RunSettings
from training.run.directory import create_run, load

LENGTH = 32


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """A byte model with random float64 weights: rounding does not change which token is chosen."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shape = ModelSettings(dim=16, layers=2, heads=2, ffn_dim=24, position={"name": "rope"})
    settings = RunSettings(
        train_length=LENGTH,
        model=shape,
        data=DataSettings(tokenizer={"name": "bytes"}),
        training={"validation": {"targets": 8}},
    )
    model = Transformer(shape, 258, LENGTH).initialize(5).double()
    with torch.no_grad():
        model.head.weight.mul_(30)
        model.head.weight[256:] = 0  # control symbols would end the texts
    create_run(folder, settings, ByteTokenizer(), ["test"])
    save_checkpoint(folder, 0, model)
    return load(folder)


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
