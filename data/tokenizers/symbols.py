"""Tokens that are the symbols of a task."""

from collections.abc import Sequence
from functools import cached_property

from data.hashing import canonical_hash
from data.tokenizers.tokenizer import CARD, Tokenizer
from errors import DataError

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
                f"{error} is no symbol of this task; write symbols with spaces between them: {some}"
            ) from None
