"""Sentencepiece models."""

from collections.abc import Iterator, Sequence

import sentencepiece

from data.files import sha256_of
from data.tokenizers.tokenizer_base import Tokenizer, end_ids
from data.tokenizers.tokenizer_settings import SentencePieceSettings
from errors import DataError

SPACE = "\u2581"  # how sentencepiece represents a space inside its pieces
BLOCK = 1 << 20  # characters per block if lines are encoded independently


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, trained here or external.

    Args:
        content: the bytes of the file.
        origin: name of the file in messages.
        eos_ids: further ids that end generated text.
        add_bos: see `Tokenizer`; None: true if the model has a BOS.
    """

    name = "sentencepiece"
    file = SentencePieceSettings.file

    def __init__(
        self,
        content: bytes,
        origin: str = "the sentencepiece model",
        *,
        eos_ids: Sequence[int] = (),
        add_bos: bool | None = None,
    ):
        self.content = content
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(content)
            self.vocab_size = self.processor.vocab_size()
        except (RuntimeError, OSError):
            self.vocab_size = 0
        if self.vocab_size == 0:
            raise DataError(
                f"{origin} is not a sentencepiece model or is damaged; use another file"
            )
        self.bos_id = _id_or_none(self.processor.bos_id())
        self.eos_id = _id_or_none(self.processor.eos_id())
        self.pad_id = _id_or_none(self.processor.pad_id())
        self.eos_ids = end_ids(self.eos_id, eos_ids, self.vocab_size)
        self.add_bos = self.bos_id is not None and add_bos is not False
        self.hash = sha256_of(b"sentencepiece\0" + content)
        self.pieces = [self._piece(i) for i in range(self.vocab_size)]
        # Determine the behavior from the model itself: an external file does not record how it was
        # trained.
        first = self.processor.encode("a")
        self.prefix = b" " if first and self.pieces[first[0]].startswith(b" ") else b""
        self._newline = self.processor.piece_to_id("\n")
        self._space_bytes = [
            self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()
        ]
        # Splitting a text after a newline preserves its ids if a newline is always a separate piece
        # and nothing is inserted before a text.
        self._by_line = not self.prefix and self.pieces[self._newline] == b"\n"
        self._by_line &= not any(b"\n" in piece and piece != b"\n" for piece in self.pieces)
        self._has_space_bytes = not self.prefix and all(
            self.processor.is_byte(i) for i in self._space_bytes
        )

    def _piece(self, i: int) -> bytes:
        if self.processor.is_byte(i):
            return bytes([int(self.processor.id_to_piece(i)[3:5], 16)])
        if (
            self.processor.is_control(i)
            or self.processor.is_unknown(i)
            or self.processor.is_unused(i)
        ):
            return b""
        return self.processor.id_to_piece(i).replace(SPACE, " ").encode()

    def encode(self, text):
        ids: list[int] = []
        for block in self._blocks(text):
            ids += self._encode(block)
        return ids

    def _blocks(self, text: str) -> Iterator[str]:
        """Parts of a text whose concatenated ids are the ids of the text."""
        if not self._by_line:
            yield text
            return
        start = 0
        while start < len(text):
            stop = text.find("\n", start + BLOCK) + 1 or len(text)
            yield text[start:stop]
            start = stop

    def _encode(self, text: str) -> list[int]:
        # A literal U+2581 would be decoded as a space, so encode it as bytes.
        if not self._has_space_bytes or SPACE not in text:
            return self.processor.encode(text)
        first, *rest = self.processor.encode(text.split(SPACE))
        for part in rest:
            first += self._space_bytes + part
        return first


def _id_or_none(i: int) -> int | None:
    """sentencepiece's −1 for a missing symbol as None."""
    return i if i >= 0 else None
