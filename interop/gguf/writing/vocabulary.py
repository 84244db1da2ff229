"""Our tokenizers as the metadata of a GGUF file."""

from __future__ import annotations

import json
from typing import Any

from data import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from data.tokenizers.huggingface import ALPHABET
from errors import InteropError
from interop.extras import load_extra
from interop.gguf.pretokenizers import PRE_TOKENIZERS
from interop.gguf.reading.tokenizer import CONTROL, NO_MERGES, NORMAL, UNUSED, USER_DEFINED


def tokenizer_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Metadata by key, without the prefix `tokenizer.ggml.`.

    Args:
        rows: of the embedding; the vocabulary is padded with unused tokens.

    Raises:
        InteropError: llama.cpp would encode text to other ids.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        found = _sentencepiece(tokenizer)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        found = _byte_level(tokenizer)
    else:
        found = _bytes(tokenizer)
    tokens = found["tokens"]
    found["tokens"] = [*tokens, *(f"[PAD{i}]" for i in range(len(tokens), rows))]
    found["token_type"] = [*found["token_type"], *[UNUSED] * (rows - len(tokens))]
    if "scores" in found:
        found["scores"] = [*found["scores"], *[0.0] * (rows - len(tokens))]
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "padding": tokenizer.pad_id}
    found |= {f"{key}_token_id": i for key, i in ids.items() if i is not None}
    # llama.cpp knows one more, by this name
    if len(tokenizer.eos_ids) > 1 and tokenizer.eos_id is not None:
        found["eot_token_id"] = next(i for i in tokenizer.eos_ids if i != tokenizer.eos_id)
    return found | {"add_bos_token": tokenizer.add_bos, "add_eos_token": False}


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    model: Any = load_extra("sentencepiece.sentencepiece_model_pb2").ModelProto()
    model.ParseFromString(tokenizer.model)
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    if trainer.model_type != trainer.BPE:
        raise InteropError(
            "the tokenizer is a unigram model: llama.cpp has no byte fallback for those; export to the "
            "Hugging Face format"
        )
    if (
        normalizer.precompiled_charsmap
        or normalizer.remove_extra_whitespaces
        or not trainer.byte_fallback
    ):
        raise InteropError(
            "the tokenizer normalizes text or has no byte fallback, which llama.cpp does not support for BPE "
            "models; export to the Hugging Face format"
        )
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [piece.piece for piece in model.pieces],
        "scores": [float(piece.score) for piece in model.pieces],
        "token_type": [int(piece.type) for piece in model.pieces],
        "add_space_prefix": normalizer.add_dummy_prefix,
        "unknown_token_id": trainer.unk_id,
    }


def _byte_level(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    spec = json.loads(tokenizer.content)
    model = spec["model"]
    steps = _steps(spec.get("pre_tokenizer"))
    if model["type"] != "BPE" or not steps or steps[-1]["type"] != "ByteLevel":
        raise InteropError(
            "the tokenizer is not a byte-level BPE: llama.cpp supports those and sentencepiece's BPE models; "
            "export to the Hugging Face format"
        )
    if _steps(spec.get("normalizer")):
        raise InteropError(
            "the tokenizer normalizes text, which llama.cpp does not; export to the Hugging Face format"
        )
    names = [f"[PAD{i}]" for i in range(tokenizer.vocab_size)]
    types = [UNUSED] * tokenizer.vocab_size
    for token, i in model["vocab"].items():
        names[i], types[i] = token, NORMAL
    special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    added: list[dict[str, Any]] = spec.get("added_tokens", [])
    for token in added:
        i = int(token["id"])
        names[i] = token["content"]
        types[i] = CONTROL if token["special"] or i in special else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "model": "gpt2",
        "pre": _pre(steps, bool(model.get("ignore_merges"))),
        "tokens": names,
        "token_type": types,
        "merges": merges or NO_MERGES,
        "add_space_prefix": False,
    }


def _pre(steps: list[dict[str, Any]], ignore_merges: bool) -> str:
    """The name of a pre-tokenizer."""
    for name, known in PRE_TOKENIZERS.items():
        same = (
            _shown(_steps(known.as_json())) == _shown(steps)
            and known.ignore_merges == ignore_merges
        )
        if same and known.exact:
            return name
    raise InteropError(
        "the tokenizer splits text into words in a way that llama.cpp does not know or only approximates; "
        "export to the Hugging Face format"
    )


def _shown(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps without what does not change the ids."""
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        inner = part.get("pretokenizers") or part.get("normalizers") or []
        return [step for one in inner for step in _steps(one)]
    return [part]


def _bytes(tokenizer: Tokenizer) -> dict[str, Any]:
    """Bytes are a byte-level BPE without merges."""
    assert isinstance(tokenizer, ByteTokenizer)
    names = {byte: character for character, byte in ALPHABET.items()}
    controls = ["<bos>", "<eos>"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*(names[byte] for byte in range(256)), *controls],
        "token_type": [NORMAL] * 256 + [CONTROL] * 2,
        "merges": NO_MERGES,
        "add_space_prefix": False,
    }
