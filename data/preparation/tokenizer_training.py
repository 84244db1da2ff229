"""Train a tokenizer on a sample of the text: sentencepiece, or byte-level BPE."""

import io
import re
from collections.abc import Iterator, Sequence
from itertools import chain

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from data.tokenizers.huggingface import LLAMA3, LLAMA3_SINGLE_DIGITS
from data.tokenizers.tokenizer_settings import HuggingFaceSettings, SentencePieceSettings
from errors import DataError

LONGEST_LINE = 4000  # bytes; sentencepiece drops longer lines silently
# Newline and tab are separate tokens. The trainer drops lines that contain any of the others.
CUTS = re.compile("[\n\t\0\u2047\u2581\u2585]+")
THREADS = 16  # fixed, because the number of threads changes the summation order in unigram training
# control symbols of the byte-level BPE trained here; Llama 3's names
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"


def train_tokenizer(
    settings: SentencePieceSettings | HuggingFaceSettings,
    texts: Sequence[str],
) -> Tokenizer:
    """Train on the sampled `texts`. Raises DataError if they are too small for the vocabulary."""
    if isinstance(settings, SentencePieceSettings):
        return train_sentencepiece(settings, texts)
    return train_byte_level_bpe(settings, texts)


def train_byte_level_bpe(settings: HuggingFaceSettings, texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE as in GPT-2 and Llama 3. Equal texts give equal files."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(settings)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, 0), (EOS, 1)],
    )
    if (size := tokenizer.get_vocab_size()) < settings.vocab_size:
        raise _too_large(settings, texts, str(size))
    content = tokenizer.to_str(pretty=True).encode()
    return HuggingFaceTokenizer(content, bos_id=BOS, eos_id=EOS)


def _pre_tokenizer(settings: HuggingFaceSettings) -> pre_tokenizers.PreTokenizer:
    if settings.pre_tokenizer == "gpt2":
        steps = [pre_tokenizers.Digits(individual_digits=True)] if settings.split_digits else []
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = LLAMA3_SINGLE_DIGITS if settings.split_digits else LLAMA3
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def pieces_of(text: str) -> Iterator[str]:
    """Yield the lines of `text` as training sentences. Long lines are split, at a space if
    possible."""
    for line in CUTS.split(text):
        while len(line) * 4 > LONGEST_LINE and len(line.encode()) > LONGEST_LINE:
            head = line.encode()[:LONGEST_LINE].decode(errors="ignore")
            cut = head.rfind(" ", len(head) // 2) if " " in head else -1
            cut = cut if cut > 0 else len(head)
            yield line[:cut]
            line = line[cut:]
        if line:
            yield line


def train_sentencepiece(settings: SentencePieceSettings, texts: Sequence[str]) -> Tokenizer:
    """Train on the sampled `texts`. Raises DataError if they are too small for the vocabulary."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain.from_iterable(map(pieces_of, texts)),
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
        raise _explained(settings, texts, str(error)) from error
    return SentencePieceTokenizer(model.getvalue())


def _explained(settings: SentencePieceSettings, texts: Sequence[str], message: str) -> DataError:
    most = re.search(r"value <= (\d+)", message)
    if "too high" in message or most:
        return _too_large(settings, texts, most[1] if most else None)
    if "smaller than required" in message or "required_chars" in message:
        return DataError(
            f"data.tokenizer.vocab_size={settings.vocab_size} is less than the number of "
            "characters of the text; increase it, or decrease data.tokenizer.character_coverage "
            "(other characters become bytes)"
        )
    return DataError(f"sentencepiece cannot train on this text: {message.strip()}")


def _too_large(
    settings: SentencePieceSettings | HuggingFaceSettings,
    texts: Sequence[str],
    most: str | None,
) -> DataError:
    used = sum(len(text.encode()) for text in texts)
    limit = f"at most {most}" if most else "a smaller value"
    return DataError(
        f"data.tokenizer.vocab_size={settings.vocab_size} is too large for {used:,} bytes of "
        f"training text; set it to {limit}, add text, or set data.tokenizer.name=bytes"
    )
