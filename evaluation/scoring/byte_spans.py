"""Targets of runs with different tokenizers: the tokens that tile the same byte ranges of one text.

The spans of the first run are shortened to byte offsets at which every tokenizer has a token
boundary, next to white space or before a character of several bytes (in Chinese: any character).
Losses are per byte.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from data import Tokenizer
from errors import EvaluationError
from evaluation.contamination.screening import screen, shared_text
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.scoring.cells import content_hash
from evaluation.scoring.chosen_targets import ChosenTargets
from evaluation.scoring.plan import make_plan
from evaluation.scoring.text import EvaluationText
from evaluation.scoring.windows import TargetWindows
from evaluation.stores import EvaluationStores

WHITE = np.array(list(b" \t\n\r\v\f"))
DIFFERENT = "runs with different tokenizers are compared on one text, and these were prepared from"


class TokenizedText:
    """The evaluated text under the tokenizer of one run."""

    def __init__(
        self, settings: EvaluationSettings, stores: EvaluationStores, tokenizer: Tokenizer, console
    ):
        self.stores = stores
        self.tokenizer = tokenizer
        self.shared = shared_text(settings.contamination, stores, tokenizer, console)
        self.text = EvaluationText(stores.read, settings.bos, tokenizer.bos_id, self.shared.rows)

    def document(self, document: int) -> tuple[bytes, np.ndarray]:
        """The raw bytes of a document, and the byte offset of each token and of the end."""
        ids = self.text.slice(document, 0, int(self.text.lengths[document]))
        pieces = [self.tokenizer.pieces[token] for token in ids.tolist()]
        prefix = len(self.tokenizer.prefix)
        return b"".join(pieces)[prefix:], np.cumsum([0, *map(len, pieces)]) - prefix

    def allows(self, document: int, start: int, end: int, lengths: Sequence[int]) -> bool:
        """Whether these tokens can be a span: with context at every length, and not excluded."""
        reaches = end > lengths[-1] and end - start <= lengths[0]
        return reaches and any(a <= start and end <= b for a, b in self.text.clean(document))


def choose_byte_spans(
    settings: EvaluationSettings,
    stores: Sequence[EvaluationStores],
    tokenizers: Sequence[Tokenizer],
    trained_lengths: Sequence[int],
    console=None,
) -> list[ChosenTargets]:
    """The targets of each run. Raises EvaluationError if the runs' texts differ, their tokens are
    not their text, or no span has enough context in all of them."""
    sides = [
        TokenizedText(settings, *each, console) for each in zip(stores, tokenizers, strict=True)
    ]
    first = stores[0].read
    if any(each.read.names != first.names for each in stores):
        raise EvaluationError(f"{DIFFERENT} different documents")
    plan = make_plan(settings, sides[0].text, first.hash, tokenizers[0].hash, trained_lengths[0])
    lengths = plan.lengths
    spans = []  # document, first byte, end
    tiles: list[list[tuple[int, int]]] = [[] for _ in sides]  # end, keep: the tokens of each span
    texts = []
    for document in np.unique(plan.truncated.document).tolist():
        raws, starts = zip(*(side.document(document) for side in sides), strict=True)
        if len({*raws}) > 1 or len(raws[0]) != first.bytes[document]:
            raise EvaluationError(f"{DIFFERENT} other bytes: document {first.names[document]}")
        texts.append(content_hash(raws[0].decode("utf-8", "surrogateescape")))
        cuts = _cuts(raws[0], starts)
        here = plan.truncated.take(np.flatnonzero(plan.truncated.document == document))
        for end, keep in zip(here.end.tolist(), here.keep.tolist(), strict=True):
            low, high = starts[0][[end - keep, end]]
            inside = cuts[(cuts >= low) & (cuts <= high)]
            tokens = [np.searchsorted(each, inside[[0, -1]]) for each in starts if len(inside) > 1]
            if tokens and all(
                side.allows(document, *each, lengths)
                for side, each in zip(sides, tokens, strict=True)
            ):
                spans.append((document, int(inside[0]), int(inside[-1])))
                for tile, (start, stop) in zip(tiles, tokens, strict=True):
                    tile.append((stop, stop - start))
    if not spans:
        raise EvaluationError(
            f"no span of {settings.targets} targets has at most {lengths[0]} tokens, and "
            f"{lengths[-1]} tokens of context, under every tokenizer: lower targets or lengths"
        )
    record = {"longest": lengths[-1], "bos_rule": settings.bos, "texts": texts, "bytes": spans}
    document, low, high = np.array(spans).T
    chosen = []
    for side, tile, trained in zip(sides, tiles, trained_lengths, strict=True):
        end, keep = np.array(tile).T
        windows = {n: TargetWindows(document, end, np.full(len(end), n), keep) for n in lengths}
        own = replace(
            plan,
            windows=windows,
            truncated=windows[trained],
            candidates=windows[trained],
            hash=content_hash(record),
            record={"hash": content_hash(record), **record},
            span=None,
            span_bytes=high - low,
        )
        screening = screen(side.shared, side.text, own.truncated)
        chosen.append(ChosenTargets(side.stores, side.tokenizer, side.text, own, screening))
    return chosen


def _cuts(raw: bytes, starts: Sequence[np.ndarray]) -> np.ndarray:
    """Byte offsets, ascending, at which spans may begin and end."""
    byte = np.frombuffer(raw, dtype=np.uint8)
    white = np.isin(byte, WHITE)
    common = reduce(np.intersect1d, starts)
    common = common[(common > 0) & (common < len(raw))]
    return common[white[common] | white[common - 1] | (byte[common] >= 0xC0)]
