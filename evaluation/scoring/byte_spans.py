"""Targets of runs with different tokenizers: the tokens that tile the same byte ranges of one text.

The spans of the first run are shortened to byte offsets at which every tokenizer has a token
boundary, next to white space or before a character of several bytes (in Chinese: any character).
Losses are per byte.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from hashlib import sha256

import numpy as np

from data.hashing import canonical_hash
from errors import EvaluationError
from evaluation.scoring.chosen_targets import ChosenTargets
from evaluation.scoring.windows import TargetWindows

WHITE = np.array(list(b" \t\n\r\v\f"))


def choose_byte_spans(runs: Sequence[ChosenTargets]) -> list[ChosenTargets]:
    """The targets of each run; `runs`: fixed targets of each. Raises EvaluationError if the texts
    differ, the tokens are not the text, or no span has enough context in all runs."""
    plan = runs[0].plan
    store = runs[0].text.store
    spans = []  # document, first byte, end
    tiles = []  # of each span: first token and end in each run
    texts = []
    for document in np.unique(plan.truncated.document).tolist():
        raws, starts = zip(*(_bytes_of(run, document) for run in runs), strict=True)
        if any(raw != raws[0] for raw in raws) or len(raws[0]) != store.bytes[document]:
            raise EvaluationError(
                "runs with different tokenizers are compared on one text, and the tokens of "
                f"document {store.names[document]} are not the same bytes as its text in all of "
                "them: prepare one text with each tokenizer"
            )
        texts.append(sha256(raws[0]).hexdigest())
        cuts = _cuts(raws[0], starts)
        for window in np.flatnonzero(plan.truncated.document == document):
            end = plan.truncated.end[window]
            low, high = starts[0][[end - plan.truncated.keep[window], end]]
            inside = cuts[(cuts >= low) & (cuts <= high)]
            if len(inside) > 1:
                ends = inside[[0, -1]]
                tokens = [np.searchsorted(offsets, ends) for offsets in starts]
                if all(map(_is_usable, runs, [document] * len(runs), tokens)):
                    spans.append((document, *ends.tolist()))
                    tiles.append(tokens)
    if not spans:
        raise EvaluationError(
            f"no span of targets has at most {plan.lengths[0]} tokens, and {plan.lengths[-1]} of "
            "context, under every tokenizer: lower targets or lengths"
        )
    record = {"longest": plan.lengths[-1], "bos_rule": runs[0].text.bos_rule}
    record |= {"texts": texts, "bytes": spans}
    record["hash"] = canonical_hash(record)
    document, low, high = np.array(spans).T
    return [
        _with_tokens(run, document, tokens, {"span_bytes": high - low, "record": record})
        for run, tokens in zip(runs, np.array(tiles).swapaxes(0, 1), strict=True)
    ]


def _bytes_of(run: ChosenTargets, document: int) -> tuple[bytes, np.ndarray]:
    """The bytes of a document's tokens, and the offset of each token and of the end; none of a
    document that the run does not have."""
    if document >= len(run.text.lengths):
        return b"", np.zeros(1, dtype=np.int64)
    ids = run.text.slice(document, 0, int(run.text.lengths[document]))
    pieces = [run.tokenizer.pieces[token] for token in ids.tolist()]
    prefix = len(run.tokenizer.prefix)
    return b"".join(pieces)[prefix:], np.cumsum([0, *map(len, pieces)]) - prefix


def _cuts(raw: bytes, starts: Sequence[np.ndarray]) -> np.ndarray:
    """Byte offsets, ascending, at which spans may begin and end."""
    byte = np.frombuffer(raw, dtype=np.uint8)
    white = np.isin(byte, WHITE)
    common = reduce(np.intersect1d, starts)
    common = common[(common > 0) & (common < len(raw))]
    return common[white[common] | white[common - 1] | (byte[common] >= 0xC0)]


def _is_usable(run: ChosenTargets, document: int, tokens: np.ndarray) -> bool:
    """Whether a span of a run has context at every length and is not excluded."""
    start, end = tokens.tolist()
    lengths = run.plan.lengths
    if end <= lengths[-1] or end - start > lengths[0]:
        return False
    return any(a <= start and end <= b for a, b in run.text.clean(document))


def _with_tokens(
    run: ChosenTargets, document: np.ndarray, tokens: np.ndarray, shared: dict
) -> ChosenTargets:
    """The targets of a run: `tokens` (n_spans, 2), the first of each span and its end."""
    start, end = tokens.T
    windows = {
        length: TargetWindows(document, end, np.full(len(end), length), end - start)
        for length in run.plan.lengths
    }
    trained = windows[int(run.plan.truncated.inputs[0])]
    plan = replace(
        run.plan,
        windows=windows,
        truncated=trained,
        candidates=trained,
        hash=shared["record"]["hash"],
        span=None,
        **shared,
    )
    kept = np.ones(trained.n_targets, dtype=bool)
    return replace(run, plan=plan, screening=replace(run.screening, kept=kept))
