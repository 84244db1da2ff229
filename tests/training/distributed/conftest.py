"""Text that the tests of several processes train on."""

import pytest

from data import prepare
from data.data_settings import DataSettings
from run_directory.console import Console


@pytest.fixture(scope="session")
def prepared(corpus, prepared_root):
    data = DataSettings.model_validate(
        {
            "source": {"name": "files", "path": str(corpus)},
            "tokenizer": {"name": "bytes"},
            "valid_fraction": 0.2,
            "packing": "intra_document",
            "root": str(prepared_root),
        }
    )
    return prepare(data, Console(quiet=True))
