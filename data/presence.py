"""Whether everything that is to be prepared is there, asked before anything is."""

from pathlib import Path

from data.settings import DataSettings, SentencePieceSettings
from data.sources import open_source
from data.sources.prepared import finished_folder
from data.tokenizer import ByteTokenizer, load_sentencepiece

FIRST, VALID = "data.source", "data.valid_source"  # the settings that ask for text, for messages


def check_texts(settings: DataSettings) -> None:
    """Refuse text, a prepared folder or a tokenizer that this machine does not have.

    Raises DataError naming the setting. No text is read, nothing is made, and the network is not asked.
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
    """Ids of the tokenizer: those of a given model, those that training one was asked for, or of bytes.

    Raises DataError where the model is not there.
    """
    tokenizer = settings.tokenizer
    if not isinstance(tokenizer, SentencePieceSettings):
        return ByteTokenizer.vocab_size
    if tokenizer.model is not None:
        return load_sentencepiece(Path(tokenizer.model).expanduser()).vocab_size
    return tokenizer.vocab_size
