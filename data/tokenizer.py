"""Conversion between text and ids, with sentencepiece models or plain bytes.

Every tokenizer provides the raw bytes of each id (`pieces`), so that losses can be reported in bits per byte
and encoding can be checked to be lossless.
"""

import hashlib
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece

from data.files import atomic, damage_reported, read_json, write_json
from errors import DataError

SPACE = "\u2581"  # how sentencepiece represents a space inside its pieces
BLOCK = 1 << 20  # characters per block where lines are encoded independently


class Tokenizer(ABC):
    """Base class of tokenizers."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    hash: str  # sha256, hex, of everything that defines the tokenizer
    pieces: list[bytes]  # the raw bytes of each id; empty for control symbols
    prefix: bytes  # what the tokenizer inserts before each text (a space, in some external models)

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode `text`, without begin and end of document."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Decode `ids`. Control symbols are dropped; invalid UTF-8 becomes U+FFFD."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` reads."""

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """(V,) int64: number of raw bytes of each id, 0 for control symbols."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0-255, begin of document 256 and end of document 257."""

    vocab_size, bos_id, eos_id, pad_id = 258, 256, 257, None
    prefix = b""
    hash = hashlib.sha256(b"sextant bytes: 256 bytes, bos 256, eos 257").hexdigest()
    pieces = [bytes([value]) for value in range(256)] + [b"", b""]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        write_json(folder / "tokenizer.json", {"name": "bytes", "hash": self.hash})


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, trained here or external. `origin` is its file name in messages."""

    def __init__(self, model: bytes, origin: str = "the sentencepiece model"):
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(model)
            self.vocab_size = self.processor.vocab_size()
        except (RuntimeError, OSError):
            self.vocab_size = 0
        if self.vocab_size == 0:
            raise DataError(f"{origin} is not a sentencepiece model or is damaged; use another file")
        control = (self.processor.bos_id(), self.processor.eos_id(), self.processor.pad_id())
        self.bos_id, self.eos_id, self.pad_id = (i if i >= 0 else None for i in control)
        self.hash = hashlib.sha256(b"sentencepiece\0" + model).hexdigest()
        self.pieces = [self._piece(i) for i in range(self.vocab_size)]
        # Determine the behavior from the model itself: an external file does not record how it was trained.
        first = self.processor.encode("a")
        self.prefix = b" " if first and self.pieces[first[0]].startswith(b" ") else b""
        self._newline = self.processor.piece_to_id("\n")
        self._space_bytes = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        # Splitting a text after a newline preserves its ids if a newline is always a separate piece and
        # nothing is inserted before a text.
        self._by_line = not self.prefix and self.pieces[self._newline] == b"\n"
        self._by_line &= not any(b"\n" in piece and piece != b"\n" for piece in self.pieces)
        self._has_space_bytes = not self.prefix and all(self.processor.is_byte(i) for i in self._space_bytes)

    def _piece(self, i: int) -> bytes:
        if self.processor.is_byte(i):
            return bytes([int(self.processor.id_to_piece(i)[3:5], 16)])
        if self.processor.is_control(i) or self.processor.is_unknown(i) or self.processor.is_unused(i):
            return b""
        return self.processor.id_to_piece(i).replace(SPACE, " ").encode()

    def encode(self, text: str) -> list[int]:
        if not self._by_line or len(text) <= BLOCK:
            return self._encode(text)
        ids, start = [], 0
        while start < len(text):
            stop = text.find("\n", start + BLOCK) + 1 or len(text)
            ids += self._encode(text[start:stop])
            start = stop
        return ids

    def _encode(self, text: str) -> list[int]:
        # A literal U+2581 would be decoded as a space, so encode it as bytes.
        if not self._has_space_bytes or SPACE not in text:
            return self.processor.encode(text)
        first, *rest = self.processor.encode(text.split(SPACE))
        for part in rest:
            first += self._space_bytes + part
        return first

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode([int(i) for i in ids])

    def save(self, folder: Path) -> None:
        with atomic(folder / "tokenizer.model") as file:
            file.write(self.model)
        write_json(folder / "tokenizer.json", {"name": "sentencepiece", "hash": self.hash})


def lossless(tokenizer: Tokenizer, ids: list[int], text: str) -> bool:
    """Whether the ids represent exactly the bytes of the text."""
    pieces = tokenizer.pieces
    return b"".join([pieces[i] for i in ids]) == tokenizer.prefix + text.encode()


def load_sentencepiece(path: Path | str) -> SentencePieceTokenizer:
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(
            f"tokenizer model {path} does not exist; set data.tokenizer.model to an existing file"
        )
    model = path.read_bytes()
    if model.lstrip().startswith(b"{"):
        raise DataError(
            f"{path} is a JSON file of Hugging Face's tokenizers, but only sentencepiece models are "
            "supported; use the model's tokenizer.model"
        )
    return SentencePieceTokenizer(model, str(path))


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer saved in `folder`. Raises DataError if it is missing or was modified."""
    card, model = Path(folder) / "tokenizer.json", Path(folder) / "tokenizer.model"
    if not card.is_file():
        raise DataError(f"{folder} has no tokenizer.json; prepare the data again")
    with damage_reported(card, "delete its folder and prepare the data again"):
        saved = read_json(card)
        name, expected = saved["name"], saved["hash"]
    if name not in ("bytes", "sentencepiece"):
        raise DataError(f"{card} has the unknown tokenizer {name!r}; known are bytes and sentencepiece")
    tokenizer = ByteTokenizer() if name == "bytes" else load_sentencepiece(model)
    if tokenizer.hash != expected:
        raise DataError(f"{model} does not match its recorded hash; prepare the data again")
    return tokenizer
