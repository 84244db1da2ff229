"""Train a sentencepiece model on a sample of the text."""

import io
import re
from collections.abc import Iterator
from typing import NamedTuple

import sentencepiece

from data.settings import SentencePieceSettings
from data.tokenizer import SentencePieceTokenizer
from errors import DataError

LONGEST_LINE = 4000  # bytes; sentencepiece drops longer lines silently
# Newline and tab are separate tokens. The trainer drops lines that contain any of the others.
CUTS = re.compile("[\n\t\0\u2047\u2581\u2585]+")
THREADS = 16  # fixed, because the number of threads changes the summation order in unigram training


class TokenizerTraining(NamedTuple):
    tokenizer: SentencePieceTokenizer
    bytes_used: int


def pieces_of(text: str, longest: int = LONGEST_LINE) -> Iterator[str]:
    """Yield the lines of `text` as training sentences. Long lines are split, at a space if possible."""
    for line in CUTS.split(text):
        while len(line) * 4 > longest and len(line.encode()) > longest:
            head = line.encode()[:longest].decode(errors="ignore")
            cut = head.rfind(" ", len(head) // 2) if " " in head else -1
            cut = cut if cut > 0 else len(head)
            yield line[:cut]
            line = line[cut:]
        if line:
            yield line


def train_sentencepiece(settings: SentencePieceSettings, texts: Iterator[str]) -> TokenizerTraining:
    """Train on the sampled `texts`. Raises DataError if they are too small for the vocabulary."""
    used = 0

    def sentences() -> Iterator[str]:
        nonlocal used
        for text in texts:
            used += len(text.encode())
            yield from pieces_of(text)

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            model_type=settings.kind,
            vocab_size=settings.vocab_size,
            byte_fallback=settings.byte_fallback,
            split_digits=settings.split_digits,
            allow_whitespace_only_pieces=settings.space_runs,
            character_coverage=settings.character_coverage,
            max_sentence_length=2 * LONGEST_LINE,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            user_defined_symbols=["\n", "\t"],
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            num_threads=THREADS,
            minloglevel=4,
        )
    except RuntimeError as error:
        raise _explained(settings, used, str(error)) from error
    return TokenizerTraining(SentencePieceTokenizer(model.getvalue()), used)


def _explained(settings: SentencePieceSettings, used: int, message: str) -> DataError:
    most = re.search(r"value <= (\d+)", message)
    setting = f"data.tokenizer.vocab_size={settings.vocab_size}"
    if "too high" in message or most:
        limit = f"at most {most[1]}" if most else "a smaller value"
        return DataError(
            f"{setting} is too large for {used:,} bytes of training text; set it to {limit}, add text, or "
            "set data.tokenizer.name=bytes"
        )
    if "smaller than required" in message or "required_chars" in message:
        return DataError(
            f"{setting} is less than the number of characters of the text; increase it, or decrease "
            "data.tokenizer.character_coverage (other characters become bytes)"
        )
    return DataError(f"sentencepiece cannot train on this text: {message.strip()}")
