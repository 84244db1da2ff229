"""Estimate how many seeds or documents are required to detect a difference of a given size.

    python scripts/power.py RUN/evaluation/FOLDER/results.json --difference 0.02
    python scripts/power.py A/.../results.json B/.../results.json --difference 0.02    seeds, or schemes
    python scripts/power.py STUDY/results.json --difference 0.02 --length 1024 --family 8

Evaluations of the same scheme at the same trained length are its seeds; other schemes are compared
with the first one. The measured variances of seeds and of units (documents, or their authors) are
taken as the true ones. With one seed each, only the variance between units is known, and the result
applies to these checkpoints, not to the schemes.
"""

import math
from pathlib import Path

from evaluation.statistics.power import RequiredSamples, half_to_detect, needs, read_measured
from run_directory.console import Console
from settings.script import Parser, run_main


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    parser.add_argument("--difference", type=float, required=True, help="nats")
    parser.add_argument(
        "--power",
        type=float,
        default=0.8,
        help="probability of detection; 0.5: the half-width equals the difference",
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        help="confidence level",
    )
    parser.add_argument(
        "--family",
        type=int,
        default=1,
        help="number of simultaneous comparisons",
    )
    parser.add_argument("--evaluation", help="evaluation of a study with several")
    parser.add_argument(
        "--method",
        action="append",
        help="only this method (repeatable)",
    )
    parser.add_argument(
        "--length",
        type=int,
        action="append",
        help="only this length (repeatable)",
    )
    options = parser.parse_args()
    if not 0.5 < options.confidence < 1:
        parser.error(f"--confidence must be between 0.5 and 1, got {options.confidence}")
    if options.family < 1:
        parser.error(f"--family must be at least 1, got {options.family}")

    level = {"alpha": 1 - options.confidence, "family": options.family}
    half = half_to_detect(options.difference, options.power, **level)
    schemes = read_measured(options.results, options.evaluation)
    sizes = [
        size
        for size in needs(schemes, options.difference, power=options.power, **level)
        if size.method in (options.method or [size.method])
        and size.length in (options.length or [size.length])
    ]
    if not sizes:
        print(
            "nothing to compare: no results match --method and --length, other than the reference "
            "itself"
        )
        return 0
    kind = schemes[0].unit_kind
    print(
        f"Detecting {options.difference:g} nats with probability {options.power:.0%} requires a "
        f"half-width of at most {half:.4f} ({options.confidence:.0%}, {options.family} "
        "simultaneous)."
    )
    columns = [
        "comparison",
        "length",
        "now",
        "seeds",
        f"{kind}s",
        f"{kind}s needed",
        "seeds needed",
    ]
    Console().table("", columns, [_row(size) for size in sizes])
    print(
        f"{kind}s needed: with the current seeds; seeds needed: per scheme, with the current "
        f"{kind}s. none: no number suffices alone. ?: unknown; the variance of seeds requires two "
        f"seeds, and an interval six {kind}s and three seeds each."
    )
    return 0


def _row(need: RequiredSamples) -> list[str]:
    gap = need.now
    now = f"{gap.estimate:+.3f}" + ("" if math.isnan(gap.half) else f" ±{gap.half:.3f}")
    unknown = math.isnan(gap.half) and min(need.seeds) < 3
    units = "?" if unknown or gap.units < 2 else "none"
    seeds = "?" if min(need.seeds) < 2 or gap.units < 6 else "none"
    return [
        need.comparison,
        str(need.length),
        now,
        " and ".join(map(str, need.seeds)),
        str(gap.units),
        units if need.more_units is None else f"{need.more_units:,}",
        seeds if need.more_seeds is None else f"{need.more_seeds:,}",
    ]


if __name__ == "__main__":
    run_main(main)
