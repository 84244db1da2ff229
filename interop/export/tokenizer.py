"""Our tokenizers as tokenizer.json, which transformers and others load without code of their
own."""

import json
from pathlib import Path
from typing import Any

from data.files import write_json
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


def fast_tokenizer(tokenizer: Tokenizer, add_bos: bool) -> tuple[Any, dict[str, str]]:
    """A tokenizer of the tokenizers library, and the texts of `bos_token`, `eos_token` and
    `pad_token`.

    Args:
        add_bos: begin encoded text with BOS.

    Raises:
        InteropError: the ids differ on some text.
    """
    library = load_extra("tokenizers")
    if isinstance(tokenizer, HuggingFaceTokenizer):
        made = library.Tokenizer.from_buffer(tokenizer.content)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        made = _of_sentencepiece(tokenizer, library)
    else:
        assert isinstance(tokenizer, ByteTokenizer)
        made = _of_bytes(tokenizer, library)
    ids = {f"{key}_token": getattr(tokenizer, f"{key}_id") for key in ("bos", "eos", "pad")}
    names = {key: made.id_to_token(i) for key, i in ids.items() if i is not None}
    if add_bos and "bos_token" in names and made.post_processor is None:
        bos = names["bos_token"]
        made.post_processor = library.processors.TemplateProcessing(
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


def _of_bytes(tokenizer: ByteTokenizer, library: Any) -> Any:
    """Byte-level BPE without merges."""
    # GPT-2's characters for bytes, which ByteLevel uses
    characters = load_extra("transformers.convert_slow_tokenizer").bytes_to_unicode()
    vocabulary = {characters[byte]: byte for byte in range(256)}
    made = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    made.add_special_tokens(["<|bos|>", "<|eos|>"])
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    return made


def _of_sentencepiece(tokenizer: SentencePieceTokenizer, library: Any) -> Any:
    proto: Any = load_extra("sentencepiece.sentencepiece_model_pb2").ModelProto()
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
        model = library.models.BPE(
            vocab=vocabulary,
            merges=convert.generate_merges(vocabulary, scores, others),
            unk_token=None if unknown is None else pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    elif kind == UNIGRAM:
        scores = [(piece, score) for piece, score, _ in pieces]
        model = library.models.Unigram(scores, unk_id=unknown, byte_fallback=byte_fallback)
    else:
        raise InteropError("only BPE and unigram models of sentencepiece can be exported")
    made = library.Tokenizer(model)
    replace = library.normalizers.Replace
    normalizers = []
    if spec.precompiled_charsmap:
        normalizers.append(library.normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        normalizers.append(library.normalizers.Strip())
        normalizers.append(replace(library.Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        normalizers.append(library.normalizers.Prepend(" "))
    made.normalizer = library.normalizers.Sequence([*normalizers, replace(" ", SPACE)])
    decoders = [
        library.decoders.Replace(SPACE, " "),
        library.decoders.ByteFallback(),
        library.decoders.Fuse(),
    ]
    if spec.add_dummy_prefix:
        decoders.append(library.decoders.Strip(" ", 1, 0))
    made.decoder = library.decoders.Sequence(decoders)
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
    return library.Tokenizer.from_str(json.dumps(whole))
