"""What a model reads at a distance: the loss of repeated text, with and without what it repeats."""

from dataclasses import dataclass, field

import numpy as np

from evaluation.scoring.repetition import RepeatedTargets
from evaluation.statistics.intervals import Interval, interval, unit_means
from evaluation.statistics.verdicts import pooled


@dataclass(frozen=True)
class ReadGain:
    """Targets of one method and length whose distance is in [low, high).

    Attributes:
        readable: number of targets whose earlier occurrence is among the inputs.
        nll, control: means over targets, before and after it was replaced.
        read_gain: control - NLL, nats; what the model reads at this distance.
        gain: NLL with the context truncated to L0 - NLL, on the same targets.
        unit: (D,) ids of the units; unit_nll, unit_control: means over each one's targets.
    """

    method: str
    length: int
    low: int
    high: int
    targets: int
    documents: int
    readable: int
    nll: float
    control: float
    read_gain: Interval
    gain: Interval | None
    unit: np.ndarray = field(repr=False)
    unit_nll: np.ndarray = field(repr=False)
    unit_control: np.ndarray = field(repr=False)


def read_gains(
    method: str,
    length: int,
    targets: RepeatedTargets,
    *,
    context: int,
    nll: np.ndarray,
    control: np.ndarray,
    truncated: np.ndarray | None,
    units: np.ndarray,
    alpha: float,
) -> list[ReadGain]:
    """In each octave of distances, from [2^k, 2^(k+1)); intervals over units, paired by target.

    Args:
        context: tokens that the method reads, at most `length`.
        nll, control, truncated: (n_targets,).
        units: of every document of the corpus.
    """
    readable = targets.is_readable(context)
    document = np.repeat(targets.document, targets.keep)
    octave = np.frexp(targets.target_distances())[1]
    out = []
    for k in np.unique(octave).tolist():
        here = octave == k
        unit = units[document[here]]
        gain = None
        if truncated is not None:
            gain = interval(unit_means((truncated - nll)[here], unit), alpha=alpha)
        out.append(
            ReadGain(
                method=method,
                length=length,
                low=2**k // 2,
                high=2**k,
                targets=int(here.sum()),
                documents=len(np.unique(document[here])),
                readable=int(readable[here].sum()),
                nll=pooled(nll[here]),
                control=pooled(control[here]),
                read_gain=interval(unit_means((control - nll)[here], unit), alpha=alpha),
                gain=gain,
                unit=np.unique(unit),
                unit_nll=unit_means(nll[here], unit),
                unit_control=unit_means(control[here], unit),
            )
        )
    return out
