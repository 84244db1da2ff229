"""Generated documents: task items, and filler text without content."""

import itertools
from collections.abc import Callable

from data.data_settings import TaskSource
from data.files import canonical_hash, sha256_of
from data.random_draws import NamedDraws
from data.sources.text_source import Document, Source
from data.tasks import NO_TEXT, Haystacks, TaskItems
from data.tokenizers import ByteTokenizer

HAYSTACKS = 100  # maximum number of haystack documents


class TaskDocuments(Source):
    """Task items as bytes, with text from `haystack` for tasks that read text, without the texts
    for which `is_held_out` is true."""

    settings: TaskSource
    is_held_out: Callable[[str], bool] | None = None

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

    def documents(self, start=0):
        s = self.settings
        tokenizer = ByteTokenizer()
        least, most = s.bounds
        items = TaskItems(s.task, tokenizer, "training", s.seed)
        haystacks = None
        if (source := self._haystack) is not None:
            documents = source.haystacks("training")
            origin = source.label
            if (is_held_out := self.is_held_out) is not None:
                documents = ((name, text) for name, text in documents if not is_held_out(text))
                origin += " without validation text"
            haystacks = Haystacks(documents, tokenizer, most, HAYSTACKS, origin)
        for index in range(start, s.items):
            random = NamedDraws("item", s.seed).bits(index, 3).tolist()
            length = least + random[0] % (most - least + 1)
            depth = random[1] % 1001 / 1000
            haystack = NO_TEXT
            if haystacks is not None:
                haystack = haystacks.text(random[2] % len(haystacks), s.seed, index)
            item = items.item(index, length, depth, haystack)
            # Drop an incomplete character at the start of the haystack.
            text = bytes(item.tokens).decode(errors="ignore")
            yield Document(f"{s.task.name} {s.seed}-{index}", text)


SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
# number of documents, and of sentences per document (about 340,000 characters)
DOCUMENTS = 512
LENGTH = 20_000


class Filler(Source):
    label = "filler"

    def fingerprint(self):
        return sha256_of(repr((SENTENCES, DOCUMENTS, LENGTH)))

    def documents(self, start=0):
        for number in itertools.islice(range(DOCUMENTS), start, None):
            order = NamedDraws("filler").below(number, LENGTH, len(SENTENCES))
            yield Document(f"filler-{number:02d}", " ".join(SENTENCES[i] for i in order))
