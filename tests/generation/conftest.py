"""Small tokenizers trained on the fly, and a run directory."""

import pytest

from data.preparation.tokenizer_training import train_tokenizer
from data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from data.tokenizers.tokenizer_settings import HuggingFaceSettings
from tests.byte_runs import byte_run
from tests.sentencepiece_models import LOSSLESS_BPE, sentencepiece_model

TEXT = [
    "the cat sat on the mat",
    "the dog sat on the log",
    "话说天下大势",
    "分久必合,合久必分",
    "a stop, the end",
]


@pytest.fixture(
    scope="session", params=["bytes", "byte-level BPE", "sentencepiece", "foreign sentencepiece"]
)
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "byte-level BPE":  # with parts of characters in one token
        return train_tokenizer(HuggingFaceSettings(vocab_size=310), list(TEXT * 4))
    options = {"character_coverage": 0.98, "add_dummy_prefix": request.param.startswith("foreign")}
    model = sentencepiece_model(TEXT * 4, 310, **LOSSLESS_BPE, **options)
    return SentencePieceTokenizer(model)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """An untrained byte model with a learned table of 48 rows beside a rotary run directory of
    length 16."""
    root = tmp_path_factory.mktemp("runs")
    byte_run(root / "learned", {"name": "learned"}, 48)
    return byte_run(root / "rope", {"name": "rope"})
