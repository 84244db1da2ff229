"""Incremental decoding of tokens to text, with stop strings."""

import codecs
from collections.abc import Sequence

from data.tokenizers import Tokenizer


class TextStream:
    """Decodes tokens to text as early as possible.

    Incomplete UTF-8 sequences are buffered until they are complete. Text that may be the start of a
    stop string is buffered until the stop string is ruled out, or is complete and ends the text.

    Args:
        tokenizer: any object with `pieces` and `prefix`.
        stops: strings that end the text; they are not part of it.
        begins: whether the text has no prompt; then the space that some tokenizers put before each
            text is dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        begins: bool = False,
    ):
        self.pieces = tokenizer.pieces
        self.stops = [stop for stop in stops if stop]
        self.drop = tokenizer.prefix if begins else b""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = ""  # decoded but not yet returned: possibly the start of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became final with this token; "" after a stop string."""
        piece = self.pieces[token]
        if piece and self.drop:
            piece = piece.removeprefix(self.drop)
            self.drop = b""
        return self._flush(self.decoder.decode(piece))

    def end(self) -> str:
        """The buffered text. Call it after the last token."""
        text = self._flush(self.decoder.decode(b"", final=True)) + self.pending
        self.pending = ""
        return text

    def _flush(self, text: str) -> str:
        if self.stopped:
            return ""
        self.pending += text
        # The stop string that completes first, independent of token boundaries.
        matches = [
            (start + len(stop), start)
            for stop in self.stops
            if (start := self.pending.find(stop)) >= 0
        ]
        if matches:
            self.stopped = True
            _, end = min(matches)
            text = self.pending[:end]
            self.pending = ""
            return text
        end = len(self.pending) - self._partial_stop()
        text = self.pending[:end]
        self.pending = self.pending[end:]
        return text

    def _partial_stop(self) -> int:
        """Length of the longest suffix of `pending` that is the start of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for n in range(min(longest, len(self.pending)), 0, -1):
            if any(stop.startswith(self.pending[-n:]) for stop in self.stops):
                return n
        return 0
