"""The interface of tokenizers, plain bytes, and the symbols of tasks.

Every tokenizer provides the raw bytes of each id (`pieces`), so that losses can be reported in bits
per byte and encoding can be checked to be lossless.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from data.files import atomic, canonical_hash, sha256_of, write_json
from errors import DataError

# a file beside the tokenizer's own file, with its name, hash and control symbols
CARD = "tokenizer_info.json"


class Tokenizer(ABC):
    """Base class of tokenizers."""

    name: ClassVar[str]  # the name in its settings
    file: ClassVar[str]  # the file of its vocabulary in a saved folder
    content: bytes | None = None  # content of that file, if it is not CARD
    vocab_size: int  # the highest id + 1; the embedding of an imported model may have more rows
    bos_id: int | None
    eos_id: int | None  # the end of a document
    # ids that end generated text: `eos_id` and, in some models, the end of a turn
    eos_ids: tuple[int, ...]
    pad_id: int | None
    add_bos: bool  # whether models of this tokenizer expect `bos_id` before each document
    hash: str  # sha256, hex, of everything that defines the encoding and the control symbols
    pieces: list[bytes]  # the raw bytes of each id; empty for control symbols
    prefix: bytes  # what the tokenizer inserts before each text (a space, in some external models)
    normalization: str = ""  # a change of the text before encoding, such as NFC; for messages

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode `text`, without begin and end of document. Text that spells a control symbol is
        text."""

    def decode(self, ids: list[int]) -> str:
        """Decode `ids`. Control symbols are dropped; invalid UTF-8 becomes U+FFFD."""
        raw = b"".join([self.pieces[i] for i in ids])
        return raw.removeprefix(self.prefix).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` reads."""
        if self.content is not None:
            with atomic(folder / self.file) as file:
                file.write(self.content)
        write_json(folder / CARD, {"name": self.name, "hash": self.hash, **self.controls})

    @property
    def controls(self) -> dict[str, Any]:
        """Facts about control symbols that the tokenizer's own file does not define."""
        return {"eos_ids": list(self.eos_ids), "add_bos": self.add_bos}

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """(V,) int64: number of raw bytes of each id, 0 for control symbols."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0-255, begin of document 256 and end of document 257."""

    name = "bytes"
    file = CARD
    vocab_size = 258
    bos_id = 256
    eos_id = 257
    pad_id = None
    eos_ids = (257,)
    add_bos = True
    prefix = b""
    hash = sha256_of("sextant bytes: 256 bytes, bos 256, eos 257")
    pieces = [bytes([value]) for value in range(256)] + [b"", b""]

    def encode(self, text):
        return list(text.encode())


END = "<end>"
BEGIN = "<begin>"


class SymbolTokenizer(Tokenizer):
    """One token for each symbol; text is symbols with white space between them.

    Id 0 ends an answer and id 1 begins an item; both are control symbols.
    """

    name = "symbols"
    file = CARD
    bos_id = 1
    eos_id = 0
    eos_ids = (0,)
    pad_id = None
    add_bos = True
    prefix = b" "

    def __init__(self, symbols: Sequence[str]):
        self.symbols = list(symbols)
        self.ids = {symbol: i for i, symbol in enumerate([END, BEGIN, *symbols])}
        self.vocab_size = len(self.ids)
        self.pieces = [b"", b"", *(f" {symbol}".encode() for symbol in symbols)]

    @cached_property
    def hash(self) -> str:
        return canonical_hash(["symbols", self.symbols])

    @property
    def controls(self):
        return {**super().controls, "symbols": self.symbols}

    def encode(self, text):
        known = {symbol: self.ids[symbol] for symbol in self.symbols}
        try:
            return [known[symbol] for symbol in text.split()]
        except KeyError as error:
            some = " ".join(self.symbols[:12]) + (" ..." if len(self.symbols) > 12 else "")
            raise DataError(
                f"{error} is not a symbol of this task; separate symbols by spaces: {some}"
            ) from None


def end_ids(
    eos_id: int | None,
    more: Sequence[int],
    vocab_size: int,
) -> tuple[int, ...]:
    """`eos_id` and `more`, without ids outside the vocabulary."""
    return tuple(sorted({i for i in (eos_id, *more) if i is not None and 0 <= i < vocab_size}))


def lossless(tokenizer: Tokenizer, ids: list[int], text: str) -> bool:
    """Whether the ids represent exactly the bytes of the text."""
    return b"".join(map(tokenizer.pieces.__getitem__, ids)) == tokenizer.prefix + text.encode()
