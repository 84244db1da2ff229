"""results.csv: one row per variant, evaluation and length."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from evaluation.reports.base import finite
from evaluation.statistics.seeds import SeedInterval
from studies.results.compare import MeanNLL, StudyComparison, VariantSummary
from studies.results.stored import StoredStudy


def rows(study: StoredStudy, comparisons: Sequence[StudyComparison]) -> list[dict]:
    """One row with all numbers and facts per variant, evaluation and length; missing ends are None."""
    out = []
    for comparison in comparisons:
        for line in comparison.lines:
            for one in line.readings:
                out.append(_row(study, comparison, line, one))
    return out


def csv_text(study: StoredStudy, comparisons: Sequence[StudyComparison]) -> str:
    found = rows(study, comparisons)
    text = io.StringIO(newline="")
    names = list(dict.fromkeys(key for row in found for key in row)) or ["variant"]
    writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def _row(study: StoredStudy, comparison: StudyComparison, line: VariantSummary, one: MeanNLL) -> dict:
    losses, variant = comparison.losses, line.variant
    found = [d for d in comparison.differences if (d.variant, d.length) == (variant.name, one.length)]
    seeds, units = one.needed or (None, None)
    return {
        "study": study.name,
        "evaluation": losses.name,
        **dict(losses.group),
        "variant": variant.name,
        "scheme": variant.scheme,
        "method": variant.method,
        "length": one.length,
        "seeds": " ".join(one.seeds),
        **_interval("nll", one.nll),
        "nll_pooled": one.pooled,
        "perplexity": one.perplexity,
        "bits_per_byte": one.bits_per_byte,
        "nll_as_trained": line.trained.estimate,
        "unigram_nll": None if losses.unigram is None else float(losses.unigram.mean()),
        **_interval("delta", one.delta),
        "delta_upper_one_sided": finite(one.upper),
        "verdict": one.verdict,
        "seeds_needed": seeds,
        "units_needed": units,
        **_interval("gain", one.gain),
        "held_to": line.held_to,
        "break_point": line.break_point,
        "context_reach": line.reach,
        "baseline": comparison.baseline if found else None,
        **_interval("difference", found[0].interval if found else None),
        "family_of_verdicts": comparison.family,
        "family_of_differences": comparison.difference_family,
        "confidence": comparison.confidence,
        "tolerance": comparison.tolerance,
        "units": len(losses.units),
        "unit": losses.kind,
        "targets": int(losses.targets.sum()),
        **{
            key: losses.facts.get(key)
            for key in ("protocol", "trained_length", "bos", "dtype", "corpus", "corpus_hash", "targets_hash")
        },
        "failure": one.failure,
    }


def _interval(name: str, one: SeedInterval | None) -> dict:
    if one is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: one.estimate, f"{name}_low": finite(one.low), f"{name}_high": finite(one.high)}
