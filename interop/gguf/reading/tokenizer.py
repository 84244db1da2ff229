"""The tokenizer embedded in a GGUF file, as a sentencepiece model or a tokenizer.json."""

from __future__ import annotations

import json
from typing import Any

from data import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from errors import InteropError
from interop.extras import load_extra
from interop.gguf.pretokenizers import PRE_TOKENIZERS
from interop.gguf.reading.file import GGUFFile

# Types of tokens, the same numbers in GGUF files and sentencepiece models.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# A vocabulary of bytes has no merges, but llama.cpp requires one; symbols of two bytes never occur.
NO_MERGES = ["aa bb"]


def read_tokenizer(file: GGUFFile, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a file; None if the file has none.

    Args:
        vocab_size: rows of the embedding; the vocabulary may be shorter, but not longer.

    Raises:
        InteropError: an unknown tokenizer or pre-tokenizer, or lists that disagree.
        DataError: a vocabulary that loses information.
    """
    kind = file.text("tokenizer.ggml.model", None)
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("llama", "gpt2"):
        raise InteropError(
            f"{file.path}: tokenizer.ggml.model = {kind!r} cannot be imported; supported are llama "
            "(sentencepiece) and gpt2 (byte-level BPE)"
        )
    tokens = file.items("tokenizer.ggml.tokens", str)
    types = file.items("tokenizer.ggml.token_type", int) or [NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(tokens) != len(set(tokens)):
        raise InteropError(
            f"{file.path}: tokenizer.ggml.tokens repeats a token or has no type for some"
        )
    if not 0 < len(tokens) <= vocab_size:
        raise InteropError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} tokens, but the embedding has "
            f"{vocab_size} rows"
        )
    keys = ("bos", "eos", "unknown", "padding", "eot")
    ids = {key: _id(file, f"tokenizer.ggml.{key}_token_id", len(tokens)) for key in keys}
    ends = [ids["eot"]] if ids["eot"] is not None else []
    if kind == "llama":
        defaults = {"bos": 1, "eos": 2, "unknown": 0}  # llama.cpp's
        ids |= {key: i for key, i in defaults.items() if ids[key] is None}
        add_bos = bool(file.get("tokenizer.ggml.add_bos_token", True))
        model = _sentencepiece(file, tokens, types, ids)
        return SentencePieceTokenizer(model, str(file.path), eos_ids=ends, add_bos=add_bos)
    name = file.text("tokenizer.ggml.pre", None)
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise InteropError(
            f"{file.path}: tokenizer.ggml.pre = {name!r} cannot be imported; supported are "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    if file.get("tokenizer.ggml.add_space_prefix"):
        raise InteropError(
            f"{file.path}: tokenizer.ggml.add_space_prefix is not supported with gpt2"
        )
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre.ignore_merges,
        "vocab": {
            t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED
        },
        "merges": _merges(file, set(tokens)),
    }
    return HuggingFaceTokenizer(
        _tokenizers_json(bpe, pre.as_json(), tokens, types),
        str(file.path),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        eos_ids=ends,
        add_bos=bool(file.get("tokenizer.ggml.add_bos_token", pre.add_bos)),
    )


def _id(file: GGUFFile, key: str, count: int) -> int | None:
    value = file.get(key)
    if value is not None and not (type(value) is int and 0 <= value < count):
        raise InteropError(
            f"{file.path}: {key} = {value!r} is not the id of one of the {count} tokens"
        )
    return value


def _merges(file: GGUFFile, tokens: set[str]) -> list[list[str]]:
    found = []
    merges = file.items("tokenizer.ggml.merges", str)
    for merge in [] if merges == NO_MERGES else merges:
        left, space, right = merge.partition(" ")
        if not (space and left and right) or not {left, right, left + right} <= tokens:
            raise InteropError(
                f"{file.path}: tokenizer.ggml.merges has {merge!r}, whose parts or result are no tokens"
            )
        found.append([left, right])
    return found


def _tokenizers_json(
    model: dict, pre_tokenizer: dict, tokens: list[str], types: list[int]
) -> bytes:
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": model,
    }
    return json.dumps(whole, ensure_ascii=False).encode()


def _sentencepiece(
    file: GGUFFile, tokens: list[str], types: list[int], ids: dict[str, Any]
) -> bytes:
    """A sentencepiece BPE model: llama.cpp merges the pair with the highest score, as sentencepiece does."""
    scores = file.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise InteropError(f"{file.path}: tokenizer.ggml.scores must have one score per token")
    model: Any = load_extra("sentencepiece.sentencepiece_model_pb2").ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if not NORMAL <= kind <= BYTE:
            raise InteropError(
                f"{file.path}: tokenizer.ggml.token_type has the unknown type {kind}"
            )
        model.pieces.add(piece=token, score=score, type=kind)
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    trainer.model_type = trainer.BPE
    trainer.vocab_size = len(tokens)
    trainer.byte_fallback = BYTE in types
    trainer.unk_id = ids["unknown"]
    trainer.bos_id = ids["bos"]
    trainer.eos_id = ids["eos"]
    trainer.unk_piece, trainer.bos_piece, trainer.eos_piece = (
        tokens[ids[key]] for key in ("unknown", "bos", "eos")
    )
    padding = ids["padding"]
    trainer.pad_id = -1 if padding is None or types[padding] != CONTROL else padding
    if trainer.pad_id >= 0:
        trainer.pad_piece = tokens[trainer.pad_id]
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    normalizer.remove_extra_whitespaces = bool(
        file.get("tokenizer.ggml.remove_extra_whitespaces", False)
    )
    normalizer.escape_whitespaces = True
    return model.SerializeToString()
