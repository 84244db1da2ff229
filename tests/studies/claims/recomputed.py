"""Verdicts computed again from a claim file and its results.csv, by the csv module and scipy.stats:
nothing of studies.claims is used."""

import csv
import math
import operator
from collections import defaultdict
from pathlib import Path

import yaml
from scipy import stats

OPERATIONS = {"minus": operator.sub, "times": operator.mul, "absolute": abs}
KEYS = ("evaluation", "metric", "method", "length")


def merged(file: Path) -> dict:
    """A claim file with the file that it extends."""
    tree = yaml.safe_load(file.read_text())
    parent = tree.pop("extends", None)
    below = merged(file.parent / parent) if parent else {}
    grid = {**below.get("grid", {}), **tree.get("grid", {})}
    return {**below, **tree, "grid": grid}


def verdict(file: Path, results: Path) -> tuple[str, dict[str, tuple[float, float, float]]]:
    """(verdict, {comparison: (estimate, low, high)})."""
    claim = merged(file)
    with open(results, encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    axes = [axis for axis in claim["grid"] if axis != "seed"]
    seeds = [str(seed) for seed in claim["grid"]["seed"]]
    tests = []
    for name, settings in claim["primary"].items():
        labels = claim["grid"][settings["each"]] if "each" in settings else [None]
        for label in labels:
            fixed = {} if label is None else {settings["each"]: label}
            full = name if label is None else f"{name}, {label}"
            tests.append((full, settings, fixed))
    found = {}
    lower, upper, signs = [], [], []
    for name, settings, fixed in tests:
        own = [row for row in rows if row["comparison"] == name]
        alpha = 0.05 / len(tests)
        if "solved" in settings:
            estimate, low, high = of_shares(settings, own, seeds, axes, fixed, alpha)
        else:
            values = [of_seed(settings["value"], own, seed, axes, fixed) for seed in seeds]
            written = [row for row in own if not row["evaluation"]]
            for seed, value, row in zip(seeds, values, written, strict=True):
                assert row["seed"] == seed
                assert math.isclose(float(row["value"]), value, abs_tol=1e-9)
            error = math.sqrt(sum(float(row["error"]) ** 2 for row in written) / len(written))
            spread = max(float(stats.tstd(values)), error)
            estimate = sum(values) / len(values)
            scale = spread / math.sqrt(len(values))
            low, high = stats.t.interval(1 - alpha, len(values) - 1, estimate, scale)
        found[name] = (estimate, low, high)
        delta = settings["delta"]
        if settings["expect"] == "positive":
            lower.append(low >= delta)
            upper.append(high < delta)
            signs.append(low > 0)
        else:
            lower.append(low > -delta and high < delta)
            upper.append(low >= delta or high <= -delta)
            signs.append(False)
    if not has_learned(claim, rows, seeds):
        return "inconclusive (not learned)", found
    if True in upper:
        return "refuted", found
    if False not in lower:
        return "reproduced", found
    return ("inconclusive" if False in signs else "inconclusive (sign only)"), found


def cell(value: dict, rows: list[dict], seed: str, fixed: dict) -> float:
    """The number of one arm."""
    wanted = {"method": "trained", **value, **fixed, "seed": seed}
    (row,) = {
        (row["value"], row["weights"])
        for row in rows
        if row["evaluation"] and all(row[key] == str(each) for key, each in wanted.items())
    }
    return float(row[0])


def of_seed(tree, rows: list[dict], seed: str, axes: list[str], fixed: dict) -> float:
    if isinstance(tree, (int, float)):
        return tree
    (key, *_) = tree
    if key in OPERATIONS:
        return OPERATIONS[key](*(of_seed(part, rows, seed, axes, fixed) for part in tree[key]))
    value = {key: each for key, each in tree.items() if key in (*axes, *KEYS)}
    number = cell(value, rows, seed, fixed)
    if "from" in tree:
        number -= cell({**value, "length": tree["from"]}, rows, seed, fixed)
    return number


def of_shares(settings, rows, seeds, axes, fixed, alpha) -> tuple[float, float, float]:
    """The share of solved seeds of one arm, or the difference of two."""
    arms = settings["value"].get("minus") or [settings["value"]]
    ends = []
    shares = []
    for arm in arms:
        values = [of_seed(arm, rows, seed, axes, fixed) for seed in seeds]
        hits = sum(value >= settings["solved"] for value in values)
        test = stats.binomtest(hits, len(seeds))
        ends.append(test.proportion_ci(1 - alpha / len(arms), method="exact"))
        shares.append(hits / len(seeds))
    first = ends[0]
    if len(arms) == 1:
        return shares[0], first.low, first.high
    second = ends[1]
    return shares[0] - shares[1], first.low - second.high, first.high - second.low


def has_learned(claim: dict, rows: list[dict], seeds: list[str]) -> bool:
    """Whether at most one in eight runs of each arm misses a condition."""
    failed = defaultdict(set)
    axes = [axis for axis in claim["grid"] if axis != "seed"]
    for row in rows:
        if row["comparison"] != "learned":
            continue
        for condition in claim["learned"]:
            value = condition["value"]
            if any(row[key] != str(each) for key, each in value.items()):
                continue
            number = float(row["value"] or "nan")  # of an undertrained model
            high = condition.get("at_most", math.inf)
            if not condition.get("at_least", -math.inf) <= number <= high:
                failed[tuple(row[axis] for axis in axes)].add(row["seed"])
    return all(len(bad) <= len(seeds) // 8 for bad in failed.values())
