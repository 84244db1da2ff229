"""What limits the numbers of an evaluation of any kind, printed below its tables."""

from collections.abc import Mapping, Sequence

from data.preparation.summary import FEW_BELOW, POINTS_ONLY_BELOW
from evaluation.reports.text import counted
from evaluation.scoring.methods import name_of
from evaluation.scoring.session import MeasuredCells


def caveats(
    units: int, unit_kind: str, runs: Mapping[str, MeasuredCells], notes: Sequence[str] = ()
) -> list[str]:
    """Sentences; `runs`: the results by name, '' for a single one."""
    lines = []
    few = f"Only {counted(units, unit_kind)}"
    if units < POINTS_ONLY_BELOW:
        lines.append(f"{few}: point estimates, as intervals require {POINTS_ONLY_BELOW}.")
    elif units < FEW_BELOW:
        lines.append(f"{few}: interpret the intervals with caution.")
    lines += notes
    missing: dict[str, dict[str, list[str]]] = {}  # by reason and variant
    for run, result in runs.items():
        for (method, length), reason in (result.absent | result.failed).items():
            name = ", ".join(filter(None, (run, name_of(method))))
            missing.setdefault(reason, {}).setdefault(name, []).append(f"{length:,}")
    for reason, variants in missing.items():
        cells = [f"{name} at {', '.join(lengths)}" for name, lengths in variants.items()]
        lines.append(f"Not measured: {'; '.join(cells)}: {reason}.")
    dtype = next(iter(runs.values())).settings.dtype
    if dtype != "float32":
        errors = [abs(error) for result in runs.values() for error in result.precision.values()]
        off = f"; mean NLL within {max(errors):.4f} nats of float32 on a sample" if errors else ""
        lines.append(f"Measured in {dtype}{off}.")
    return [*lines, *dict.fromkeys(note for result in runs.values() for note in result.notes)]
