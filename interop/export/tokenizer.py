"""Our tokenizers as tokenizer.json, which transformers and other libraries load without custom
code."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from data.files import write_json
from data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from data.tokenizers.huggingface import ALPHABET
from data.tokenizers.sentencepiece import SPACE
from errors import InteropError
from interop.extras import load_extra

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
    """Entries of config.json with ids of control symbols. Null ids are included because some
    classes have other defaults."""
    ends = list(tokenizer.eos_ids)
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.pad_id,
    }


def fast_tokenizer(tokenizer: Tokenizer, add_bos: bool) -> tuple[Any, dict[str, Any]]:
    """A tokenizer of the tokenizers library, and the texts of `bos_token`, `eos_token` and
    `pad_token`.

    Args:
        add_bos: begin encoded text with BOS.

    Raises:
        InteropError: our ids and those of the result differ on some text.
    """
    made: Any
    if isinstance(tokenizer, HuggingFaceTokenizer):
        assert tokenizer.content is not None
        made = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        made = _of_sentencepiece(tokenizer)
    else:
        assert isinstance(tokenizer, ByteTokenizer)
        made = _of_bytes()
    ids = {f"{key}_token": getattr(tokenizer, f"{key}_id") for key in ("bos", "eos", "pad")}
    names = {key: made.id_to_token(i) for key, i in ids.items() if i is not None}
    if add_bos and "bos_token" in names and made.post_processor is None:
        bos = names["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", f"{bos}:1", "$B:1"],
            special_tokens=[(bos, ids["bos_token"])],
        )
    for text in PROBES:
        if made.encode(text, add_special_tokens=False).ids != tokenizer.encode(text):
            raise InteropError(
                "the tokenizer cannot be exported: tokenizer.json and ours differ on "
                f"{text[:40]!r}; export with the model's own tokenizer.json"
            )
    return made, names


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, add_bos: bool, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; see `fast_tokenizer`.

    Args:
        max_length: the trained length, for `model_max_length`.
    """
    made, names = fast_tokenizer(tokenizer, add_bos)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        **names,
    }
    write_json(folder / "tokenizer_config.json", config)


def _of_bytes() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges."""
    made = tokenizers.Tokenizer(models.BPE(vocab=ALPHABET, merges=[]))
    made.add_special_tokens(["<|bos|>", "<|eos|>"])  # 256 and 257
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    proto = load_extra("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(tokenizer.content)
    kind = proto.trainer_spec.model_type
    spec = proto.normalizer_spec
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    unknown = next((i for i, (_, _, type_) in enumerate(pieces) if type_ == UNKNOWN), None)
    byte_fallback = any(type_ == BYTE for _, _, type_ in pieces)
    if kind == BPE:
        vocabulary = {piece: i for i, (piece, _, _) in enumerate(pieces)}
        scores = {piece: score for piece, score, _ in pieces}
        others = [piece for piece, _, type_ in pieces if type_ != NORMAL]
        convert = load_extra("transformers.convert_slow_tokenizer")
        model = models.BPE(
            vocab=vocabulary,
            merges=convert.generate_merges(vocabulary, scores, others),
            unk_token=None if unknown is None else pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    elif kind == UNIGRAM:
        scores = [(piece, score) for piece, score, _ in pieces]
        model = models.Unigram(scores, unk_id=unknown, byte_fallback=byte_fallback)
    else:
        raise InteropError("only BPE and unigram models of sentencepiece can be exported")
    made = tokenizers.Tokenizer(model)
    changes = []
    if spec.precompiled_charsmap:
        changes.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        changes.append(normalizers.Strip())
        changes.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        changes.append(normalizers.Prepend(" "))
    made.normalizer = normalizers.Sequence([*changes, normalizers.Replace(" ", SPACE)])
    steps = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(steps)
    whole = json.loads(made.to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole["added_tokens"] = [
        {
            "id": i,
            "content": piece.replace(SPACE, " ") if type_ == USER_DEFINED else piece,
            "special": type_ != USER_DEFINED,
            **flags,
        }
        for i, (piece, _, type_) in enumerate(pieces)
        if type_ in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(whole))
