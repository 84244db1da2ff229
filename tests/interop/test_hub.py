"""Errors of the Hugging Face hub, each as one sentence."""

import httpx
import pytest
from huggingface_hub import errors

from errors import InteropError
from interop.huggingface.hub import download


@pytest.mark.parametrize("kind", [errors.GatedRepoError, ConnectionResetError])
def test_models_that_cannot_be_downloaded(kind, monkeypatch):
    def fail(*_, **__):
        if kind is ConnectionResetError:
            raise kind("line one\nline two")
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
        raise kind("line one\nline two", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    named = r"hf:org/model@v2: .*cannot be downloaded .*\(line one\).*hf auth login"
    with pytest.raises(InteropError, match=named) as refusal:
        download("org/model@v2")
    assert "\n" not in str(refusal.value)
