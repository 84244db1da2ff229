"""Text without content."""

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np

from data.sampling.random_draws import below, bits, key_of
from data.sources.text_source import Document, Source

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
