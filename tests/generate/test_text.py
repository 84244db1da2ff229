"""Text from tokens: whole characters only, spaces as the tokenizer means them, stop strings at any border."""

import pytest

from data.tokenizer import ByteTokenizer
from generation import TextStream

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
def test_streaming_equals_decoding_at_once(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces, _ = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("�" in piece for piece in pieces)
    assert pieces[-1] == "", "nothing waits where no stop string is asked for"


@pytest.mark.parametrize("text", TEXTS)
def test_a_continuation_joins_its_prompt_wherever_it_is_cut(tokenizer, text):
    """The space some tokenizers put before a text must neither vanish nor appear where the prompt ends."""
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


def test_chinese_by_bytes_appears_character_by_character():
    ids = list("合久".encode())
    assert streamed(ByteTokenizer(), ids)[0] == ["", "", "合", "", "", "久", ""]


def test_broken_utf8_is_replaced_once_it_is_certain():
    assert streamed(ByteTokenizer(), [0xE5, 0x90, ord("x")])[0] == ["", "", "�x", ""]
    assert streamed(ByteTokenizer(), [ord("x"), 0xE5])[0] == ["x", "", "�"]


def test_control_symbols_are_silent(tokenizer):
    ids = tokenizer.encode("mat")
    assert "".join(streamed(tokenizer, [tokenizer.bos_id, *ids, tokenizer.eos_id])[0]) == "mat"


@pytest.mark.parametrize("text", TEXTS)
def test_a_stop_string_is_found_across_tokens_and_not_given(tokenizer, text):
    ids = tokenizer.encode(text)
    for start in range(len(text)):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            pieces, stopped = streamed(tokenizer, ids, [stop])
            assert stopped
            assert "".join(pieces) == text[: text.index(stop)]


def test_what_only_began_like_a_stop_string_is_given_late_but_whole():
    pieces, stopped = streamed(ByteTokenizer(), b"abcabd", ["abce"])
    assert (pieces, stopped) == (["", "", "", "abc", "", "abd", ""], False)
    pieces, stopped = streamed(ByteTokenizer(), b"xaaab", ["aab"])  # the false start overlaps the true one
    assert (pieces, stopped) == (["x", "", "", "a", "", ""], True)
    assert streamed(ByteTokenizer(), b"xab", ["abc"])[0] == ["x", "", "", "ab"]  # the end resolves it


def test_of_several_stop_strings_the_first_complete_one_counts():
    """Wherever the borders of tokens lie: by bytes and in one piece."""

    class OnePiece:
        pieces, prefix = [b"xabcdef"], b""

    for stops, expected in ((["abcdef", "cd"], "xab"), (["cd", "bcd"], "xa"), (["zz", "x"], "")):
        by_bytes, stopped = streamed(ByteTokenizer(), b"xabcdef", stops)
        assert stopped and "".join(by_bytes) == expected
        assert "".join(streamed(OnePiece(), [0], stops)[0]) == expected
