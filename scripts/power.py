"""How many seeds or documents would be needed to see a difference of a given size.

    python scripts/power.py RUN/evaluation/FOLDER/results.json --difference 0.02
    python scripts/power.py A/.../results.json B/.../results.json --difference 0.02    seeds, or schemes
    python scripts/power.py STUDY/results.json --difference 0.02 --length 1024 --family 8

Several evaluations of one scheme at one trained length are its seeds; others are compared with the first one
given. The variances that were measured are taken as they are: of seeds, and of units (documents, or the
authors that group them). With one seed of each, only the units of these very checkpoints are known, and no
claim about a scheme can be planned.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evaluation.power import Need, half_to_see, needs, read_measured
from training.console import Console, run_main


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    parser.add_argument("--difference", type=float, required=True, help="nats")
    parser.add_argument(
        "--power", type=float, default=0.8, help="chance to see it; 0.5: the interval is as wide as it"
    )
    parser.add_argument("--confidence", type=float, default=0.95, help="level of the interval")
    parser.add_argument("--family", type=int, default=1, help="comparisons that share this level")
    parser.add_argument("--evaluation", help="which one, where a study holds several")
    parser.add_argument("--rule", action="append", help="only this rule; may be given again")
    parser.add_argument("--length", type=int, action="append", help="only this length; may be given again")
    given = parser.parse_args()
    if not 0.5 < given.confidence < 1:
        parser.error(f"--confidence {given.confidence}: give a level between 0.5 and 1")
    if given.family < 1:
        parser.error(f"--family {given.family}: give 1 or more")

    def wanted(rule: str, length: int) -> bool:
        return (not given.rule or rule in given.rule) and (not given.length or length in given.length)

    level = {"alpha": 1 - given.confidence, "family": given.family}
    half = half_to_see(given.difference, given.power, **level)
    schemes = read_measured(given.results, given.evaluation)
    found = needs(schemes, given.difference, power=given.power, wanted=wanted, **level)
    if not found:
        print("nothing to compare: no cell beside as trained at its own length fits --rule and --length")
        return 0
    kind = schemes[0].unit_kind
    print(
        f"To see {given.difference:g} nats with a chance of {given.power:.0%}, an interval must be at most "
        f"±{half:.4f} wide ({given.confidence:.0%}, {given.family} in the family)."
    )
    columns = ["comparison", "length", "now", "seeds", f"{kind}s", f"{kind}s needed", "seeds needed"]
    Console().table("", columns, [_row(one) for one in found])
    print(
        f"{kind}s needed: with these seeds; seeds needed: of each scheme, with these {kind}s. "
        "none: no number would do alone. ?: it takes two seeds to know how seeds vary, and six "
        f"{kind}s and three seeds of each for a claim."
    )
    return 0


def _row(need: Need) -> list[str]:
    now = f"{need.estimate:+.3f}" + ("" if math.isnan(need.half) else f" ±{need.half:.3f}")
    unknown = math.isnan(need.half) and min(need.seeds) < 3
    units = "?" if unknown or need.units < 2 else "none"
    seeds = "?" if min(need.seeds) < 2 or need.units < 6 else "none"
    return [
        need.comparison,
        str(need.length),
        now,
        " and ".join(map(str, need.seeds)),
        str(need.units),
        units if need.more_units is None else f"{need.more_units:,}",
        seeds if need.more_seeds is None else f"{need.more_seeds:,}",
    ]


if __name__ == "__main__":
    run_main(main)
