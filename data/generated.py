"""The data of a run on task items, which are generated in training: nothing is on the disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.data_settings import DataSettings, SymbolSource
from data.files import canonical_hash
from data.sampling.item_rows import SymbolItems
from data.tokenizers.tokenizer import SymbolTokenizer
from errors import DataError

SAMPLED = 16  # items that the hash includes, so that it changes with the generator


@dataclass(frozen=True)
class GeneratedData:
    """Task items in place of a prepared text."""

    source: SymbolSource
    bos: bool

    @cached_property
    def tokenizer(self) -> SymbolTokenizer:
        return SymbolTokenizer(self.source.task.alphabet)

    def items(self, purpose: str, seed: int) -> SymbolItems:
        """The items for a purpose."""
        s = self.source
        return SymbolItems(s.task, s.bounds, purpose=purpose, seed=seed, bos=self.bos)

    def _hash(self, purpose: str) -> str:
        rows = self.items(purpose, 0).rows(np.arange(SAMPLED), self.longest)
        content = [None if array is None else array.tolist() for array in rows]
        return canonical_hash([purpose, self.source.model_dump(mode="json"), self.bos, content])

    @cached_property
    def hash(self) -> str:
        """Hash of the training items."""
        return self._hash("training")

    @cached_property
    def valid_hash(self) -> str:
        return self._hash("validation")

    @property
    def longest(self) -> int:
        """Inputs of the longest item."""
        return self.source.inputs(self.bos)

    def facts(self) -> dict:
        """What the manifest of a run records about its data."""
        return {"data": None, "data_hash": self.hash, "valid_hash": self.valid_hash}

    def verify(self) -> None:
        """Nothing is stored that could be damaged."""

    def opening(self) -> str:
        """The problem of a held-out item, as a prompt."""
        return self.tokenizer.decode(self.items("validation", 0).drawn(0).prompt)

    def positions(self, ids: Sequence[int], more: int) -> list[int]:
        """The positions of a prompt and of the next `more` tokens, which the task gives. Raises
        DataError for a prompt that is no problem of the task."""
        begin = [0] * (self.bos and ids[:1] == [self.tokenizer.bos_id])
        prompt = self.tokenizer.decode(ids[len(begin) :]).split()
        try:
            return begin + self.source.task.positions_of(prompt, more)
        except ValueError:
            raise DataError(
                f"the positions of the task {self.source.task.name} require a whole problem, such "
                f"as {self.opening()!r}"
            ) from None


def generated(settings: DataSettings) -> GeneratedData | None:
    """The data of settings with a task on symbols; None for text."""
    if isinstance(settings.source, SymbolSource):
        return GeneratedData(settings.source, settings.bos)
    return None
