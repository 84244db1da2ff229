"""Streaming text from tokens: whole characters, spaces, and stop strings across token
boundaries."""

import pytest

from data.tokenizers import ByteTokenizer
from generation.text_stream import TextStream

TEXTS = [
    "the cat sat on the log",
    "话说天下大势,三国归晋!",
    "  two  spaces\n\ttabs \n",
    "emoji 👩‍🚀 é 𝔘 of 2, 3 and 4 bytes",
]


def streamed(tokenizer, ids, stops=(), begins=True):
    """The pieces of text as given, one per token and one for the end."""
    stream = TextStream(tokenizer, stops, begins)
    found = []
    for i in ids:
        found.append(stream.push(i))
        if stream.stopped:
            break
    return [*found, stream.end()], stream.stopped


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_equals_full_decoding(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces, _ = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("�" in piece for piece in pieces)
    assert pieces[-1] == "", "nothing waits where no stop string is asked for"


@pytest.mark.parametrize("text", TEXTS)
def test_continuation_joins_prompt_at_any_split(tokenizer, text):
    """The space some tokenizers put before a text must neither vanish nor appear where the prompt
    ends."""
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        left = b"".join(tokenizer.pieces[i] for i in ids[:cut])
        pieces, _ = streamed(tokenizer, ids[cut:], begins=False)
        if _whole(left):
            assert (left.removeprefix(tokenizer.prefix).decode() + "".join(pieces)) == text


def _whole(raw: bytes) -> bool:
    try:
        raw.decode()
        return True
    except UnicodeDecodeError:
        return False


def test_invalid_utf8_is_replaced():
    assert streamed(ByteTokenizer(), [0xE5, 0x90, ord("x")])[0] == ["", "", "�x", ""]
    assert streamed(ByteTokenizer(), [ord("x"), 0xE5])[0] == ["x", "", "�"]


def test_control_tokens_are_not_printed(tokenizer):
    ids = tokenizer.encode("mat")
    assert "".join(streamed(tokenizer, [tokenizer.bos_id, *ids, tokenizer.eos_id])[0]) == "mat"


@pytest.mark.parametrize("text", TEXTS)
def test_stop_string_across_tokens_is_removed(tokenizer, text):
    ids = tokenizer.encode(text)
    for start in range(len(text)):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            pieces, stopped = streamed(tokenizer, ids, [stop])
            assert stopped
            assert "".join(pieces) == text[: text.index(stop)]


def test_partial_stop_string_is_printed():
    pieces, stopped = streamed(ByteTokenizer(), b"abcabd", ["abce"])
    assert (pieces, stopped) == (["", "", "", "abc", "", "abd", ""], False)
    # the false start overlaps the true one
    pieces, stopped = streamed(ByteTokenizer(), b"xaaab", ["aab"])
    assert (pieces, stopped) == (["x", "", "", "a", "", ""], True)
    # the end resolves it
    assert streamed(ByteTokenizer(), b"xab", ["abc"])[0] == ["x", "", "", "ab"]


def test_first_complete_stop_string_wins():
    """Wherever the borders of tokens lie: by bytes and in one piece."""

    class OnePiece:
        pieces = (b"xabcdef",)
        prefix = b""

    for stops, expected in (
        (["abcdef", "cd"], "xab"),
        (["cd", "bcd"], "xa"),
        (["zz", "x"], ""),
    ):
        by_bytes, stopped = streamed(ByteTokenizer(), b"xabcdef", stops)
        assert stopped
        assert "".join(by_bytes) == expected
        assert "".join(streamed(OnePiece(), [0], stops)[0]) == expected
