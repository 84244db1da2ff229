"""The loss on fixed targets, of any language model: the same tokens after contexts of several
lengths.

A span is K target tokens that end at one place in a document. The last K outputs of a window of L
inputs predict them, so target k of K (from 1) sees L − K + k tokens. Every length scores the same
targets: differences between lengths are due to context alone.

    losses = score(lambda ids: model(ids).logits, documents, lengths=[256, 1024], targets=64)
    print(by_length(losses, trained_length=256))

`evaluate.py` uses the same functions: `measure_windows` for the losses, and `mean_over_targets` and
`half_width` for their intervals.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtrit


def score(
    model: Callable[[torch.Tensor], torch.Tensor],
    documents: Sequence[np.ndarray],
    lengths: Sequence[int],
    targets: int,
    ends: Sequence[tuple[int, int]] | None = None,
    *,
    batch: int = 1,
    device: torch.device | str = "cpu",
) -> pd.DataFrame:
    """NLL in nats of every target at every length: columns `document`, `target` (index of the token
    in its document), `length` and `nll`. Raises ValueError if a window does not fit.

    Args:
        model: maps token ids (B, T) to logits (B, T, V), or to the last K of them, (B, K, V).
        documents: token ids of each document, (n,) integers.
        targets: number K of targets of each span; `lengths` are numbers of input tokens, each at
            least K.
        ends: (document, end) of each span `documents[document][end - K : end]`; None: one span at
            the end of every document with more tokens than the longest length.
    """
    longest = max(lengths)
    if ends is None:
        ends = [(d, len(ids)) for d, ids in enumerate(documents) if len(ids) > longest]
    spans = np.array(ends, dtype=np.int64).reshape(-1, 2)
    if min(lengths) < targets:
        raise ValueError(f"targets = {targets} is more than the shortest length, {min(lengths)}")
    if not len(spans):
        raise ValueError(f"no document has more tokens than the longest length, {longest}")
    for document, end in spans.tolist():
        if not longest < end <= len(documents[document]):
            raise ValueError(
                f"a span of document {document} ends at {end}: the end must be more than the "
                f"longest length, {longest}, and at most the {len(documents[document])} tokens "
                "of the document"
            )

    def nll_of(windows: np.ndarray, keep: int) -> np.ndarray:
        tokens = torch.from_numpy(windows).to(device)
        with torch.no_grad():
            logits = model(tokens[:, :-1])[:, -keep:].double()
        nll = torch.nn.functional.cross_entropy(logits.mT, tokens[:, -keep:], reduction="none")
        return nll.cpu().numpy()

    def read(document: np.ndarray, end: np.ndarray, inputs: int) -> np.ndarray:
        pairs = zip(document.tolist(), end.tolist(), strict=True)
        return np.stack([documents[d][stop - inputs - 1 : stop] for d, stop in pairs]).astype(int)

    groups = np.split(np.arange(len(spans)), range(batch, len(spans), batch))
    document, end = spans.repeat(targets, axis=0).T
    index = {"document": document, "target": end + np.tile(np.arange(-targets, 0), len(spans))}
    tables = []
    for length in lengths:
        windows = np.column_stack([spans, np.tile([length, targets], (len(spans), 1))])
        nll = np.full(len(document), np.nan)
        measure_windows(nll_of, read, windows, groups, nll)
        tables.append(pd.DataFrame(index | {"length": length, "nll": nll}))
    return pd.concat(tables, ignore_index=True)


def measure_windows(
    nll_of: Callable[[np.ndarray, int], np.ndarray],
    read: Callable[[np.ndarray, np.ndarray, int], np.ndarray],
    windows: np.ndarray,
    groups: Iterable[np.ndarray],
    nll: np.ndarray,
    after: Callable[[np.ndarray, np.ndarray], None] = lambda group, losses: None,
) -> None:
    """Fill the NaN entries of `nll`, float64 NLL of every target in the order of the windows.

    Args:
        nll_of: maps token ids (B, L + 1) and K to the NLL (B, K) in nats of the last K tokens.
        read: maps documents (B,), ends (B,) and L to the windows' tokens, (B, L + 1) int64.
        windows: (n, 4) document, end (exclusive), inputs L and targets K of each window.
        groups: for each pass, the indices of its windows, which have the same L and K.
        after: called with each group and its NLL.
    """
    keep = windows[:, 3]
    first = np.cumsum(keep) - keep
    for group in groups:
        inputs, k = windows[group[0], 2:].tolist()
        where = first[group, None] + np.arange(k)
        if np.isnan(nll[where]).any():
            nll[where] = nll_of(read(windows[group, 0], windows[group, 1], inputs), k)
        after(group, nll[where])


def by_length(
    losses: pd.DataFrame, trained_length: int, *, unit: str = "document", alpha: float = 0.05
) -> pd.DataFrame:
    """A row for each length: `nll`, `perplexity`, and `gain` over the context truncated to the
    trained length, paired by target, with intervals. `unit`: the column of `losses` whose values
    are independent, such as authors. Raises ValueError if lengths have different targets, or if
    the trained length is not among them."""
    index = list(dict.fromkeys([unit, "document", "target"]))
    wide = losses.pivot(index=index, columns="length", values="nll")
    if wide.isna().any(axis=None):
        raise ValueError("the NLL of some targets is missing at some lengths, or NaN")
    if trained_length not in wide:
        raise ValueError(f"trained_length = {trained_length} is not one of {wide.columns.tolist()}")
    grouped = wide.groupby(level=unit)
    sums = grouped.agg("sum")
    counts = grouped.size().to_numpy()
    rows = []
    for length in sums:
        nll, low, high = ratio_interval(sums[length].to_numpy(), counts, alpha)
        changes = (sums[trained_length] - sums[length]).to_numpy()
        gain, gain_low, gain_high = ratio_interval(changes, counts, alpha)
        row = {"length": length, "nll": nll, "low": low, "high": high, "perplexity": math.exp(nll)}
        rows.append(row | {"gain": gain, "gain_low": gain_low, "gain_high": gain_high})
    return pd.DataFrame(rows).set_index("length")


def mean_over_targets(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Mean over targets r = Σ sⱼ / Σ nⱼ, and its standard error over units j with total losses
    `sums` sⱼ (D,) and numbers of targets `counts` nⱼ (D,).
    The error is that of the linearized ratio (Cochran 1977, section 6.4), robust to any dependence
    within a unit: √(D/(D − 1) · Σ(sⱼ − r·nⱼ)²) / Σ nⱼ; with equal counts sd/√D of the unit means.
    """
    units = len(counts)
    total = counts.sum()
    mean = sums.sum() / total
    residuals = sums - mean * counts
    scale = units / (units - 1) if units > 1 else math.nan
    return float(mean), math.sqrt(scale * (residuals**2).sum()) / float(total)


def half_width(error: float, df: float, alpha: float) -> float:
    """Half the width of the interval at level 1 − alpha: the t(df) quantile times the standard
    error."""
    return float(stdtrit(df, 1 - alpha / 2)) * error


def ratio_interval(
    sums: np.ndarray, counts: np.ndarray, alpha: float, *, least_units: int = 6
) -> tuple[float, ...]:
    """(mean over targets, low, high) by Student's t with D − 1 degrees of freedom; the ends are NaN
    with fewer than `least_units` units."""
    mean, error = mean_over_targets(sums, counts)
    half = half_width(error, len(counts) - 1, alpha)
    half = half if len(counts) >= least_units else math.nan
    return mean, mean - half, mean + half
