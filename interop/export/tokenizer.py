"""Our tokenizers as tokenizer.json, which transformers and others load without code of their
own."""

from __future__ import annotations

import base64
import json
from typing import Any

from data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from errors import InteropError
from interop.extras import load_extra

SPACE = "\u2581"  # a space inside the pieces of sentencepiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
# types of models
UNIGRAM = 1
BPE = 2
PROBES = (
    "The 2 quick  brown\n\n\tfoxes' (jumps) = {over}: [lazy] dogs; 12,345.67% "
    '@#$&*_-+|\\~`^"<>?/!\n',
    " Leading and trailing spaces ",
    "def f(x):\n    return x  # ünïcödé: 北京, Привет, 🙂 ﬁ ½\r\n",
    "",
)


def control_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Entries of config.json. Null ones belong to it, because some classes have other defaults."""
    ends = list(tokenizer.eos_ids)
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.pad_id,
    }


def tokenizer_files(tokenizer: Tokenizer, *, add_bos: bool, max_length: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json of a fast tokenizer.

    Args:
        add_bos: begin encoded text with BOS.
        max_length: the trained length, for `model_max_length`.

    Raises:
        InteropError: the ids differ on some text.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        whole = json.loads(tokenizer.content)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        whole = _of_sentencepiece(tokenizer)
    else:
        assert isinstance(tokenizer, ByteTokenizer)
        whole = _of_bytes(tokenizer)
    names = _names(whole)
    controls = {key: getattr(tokenizer, f"{key}_id") for key in ("bos", "eos", "pad")}
    if add_bos and controls["bos"] is not None and not whole.get("post_processor"):
        whole["post_processor"] = _prepended(names[controls["bos"]], controls["bos"])
    content = json.dumps(whole, ensure_ascii=False).encode()
    _check(content, tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        **{f"{key}_token": names[i] for key, i in controls.items() if i is not None},
    }
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": (json.dumps(config, ensure_ascii=False, indent=1) + "\n").encode(),
    }


def _names(whole: dict[str, Any]) -> dict[int, str]:
    """The text of each id."""
    vocabulary = whole["model"]["vocab"]
    if isinstance(vocabulary, dict):
        names = {i: text for text, i in vocabulary.items()}
    else:
        names = {i: text for i, (text, _) in enumerate(vocabulary)}
    return names | {token["id"]: token["content"] for token in whole.get("added_tokens", [])}


def _check(content: bytes, tokenizer: Tokenizer) -> None:
    exported = load_extra("tokenizers").Tokenizer.from_buffer(content)
    for text in PROBES:
        if exported.encode(text, add_special_tokens=False).ids != tokenizer.encode(text):
            raise InteropError(
                "the tokenizer cannot be exported: tokenizer.json and ours differ on "
                f"{text[:40]!r}; export with the model's own tokenizer.json"
            )


def _whole(**parts: Any) -> dict[str, Any]:
    return {"version": "1.0", "truncation": None, "padding": None, **parts}


def _added(i: int, content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, **flags, "special": special}


def _prepended(token: str, i: int) -> dict[str, Any]:
    """A post-processor that begins each text with a token."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }


def _of_bytes(tokenizer: ByteTokenizer) -> dict[str, Any]:
    """Byte-level BPE without merges."""
    # GPT-2's characters for bytes, which ByteLevel uses
    characters = load_extra("transformers.convert_slow_tokenizer").bytes_to_unicode()
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    assert tokenizer.bos_id is not None and tokenizer.eos_id is not None
    return _whole(
        added_tokens=[
            _added(tokenizer.bos_id, "<|bos|>", True),
            _added(tokenizer.eos_id, "<|eos|>", True),
        ],
        normalizer=None,
        pre_tokenizer=byte_level,
        post_processor=None,
        decoder=byte_level,
        model=_bpe({characters[byte]: byte for byte in range(256)}, []),
    )


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    defaults = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"type": "BPE", **defaults, **options, "vocab": vocabulary, "merges": merges}


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    model: Any = load_extra("sentencepiece.sentencepiece_model_pb2").ModelProto()
    model.ParseFromString(tokenizer.model)
    kind = model.trainer_spec.model_type
    spec = model.normalizer_spec
    if kind not in (UNIGRAM, BPE):
        raise InteropError("only BPE and unigram models of sentencepiece can be exported")
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    unknown = next((i for i, (_, _, type_) in enumerate(pieces) if type_ == UNKNOWN), None)
    byte_fallback = any(type_ == BYTE for _, _, type_ in pieces)
    if kind == BPE:
        vocabulary = {piece: i for i, (piece, _, _) in enumerate(pieces)}
        body = _bpe(
            vocabulary,
            _merges(pieces),
            unk_token=None if unknown is None else pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    else:
        # Control symbols never occur in text.
        body = {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[piece, score] for piece, score, _ in pieces],
            "byte_fallback": byte_fallback,
        }
    added = [
        _added(
            i, piece.replace(SPACE, " ") if type_ == USER_DEFINED else piece, type_ != USER_DEFINED
        )
        for i, (piece, _, type_) in enumerate(pieces)
        if type_ in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    normalizers: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if spec.add_dummy_prefix:
        normalizers.append({"type": "Prepend", "prepend": " "})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spec.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _whole(
        added_tokens=added,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        post_processor=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model=body,
    )


def _merges(pieces: list[tuple[str, float, int]]) -> list[list[str]]:
    """The merges of a BPE vocabulary, in the order in which sentencepiece prefers their results."""
    ids = {
        piece: i
        for i, (piece, _, type_) in enumerate(pieces)
        if type_ in (NORMAL, BYTE, USER_DEFINED)
    }
    merges = []
    for piece, score, type_ in pieces:
        if type_ != NORMAL:
            continue
        splits = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        splits = [(a, b) for a, b in splits if a in ids and b in ids]
        merges += [(-score, ids[a], ids[b], a, b) for a, b in splits]
    return [[a, b] for *_, a, b in sorted(merges)]
