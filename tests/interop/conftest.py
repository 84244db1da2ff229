"""A folder as transformers saves it."""

import pytest
from transformers.utils import logging

from tests.interop.models import make

logging.disable_progress_bar()


@pytest.fixture
def folder(tmp_path):
    """A saved Llama, to be damaged."""
    make("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    return tmp_path
