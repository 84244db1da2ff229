"""What limits the numbers of an evaluation of any kind, printed below its tables."""

from collections.abc import Mapping, Sequence

from data.preparation.summary import FEW_BELOW, POINTS_ONLY_BELOW
from evaluation.evaluation_settings import MeasurementSettings
from evaluation.reports.text import counted
from evaluation.scoring.methods import name_of


def caveats(
    settings: MeasurementSettings,
    units: int,
    unit_kind: str,
    missing: Mapping[tuple[str, int], str],
    *,
    unchecked: str = "",
    undertrained: float | None = None,
    precision: Mapping[tuple, float] | None = None,
    notes: Sequence[str] = (),
) -> list[str]:
    """Sentences.

    Args:
        missing: cells (method, length) without numbers, and why.
        unchecked: text that was not searched for passages of the training text, as a sentence.
        undertrained: nats by which an undertrained model is better than a unigram model.
        precision: mean bfloat16 − float32 of cells.
    """
    lines = [unchecked] if unchecked else []
    few = f"Only {counted(units, unit_kind)}"
    if units < POINTS_ONLY_BELOW:
        lines.append(f"{few}: point estimates, as intervals require {POINTS_ONLY_BELOW}.")
    elif units < FEW_BELOW:
        lines.append(f"{few}: interpret the intervals with caution.")
    if undertrained is not None:
        sign = "better" if undertrained > 0 else "worse"
        lines.append(
            f"The model is undertrained: as trained it is {abs(undertrained):.2f} nats {sign} than "
            "a unigram model."
        )
    if settings.dtype != "float32":
        worst = max(map(abs, precision.values()), default=None) if precision else None
        off = "" if worst is None else f"; mean NLL within {worst:.4f} nats of float32 on a sample"
        lines.append(f"Measured in {settings.dtype}{off}.")
    by_reason: dict[str, dict[str, list[str]]] = {}
    for (method, length), reason in missing.items():
        by_reason.setdefault(reason, {}).setdefault(method, []).append(f"{length:,}")
    for reason, methods in by_reason.items():
        cells = [f"{name_of(method)} at {', '.join(n)}" for method, n in methods.items()]
        lines.append(f"Not measured: {'; '.join(cells)}: {reason}.")
    return [*lines, *notes]
