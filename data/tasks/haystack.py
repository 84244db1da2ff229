"""The text around what is hidden. Items made for training and for evaluation stand in different documents."""

import hashlib
from collections.abc import Iterable

import numpy as np

from data.draws import below, bits, key_of
from data.errors import DataError
from data.tokenizer import Tokenizer

BEYOND = 1 << 12  # tokens kept of a document beyond those that are needed: places to begin at
LETTERS = 8  # of a token, at most as a rule: so much of a document is spelled at first
SIDES = {"training": (1, 2, 3, 4), "evaluation": (0,)}  # of every five documents, chosen by name


def belongs(name: str, purpose: str) -> bool:
    """Whether the items made for a purpose may stand in the document of this name."""
    side = int.from_bytes(hashlib.sha256(f"haystack {name}".encode()).digest()[:8], "little") % 5
    return side in SIDES[purpose]


class Haystacks:
    """Documents long enough to hide something in, as tokens.

    Args:
        documents: (name, text) of each, in order.
        tokenizer: what spells them.
        longest: tokens that are needed; documents with fewer are passed over.
        count: at most so many documents, the first that are long enough.
        origin: where they come from, for messages.

    Raises:
        DataError: no document is long enough; says how many there are, and the longest usable length.
    """

    def __init__(
        self,
        documents: Iterable[tuple[str, str]],
        tokenizer: Tokenizer,
        longest: int,
        count: int,
        origin: str,
    ):
        self.names: list[str] = []
        self.tokens: list[np.ndarray] = []
        seen, most = 0, 0
        for name, text in documents:
            seen += 1
            if len(text.encode()) < longest:  # a token has a byte at least
                most = max(most, len(text.encode()))
                continue
            tokens = tokenizer.encode(text[: LETTERS * (longest + BEYOND)])
            if len(tokens) < longest:
                tokens = tokenizer.encode(text)
            most = max(most, len(tokens))
            if len(tokens) >= longest:
                self.names.append(name)
                self.tokens.append(np.array(tokens[: longest + BEYOND], dtype=np.int32))
            if len(self.tokens) == count:
                break
        if not self.tokens:
            raise DataError(
                f"none of the {seen:,} documents of {origin} has the {longest:,} tokens of text that are to "
                f"stand around what is hidden; the longest has {most:,}: shorten the length, or give another "
                "haystack"
            )
        self.longest = longest

    def __len__(self) -> int:
        return len(self.tokens)

    def text(self, which: int, *key: int | str) -> np.ndarray:
        """`longest` tokens of document `which`, from a place that `key` decides."""
        tokens = self.tokens[which]
        room = len(tokens) - self.longest + 1
        start = int(below(bits(key_of("haystack", *key), np.arange(1)), room)[0])
        return tokens[start : start + self.longest]
