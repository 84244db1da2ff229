"""Models of the harness tests."""

import pytest

pytest.importorskip("lm_eval")

from tests.corpora import needs_stories
from tests.interop.harness.models import byte_pair, stories_pair


@pytest.fixture(scope="session", params=["bytes", pytest.param("stories", marks=needs_stories)])
def pair(request, tmp_path_factory):
    """(run directory, transformers model, transformers tokenizer) with the same weights."""
    folder = tmp_path_factory.mktemp("pair")
    return (byte_pair if request.param == "bytes" else stories_pair)(folder)
