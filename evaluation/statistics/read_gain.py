"""What a model reads at a distance: the loss of repeated text, with and without what it repeats."""

from collections.abc import Iterator

import numpy as np

from evaluation.scoring.repetition import RepeatedTargets
from evaluation.statistics.intervals import interval, interval_columns, unit_means
from evaluation.statistics.verdicts import pooled


def read_gains(
    targets: RepeatedTargets,
    *,
    context: int,
    nll: np.ndarray,
    control: np.ndarray,
    truncated: np.ndarray | None,
    units: np.ndarray,
    names: list[str],
    alpha: float,
) -> Iterator[dict]:
    """The cell of results.json for each octave of distances, from [2^k, 2^(k+1)), of one method and
    length; intervals over units, paired by target.

    readable: number of targets whose earlier occurrence is among the inputs; nll, control_nll:
    means over targets, before and after it was replaced, and of each unit; read_gain: what the
    model reads at this distance, control NLL − NLL; gain: NLL with the context truncated to L0 −
    NLL.

    Args:
        context: tokens that the method reads, at most its length.
        nll, control, truncated: (n_targets,).
        units, names: of every document of the corpus, and of every unit.
    """
    readable = targets.is_readable(context)
    document = np.repeat(targets.document, targets.keep)
    octave = np.frexp(targets.target_distances())[1]
    for k in np.unique(octave).tolist():
        here = octave == k
        unit = units[document[here]]
        gain = None
        if truncated is not None:
            gain = interval(unit_means((truncated - nll)[here], unit), alpha=alpha)
        read_gain = interval(unit_means((control - nll)[here], unit), alpha=alpha)
        yield {
            "targets": int(here.sum()),
            "documents": len(np.unique(document[here])),
            "nll": pooled(nll[here]),
            **interval_columns("gain", gain),
            "distance_low": 2**k // 2,
            "distance_high": 2**k,
            "readable": int(readable[here].sum()),
            "control_nll": pooled(control[here]),
            **interval_columns("read_gain", read_gain),
            "units": [names[one] for one in np.unique(unit)],
            "unit_nll": unit_means(nll[here], unit).tolist(),
            "unit_control_nll": unit_means(control[here], unit).tolist(),
        }
