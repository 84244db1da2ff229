"""What a model reads at a distance: the loss of repeated text, with and without what it repeats."""

from collections.abc import Iterator

import numpy as np

from evaluation.scoring.evaluate import EvaluationResult
from evaluation.scoring.methods import TRUNCATE
from evaluation.statistics.intervals import interval, interval_columns, unit_means
from evaluation.statistics.verdicts import pooled


def read_gains(result: EvaluationResult) -> Iterator[dict]:
    """The cell of results.json for each method, length and octave of distances, from [2^k,
    2^(k+1)); intervals over units, paired by target.

    readable: number of targets whose earlier occurrence is among the inputs; nll, control_nll:
    means over targets, before and after it was replaced, and of each unit; read_gain: what the
    model reads at this distance, control NLL − NLL.
    """
    targets = result.plan.repeats
    if targets is None:
        return
    units = result.units[np.repeat(targets.document, targets.keep)]
    octave = np.frexp(targets.target_distances())[1]
    for (method, length), losses in result.repeated.items():
        inputs = result.subject.trained_length if method == TRUNCATE else length
        readable = targets.is_readable(inputs)
        for k in np.unique(octave).tolist():
            here = octave == k
            unit = units[here]
            nll = losses[here]
            control = result.control[method, length][here]
            gain = interval(unit_means(control - nll, unit), alpha=1 - result.settings.confidence)
            yield {
                "method": method,
                "length": length,
                "targets": len(nll),
                "nll": pooled(nll),
                "distance_low": 2**k // 2,
                "distance_high": 2**k,
                "readable": int(readable[here].sum()),
                "control_nll": pooled(control),
                **interval_columns("read_gain", gain),
                "units": [result.unit_names[each] for each in np.unique(unit)],
                "unit_nll": unit_means(nll, unit).tolist(),
                "unit_control_nll": unit_means(control, unit).tolist(),
            }
