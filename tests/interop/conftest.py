"""A folder as transformers saves it."""

import pytest

from tests.interop.llamas import llama


@pytest.fixture
def folder(tmp_path):
    """A saved Llama, to be spoilt."""
    llama().save_pretrained(tmp_path)
    return tmp_path
