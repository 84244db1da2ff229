"""Repetition of text by position, from token ids."""

import numpy as np

GRAM = 4

MEASURES = {
    "repeated_4": "share of 4-grams that ended before within as many tokens as a bucket has",
    "distinct_1": "different tokens of a bucket, as a share of its tokens",
    "longest_run": "longest stretch of a bucket, in tokens, that repeats one of the last tokens "
    "before",
    "nll": "NLL of the tokens under the model, nats, at temperature 1",
}


def repeated_runs(tokens: np.ndarray, back: int) -> np.ndarray:
    """(R, N) ids → (R, N) the length of the longest stretch that ends here and ended before, at
    most `back` tokens earlier. Stretches may overlap: after `aaaa` comes a run of 4."""
    rows, count = tokens.shape
    longest = np.zeros((rows, count), dtype=np.int64)
    place = np.arange(count)
    for shift in range(1, min(back, count - 1) + 1):
        same = tokens[:, shift:] == tokens[:, :-shift]
        # The length of the run is the distance to the last mismatch.
        last = np.maximum.accumulate(np.where(same, -1, place[: count - shift]), axis=1)
        run = place[: count - shift] - last
        longest[:, shift:] = np.maximum(longest[:, shift:], run)
    return longest


def by_bucket(
    tokens: np.ndarray,
    ends: np.ndarray,
    nll: np.ndarray,
    edges: list[int],
) -> dict[str, np.ndarray]:
    """Every measure, (R, buckets); NaN where a row has no token in a bucket.

    Args:
        tokens: (R, N) ids, the prompt first.
        ends: (R,) how many tokens of each row there are.
        nll: (R, N) nats; only entries from the first edge on are read.
        edges: of the buckets of positions, the first one the prompt's length; the first bucket's
            width is how far back repetitions are looked for.
    """
    runs = repeated_runs(tokens, edges[1] - edges[0])
    buckets = len(edges) - 1
    out = {name: np.full((len(tokens), buckets), np.nan) for name in MEASURES}
    for row, end in enumerate(ends.tolist()):
        for n in range(buckets):
            low = edges[n]
            high = min(edges[n + 1], end)
            if low >= high:
                break
            here = runs[row, low:high]
            out["repeated_4"][row, n] = (here >= GRAM).mean()
            out["distinct_1"][row, n] = len(np.unique(tokens[row, low:high])) / (high - low)
            out["longest_run"][row, n] = here.max()
            out["nll"][row, n] = nll[row, low:high].mean()
    return out
