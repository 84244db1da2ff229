"""Task items as documents, alone or mixed into a text."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from data.data_settings import TaskSource
from data.hashing import canonical_hash
from data.sampling.random_draws import below, bits, key_of
from data.sources.text_source import GENERATED, Document, Source
from data.tasks import NO_TEXT, Haystacks, HaystackTask, TaskContext, is_for
from data.text_settings import TextSettings
from data.tokenizers import ByteTokenizer

ITEMS = 20_000  # number of items if neither a number nor a text determines it
HAYSTACKS = 100  # maximum number of haystack documents


class TaskDocuments(Source):
    """Task items as bytes. `open_text` opens the haystack and the text they are mixed into."""

    settings: TaskSource

    def __init__(
        self, settings: TaskSource, place: str, open_text: Callable[[TextSettings, str], Source]
    ):
        super().__init__(settings, place)
        task = settings.task
        self._haystack = None
        self._text = None
        self.label: str = task.name
        if isinstance(task, HaystackTask):
            self._haystack = open_text(task.haystack, f"{place}.task.haystack")
        if settings.text is not None:
            self._text = open_text(settings.text, f"{place}.text")
            self.label = f"{self._text.label}-{self.label}"
        self._inputs = [one for one in (self._haystack, self._text) if one is not None]

    def check(self) -> None:
        for one in self._inputs:
            one.check()

    def fingerprint(self) -> str:
        parts = [one.fingerprint() for one in self._inputs]
        return canonical_hash([self.settings.model_dump(mode="json"), *parts])

    def documents(self, start: int = 0) -> Iterator[Document]:
        if self._text is None:
            return itertools.islice(
                self._items(start), max(0, (self.settings.items or ITEMS) - start)
            )
        return itertools.islice(self._mixed(self._text), start, None)

    def _mixed(self, text: Source) -> Iterator[Document]:
        """After each document of the text, yield items until they reach their share of all
        bytes."""
        items = self._items(0)
        share = self.settings.share
        of_text = 0
        of_items = 0
        for document in text.documents():
            yield document
            of_text += len(document.text.encode())
            while of_items < share * (of_text + of_items):
                item = next(items)
                of_items += len(item.text.encode())
                yield item

    def _items(self, start: int) -> Iterator[Document]:
        s = self.settings
        tokenizer = ByteTokenizer()
        least, most = s.bounds
        context = TaskContext(s.task, tokenizer, "training", s.seed)
        haystacks = self._haystacks(tokenizer)
        for index in itertools.count(start):
            drawn = bits(key_of("item", s.seed, index), np.arange(3))
            length = least + int(below(drawn[:1], most - least + 1)[0])
            depth = int(below(drawn[1:2], 1001)[0]) / 1000
            haystack = NO_TEXT
            if haystacks is not None:
                haystack = haystacks.text(
                    int(below(drawn[2:], len(haystacks))[0]),
                    s.seed,
                    index,
                )
            item = context.item(index, length, depth, haystack)
            # Drop an incomplete character at the start of the haystack.
            text = bytes([*item.prompt, *item.answer]).decode(errors="ignore")
            yield Document(f"{GENERATED}{s.task.name} {s.seed}-{index}", text)

    def _haystacks(self, tokenizer: ByteTokenizer) -> Haystacks | None:
        source = self._haystack
        if source is None:
            return None
        usable = (d for d in source.documents() if d.fault is None and is_for(d.name, "training"))
        documents = ((d.name, d.text) for d in usable)
        return Haystacks(
            documents,
            tokenizer,
            self.settings.bounds[1],
            HAYSTACKS,
            source.label,
        )
