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
    l0 = result.subject.trained_length
    alpha = 1 - result.settings.confidence
    for (method, length), nll in result.repeated.items():
        targets = result.plan.repeats
        control = result.control[method, length]
        readable = targets.is_readable(min(length, l0) if method == TRUNCATE else length)
        units = result.units[np.repeat(targets.document, targets.keep)]
        octave = np.frexp(targets.target_distances())[1]
        for k in np.unique(octave).tolist():
            here = octave == k
            unit = units[here]
            read_gain = interval(unit_means((control - nll)[here], unit), alpha=alpha)
            yield {
                "method": method,
                "length": length,
                "targets": int(here.sum()),
                "nll": pooled(nll[here]),
                "distance_low": 2**k // 2,
                "distance_high": 2**k,
                "readable": int(readable[here].sum()),
                "control_nll": pooled(control[here]),
                **interval_columns("read_gain", read_gain),
                "units": [result.unit_names[each] for each in np.unique(unit)],
                "unit_nll": unit_means(nll[here], unit).tolist(),
                "unit_control_nll": unit_means(control[here], unit).tolist(),
            }
