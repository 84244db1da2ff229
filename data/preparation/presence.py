"""Checks, before any preparation, that all inputs exist."""

from pathlib import Path

from data.settings import DataSettings, SentencePieceSettings
from data.sources import open_source
from data.sources.prepared import finished_folder
from data.tokenizer import ByteTokenizer, load_sentencepiece

FIRST, VALID = "data.source", "data.valid_source"  # the settings that specify text, for messages


def check_texts(settings: DataSettings) -> None:
    """Check that text, prepared folders and tokenizer models exist on this machine.

    Raises DataError naming the setting. Reads no text, writes nothing and makes no network request.
    """
    sources = {FIRST: settings.source, VALID: settings.valid_source}
    for i, mixed in enumerate(settings.mixture):
        sources[f"data.mixture.{i}.source"] = mixed.source
        if mixed.prepared is not None:
            finished_folder(mixed.prepared, f"data.mixture.{i}.prepared")
    for place, source in sources.items():
        if source is not None:
            open_source(source, place).check()
    expected_vocabulary(settings)


def expected_vocabulary(settings: DataSettings) -> int:
    """Vocabulary size: that of a given model, the size requested for training, or that of bytes.

    Raises DataError if the model does not exist.
    """
    tokenizer = settings.tokenizer
    if not isinstance(tokenizer, SentencePieceSettings):
        return ByteTokenizer.vocab_size
    if tokenizer.model is not None:
        return load_sentencepiece(Path(tokenizer.model).expanduser()).vocab_size
    return tokenizer.vocab_size
