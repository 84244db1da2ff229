"""Sentencepiece models with the options of other codebases."""

import io
from collections.abc import Iterable

import sentencepiece

LOSSLESS_BPE = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}


def sentencepiece_model(texts: Iterable[str], vocab_size: int, **options) -> bytes:
    """A trained model with byte fallback, of at most this many ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=vocab_size,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=4,
        **options,
    )
    return model.getvalue()
