"""Documents that are made, not read: task items, and filler text without content."""

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np

from data.data_settings import TaskSource
from data.hashing import canonical_hash
from data.sampling.random_draws import below, bits, key_of
from data.sources.text_source import Document, Source
from data.tasks import NO_TEXT, Haystacks, TaskContext, is_for
from data.tokenizers import ByteTokenizer

HAYSTACKS = 100  # maximum number of haystack documents


class TaskDocuments(Source):
    """Task items as bytes, with text from `haystack` for tasks that read text."""

    settings: TaskSource

    def __init__(self, settings: TaskSource, place: str, haystack: Source | None):
        super().__init__(settings, place)
        self._haystack = haystack
        self.label: str = settings.task.name

    def check(self):
        if self._haystack is not None:
            self._haystack.check()

    def fingerprint(self):
        parts = [] if self._haystack is None else [self._haystack.fingerprint()]
        return canonical_hash([self.settings.model_dump(mode="json"), *parts])

    def documents(self, start: int = 0) -> Iterator[Document]:
        s = self.settings
        tokenizer = ByteTokenizer()
        least, most = s.bounds
        context = TaskContext(s.task, tokenizer, "training", s.seed)
        haystacks = self._haystacks(tokenizer)
        for index in range(start, s.items):
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
            yield Document(f"{s.task.name} {s.seed}-{index}", text)

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


SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
# documents, and sentences per document: about 340,000 characters
DOCUMENTS = 512
LENGTH = 20_000


class Filler(Source):
    label = "filler"

    def fingerprint(self):
        return hashlib.sha256(repr((SENTENCES, DOCUMENTS, LENGTH)).encode()).hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        for number in itertools.islice(range(DOCUMENTS), start, None):
            order = below(bits(key_of("filler", number), np.arange(LENGTH)), len(SENTENCES))
            yield Document(f"filler-{number:02d}", " ".join(SENTENCES[i] for i in order.tolist()))
