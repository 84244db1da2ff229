"""Targets of runs with different tokenizers: the tokens that tile the same byte ranges of one text.

The spans of the first run are shortened to byte offsets at which every tokenizer has a token
boundary, next to white space or before a character of several bytes (in Chinese: any character).
Losses are per byte.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, reduce

import numpy as np

from data.files import canonical_hash, sha256_of
from errors import EvaluationError
from evaluation.scoring.evaluation_plan import ChosenTargets

WHITE = np.array(list(b" \t\n\r\v\f"))


def choose_byte_spans(runs: Sequence[ChosenTargets]) -> list[ChosenTargets]:
    """The targets of each run. `runs`: the fixed targets of each run. Raises EvaluationError if the
    texts differ, tokens do not match their text, or no span has enough context in all runs."""
    plan = runs[0].plan
    lengths = plan.lengths
    if len({run.text.store.n_documents for run in runs}) > 1:
        raise EvaluationError(
            "runs with different tokenizers are compared on one text, and their corpora have "
            "different numbers of documents: prepare one text with each tokenizer"
        )
    trained = [int(run.plan.truncated_windows[0, 2]) for run in runs]
    if too_long := set(trained) - set(lengths):
        raise EvaluationError(
            f"the documents are too short, in tokens of the first run, for the trained length "
            f"{max(too_long)} of another run: evaluate longer documents (shorten cannot drop it)"
        )
    shared = cache(lambda document: _shared_document(runs, document))
    spans = {}  # document, first byte, end -> first token and end in each run
    for number, last, _, count in plan.truncated_windows.tolist():
        _, starts, cuts = shared(number)
        low, high = starts[0][[last - count, last]]
        inside = cuts[(cuts >= low) & (cuts <= high)]
        if len(inside) > 1:
            ends = inside[[0, -1]]
            ranges = [np.searchsorted(offsets, ends).tolist() for offsets in starts]
            if all(
                lengths[-1] < end <= start + lengths[0] and run.text.is_clean(number, start, end)
                for run, (start, end) in zip(runs, ranges, strict=True)
            ):
                spans[number, *ends.tolist()] = ranges
    if not spans:
        raise EvaluationError(
            f"no span of targets has at most {lengths[0]} tokens, and {lengths[-1]} of context, "
            "under every tokenizer: lower targets or lengths"
        )
    document, low, high = np.array(list(spans)).T
    record = {
        "longest": lengths[-1],
        "bos_rule": runs[0].text.bos_rule,
        "texts": [shared(d)[0] for d in np.unique(document).tolist()],
        "bytes": list(spans),
    }
    digest = canonical_hash(record)
    chosen = []
    tokens = np.array(list(spans.values())).transpose(1, 2, 0)  # (runs, 2, spans)
    for run, length, (start, end) in zip(runs, trained, tokens, strict=True):
        windows = {
            n: np.stack([document, end, np.full(len(end), n), end - start], axis=1) for n in lengths
        }
        own = replace(
            plan,
            windows=windows,
            truncated_windows=windows[length],
            hash=digest,
            record={"hash": digest, **record},
            span_bytes=high - low,
        )
        screening = replace(run.screening, kept=np.ones((end - start).sum(), dtype=bool))
        chosen.append(replace(run, plan=own, screening=screening))
    return chosen


def _shared_document(
    runs: Sequence[ChosenTargets], document: int
) -> tuple[str, list[np.ndarray], np.ndarray]:
    """Hash of a document's bytes; for each run, the byte offsets of its tokens and of its end; and
    the offsets, ascending, at which spans may begin and end."""
    texts = set()
    starts = []
    for run in runs:
        ids = run.text.slice(document, 0, int(run.text.lengths[document]))
        pieces = [run.tokenizer.pieces[token] for token in ids.tolist()]
        prefix = len(run.tokenizer.prefix)
        texts.add(b"".join(pieces)[prefix:])
        starts.append(np.cumsum([0, *map(len, pieces)]) - prefix)
    store = runs[0].text.store
    raw = texts.pop()
    if texts or len(raw) != store.bytes[document]:
        raise EvaluationError(
            "runs with different tokenizers are compared on one text, and the tokens of document "
            f"{store.names[document]} are not the bytes of its text in all of them: prepare one "
            "text with each tokenizer"
        )
    byte = np.frombuffer(raw, dtype=np.uint8)
    white = np.isin(byte, WHITE)
    common = reduce(np.intersect1d, starts)
    common = common[(common > 0) & (common < len(raw))]
    cuts = common[white[common] | white[common - 1] | (byte[common] >= 0xC0)]
    return sha256_of(raw), starts, cuts
