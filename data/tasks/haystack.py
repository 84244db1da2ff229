"""The text around hidden facts. Training and evaluation items use different documents."""

from collections.abc import Iterable

import numpy as np

from data.sampling.random_draws import NamedDraws, hash64
from data.tokenizers import Tokenizer
from errors import DataError

BEYOND = 1 << 12  # tokens kept per document beyond `longest`, to vary the start
# letters per token, an estimated maximum; limits how much of a document is encoded first
LETTERS = 8
# residues modulo 5 that assign documents by name
SIDES = {"training": (1, 2, 3, 4), "evaluation": (0,)}


def is_for(name: str, purpose: str) -> bool:
    """Whether items for `purpose` may use the document of this name."""
    return hash64(f"haystack {name}") % 5 in SIDES[purpose]


class Haystacks:
    """Documents, as tokens, that are long enough for hidden facts.

    Args:
        documents: (name, text) of each, in order.
        tokenizer: encodes them.
        longest: minimum tokens per document; shorter ones are skipped.
        count: maximum number of documents. The first ones that are long enough are used.
        origin: name of their source, for messages.

    Raises:
        DataError: no document is long enough. The message reports the number of documents and the
            longest usable length.
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
        seen = 0
        most = 0
        for name, text in documents:
            seen += 1
            if len(text.encode()) < longest:  # a token has at least one byte
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
                f"none of the {seen:,} documents of {origin} has {longest:,} tokens; the longest "
                f"has {most:,}. Decrease the length of the items or use another haystack"
            )
        self.longest = longest

    def __len__(self) -> int:
        return len(self.tokens)

    def text(self, which: int, *key: int | str) -> np.ndarray:
        """Return `longest` tokens of document `which`, from a start that `key` selects."""
        tokens = self.tokens[which]
        draws = NamedDraws("haystack", *key[:-1])
        start = draws.one(key[-1], len(tokens) - self.longest + 1)
        return tokens[start : start + self.longest]
