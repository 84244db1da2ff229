"""Whether everything that is to be prepared is there, asked before anything is."""

from pathlib import Path

from data.settings import DataSettings, SentencePieceSettings
from data.sources import open_source
from data.sources.prepared import finished_folder
from data.tokenizer import load_sentencepiece

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
    tokenizer = settings.tokenizer
    if isinstance(tokenizer, SentencePieceSettings) and tokenizer.model is not None:
        load_sentencepiece(Path(tokenizer.model).expanduser())
