"""Output formats: streamed text and JSON lines. Both write the samples in order."""

import json
from collections.abc import Callable, Sequence
from typing import TextIO

from generation.samples import Sample


class TextWriter:
    """Writes samples one after the other and streams the first incomplete one.

    `escape` replaces control characters if `out` is a terminal; files receive the text unchanged.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        out: TextIO,
        escape: Callable[[str], str],
    ):
        self.samples = samples
        self.out = out
        self.escape = escape if out.isatty() else str
        # index of the current sample; number of its characters written
        self.at = 0
        self.written = 0
        self.has_header = False

    def update(self) -> None:
        """Write all text that can be written so far."""
        while self.at < len(self.samples) and (sample := self.samples[self.at]).tokens:
            if not self.has_header:
                self._write_header(sample)
            self.out.write(self.escape(sample.text[self.written :]))
            self.written = len(sample.text)
            self.out.flush()
            if not sample.finish:
                return
            self.out.write("\n")
            self.at = self.at + 1
            self.written = 0
            self.has_header = False

    def _write_header(self, sample: Sample) -> None:
        if len(self.samples) > 1:
            blank = "\n" if self.at else ""
            self.out.write(f"{blank}=== prompt {sample.index + 1}, seed {sample.seed} ===\n")
        self.out.write(self.escape(sample.prompt))
        self.has_header = True


class JsonLinesWriter:
    """Writes one JSON object per complete sample."""

    def __init__(self, samples: Sequence[Sample], out: TextIO, settings: dict):
        self.samples = samples
        self.out = out
        self.settings = settings
        self.at = 0

    def update(self) -> None:
        """Write all samples that are complete and whose predecessors are complete."""
        while self.at < len(self.samples) and (sample := self.samples[self.at]).finish:
            record = {
                "prompt": sample.prompt,
                "text": sample.text,
                "tokens": sample.tokens,
                "finish_reason": sample.finish,
                "seed": sample.seed,
                "settings": self.settings,
            }
            self.out.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.out.flush()
            self.at += 1
