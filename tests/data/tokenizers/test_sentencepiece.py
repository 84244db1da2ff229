"""Tokenizers lose nothing, know the bytes behind every id, and explain what they cannot do."""

import inspect
import textwrap

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data import ByteTokenizer, DataError, load_tokenizer
from data.preparation.tokenizer_training import train_sentencepiece
from data.tokenizers import lossless
from data.tokenizers.tokenizer_settings import SentencePieceSettings
from tests.data.tokenizers.texts import ANY, HARD, WHITESPACE

TEXT = (
    "def rotate(x, angle=10000):\n    for i in range(128):\n\tyield x[i] * 0.5  # a comment\n"
    "class Position:\n        return self.table[12345]\n\n"
)


@pytest.fixture(scope="module", params=["bpe", "unigram", "bytes"])
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    expected = SentencePieceSettings(kind=request.param, vocab_size=420)
    return train_sentencepiece(expected, [TEXT * 3, inspect.getsource(textwrap)])


@hypothesis_settings(max_examples=60)
@given(text=st.one_of(st.sampled_from(HARD), ANY, WHITESPACE))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode()) if ids else text == ""
    assert lossless(tokenizer, ids, text)
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_trained_model_properties():
    settings = SentencePieceSettings(vocab_size=340)
    trained = train_sentencepiece(settings, [TEXT * 5])
    assert trained.vocab_size == 340 == len(trained.pieces)
    assert (trained.bos_id, trained.eos_id, trained.pad_id) == (1, 2, 3)
    for text in ("\n", "\t"):
        assert [trained.pieces[i] for i in trained.encode(text)] == [text.encode()]
    assert [trained.pieces[i] for i in trained.encode("2048")][-4:] == [b"2", b"0", b"4", b"8"]
    assert len(trained.encode("        return")) < len(" " * 8)  # runs of spaces are tokens


def test_encoding_by_lines_matches_whole_text(tokenizer, monkeypatch):
    text = (TEXT + "a\u2581b\n\n\n  ") * 40
    whole = tokenizer.encode(text)
    monkeypatch.setattr("data.tokenizers.sentencepiece.BLOCK", 50)
    assert tokenizer.encode(text) == whole


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_invalid_vocabulary_size(kind):
    many = "".join(chr(0x4E00 + i) for i in range(900)) * 3
    for size, text, message in (
        (9000, TEXT, r"vocab_size=9000 is too large for [\d,]+ bytes .* at most \d+"),
        (300, many, "vocab_size=300 is less than"),
    ):
        with pytest.raises(DataError, match=message):
            train_sentencepiece(SentencePieceSettings(kind=kind, vocab_size=size), [text])


def test_saved_model_is_verified(tmp_path):
    first, other = (
        train_sentencepiece(SentencePieceSettings(vocab_size=size), [TEXT * 5])
        for size in (340, 320)
    )
    first.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.hash == first.hash
    assert loaded.encode(TEXT) == first.encode(TEXT)
    damages = "is not a sentencepiece model|does not match its recorded hash"
    for content in (other.content, b"", b"no model", first.content[: len(first.content) // 2]):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(DataError, match=rf"tokenizer.model ({damages})"):
            load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(tmp_path / "nowhere")
