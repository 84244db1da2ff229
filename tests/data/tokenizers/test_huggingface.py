"""tokenizer.json files: ids as transformers gives them, exact bytes of every id, and text that
stays text."""

import inspect
import json
import textwrap

import pytest
import tokenizers
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data import DataError, HuggingFaceTokenizer
from data.preparation.tokenizer_training import train_tokenizer
from data.tokenizers import load_tokenizer, lossless
from data.tokenizers.tokenizer_settings import HuggingFaceSettings
from tests.data.tokenizers.texts import ANY, HARD, WHITESPACE

TEXT = (
    "def rotate(x, angle=10000):\n    for i in range(128):\n\tyield x[i] * 0.5  # don't\n\n\n"
    'Once upon a time, there was a <b>girl</b>; she said: "I\'m here!"\r\n  天下大势，分久必合。\n'
)


def byte_level(**changes) -> HuggingFaceTokenizer:
    settings = HuggingFaceSettings.model_validate({"vocab_size": 420} | changes)
    found = train_tokenizer(settings, [TEXT * 3, inspect.getsource(textwrap)])
    assert isinstance(found, HuggingFaceTokenizer)
    return found


def sentencepiece_bpe(prefix: bool) -> bytes:
    """A BPE as transformers converts Llama 2's (with `prefix`) and Gemma's: spaces are U+2581, and
    bytes for characters that are not in the vocabulary."""
    space = tokenizers.Tokenizer(models.BPE())
    space.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    space.train_from_iterator(["the cat sat on the mat", "天下 the dog", PRINTABLE] * 5, trainer)
    spec = json.loads(space.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [name for name in spec["vocab"] if name not in names]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [tuple(merge) for merge in spec["merges"]]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made.to_str().encode()


PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
KINDS = {
    "llama3": lambda: byte_level(split_digits=False),
    "qwen2": byte_level,
    "gpt2": lambda: byte_level(pre_tokenizer="gpt2", split_digits=False),
    "smollm": lambda: byte_level(pre_tokenizer="gpt2"),
    "gemma": lambda: HuggingFaceTokenizer(
        sentencepiece_bpe(prefix=False), bos_id="<s>", eos_id="</s>"
    ),
    "llama2": lambda: HuggingFaceTokenizer(
        sentencepiece_bpe(prefix=True), bos_id="<s>", eos_id="</s>"
    ),
}
LITERAL_SPACE_IS_LOST = {"gemma", "llama2"}  # U+2581 in the text becomes a space


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    ours = KINDS[request.param]()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_buffer(ours.content), split_special_tokens=True
    )
    return ours, theirs, request.param in LITERAL_SPACE_IS_LOST


@hypothesis_settings(max_examples=80)
@given(text=st.one_of(st.sampled_from(HARD), ANY, WHITESPACE))
def test_any_text_has_the_ids_of_transformers(case, text):
    ours, theirs, spaces_are_lost = case
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert not {ours.bos_id, ours.eos_id} & set(ids)
    assert all(0 <= i < ours.vocab_size for i in ids)
    if text and not (spaces_are_lost and "\u2581" in text):
        assert lossless(ours, ids, text)
        assert ours.decode(ids) == text
        assert ours.token_bytes[ids].sum() == len(text.encode()) + len(ours.prefix)


def test_every_piece_has_the_bytes_of_the_decoder(case):
    """Between two letters, so that the decoder of transformers strips nothing."""
    ours, theirs, _ = case
    letter = ours.encode("xa")[-1]
    assert ours.pieces[letter] == b"a"
    whole = 0
    for i, piece in enumerate(ours.pieces):
        try:
            expected = b"a" + piece.decode().encode() + b"a"
        except UnicodeDecodeError:
            continue  # part of a character
        decoded = theirs.decode([letter, i, letter], skip_special_tokens=True)
        assert decoded.encode() == expected, i
        whole += bool(piece)
    assert whole > 190
    assert {piece for piece in ours.pieces if len(piece) == 1} == {
        bytes([byte]) for byte in range(256)
    }


def test_save_and_load(case, tmp_path):
    ours, _, _ = case
    ours.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for name in ("hash", "pieces", "bos_id", "eos_id", "eos_ids", "pad_id", "add_bos", "prefix"):
        assert getattr(loaded, name) == getattr(ours, name)
    assert loaded.encode(TEXT) == ours.encode(TEXT)
    file = tmp_path / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(DataError, match=r"tokenizer.json does not match"):
        load_tokenizer(tmp_path)


def changed(tokenizer: HuggingFaceTokenizer, **parts) -> bytes:
    return json.dumps(json.loads(tokenizer.content) | parts).encode()


def test_added_tokens_are_text_unless_special():
    plain = byte_level()
    library = tokenizers.Tokenizer.from_buffer(plain.content)
    library.add_tokens(["<tool>", "    "])
    library.add_special_tokens(["<|turn|>"])
    ours = HuggingFaceTokenizer(library.to_str().encode(), bos_id=0, eos_id=1, eos_ids=[422])
    tool, spaces, turn = (library.token_to_id(name) for name in ("<tool>", "    ", "<|turn|>"))
    assert (tool, spaces, turn) == (420, 421, 422)
    assert ours.eos_ids == (1, 422)
    text = "x<tool>    <|turn|>y"
    ids = ours.encode(text)
    assert lossless(ours, ids, text)
    assert {tool, spaces} <= set(ids)
    assert turn not in ids
    assert ours.pieces[tool] == b"<tool>"
    assert ours.pieces[spaces] == b"    "
    assert ours.pieces[turn] == b""


def test_controls_in_a_unigram_vocabulary_are_not_produced_from_text():
    names = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"\u2581\n\t",
        *PRINTABLE,
    ]
    pieces = [(name, -9.0 if name.startswith("<0x") else -4.0) for name in names]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    library.add_special_tokens(["</s>"])
    ours = HuggingFaceTokenizer(library.to_str().encode(), eos_id="</s>")
    for text in ("</s>", "a</s> b</s></s>", "天</s"):
        ids = ours.encode(text)
        assert ours.eos_id == 1
        assert 1 not in ids
        assert lossless(ours, ids, text)


@pytest.mark.parametrize(
    "normalizer", [{"type": "Lowercase"}, {"type": "StripAccents"}, {"type": "NFKC"}]
)
def test_normalizers_that_lose_information(normalizer):
    content = changed(byte_level(), normalizer=normalizer)
    if normalizer["type"] == "Lowercase":  # most documents would be lossy
        with pytest.raises(DataError, match="Lowercase"):
            HuggingFaceTokenizer(content)
        return
    ours = HuggingFaceTokenizer(content)
    text = "e\u0301 ﬁ" if normalizer["type"] == "NFKC" else "e\u0301"
    assert lossless(ours, ours.encode(TEXT.replace("，", ",")), TEXT.replace("，", ","))
    assert not lossless(ours, ours.encode(text), text)
    assert ours.normalization == normalizer["type"]


def word_piece() -> bytes:
    vocabulary = {"[UNK]": 0, "the": 1, "##s": 2}
    library = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library.to_str().encode()


@pytest.mark.parametrize("content", [b"", b"{}", b"no json", word_piece()])
def test_unusable_files_are_rejected(content):
    with pytest.raises(DataError, match=r"some\.json"):
        HuggingFaceTokenizer(content, "some.json")
