"""Records of the diagnostics: means with intervals over units, and what all numbers depend on."""

import numpy as np

from evaluation.reports.base import basis, provenance, rounded
from evaluation.statistics.intervals import interval, unit_means

NO_ENDS = {"low": None, "high": None}


def over_units(result, values) -> dict:
    """Mean and interval over units of the finite values, one value for each window or prompt."""
    there = np.isfinite(values)
    if not there.any():
        return {"value": None, **NO_ENDS}
    means = unit_means(values[there], result.unit[there])
    found = interval(means, alpha=1 - result.settings.confidence, resamples=0)
    return rounded_record({"value": found.estimate, "low": found.low, "high": found.high})


def rounded_record(record: dict) -> dict:
    return {key: rounded(value) if isinstance(value, float) else value for key, value in record.items()}


def diagnostic_basis(result) -> dict:
    """What the numbers of a diagnostic depend on."""
    return {
        **basis(result),
        "documents": result.documents,
        "units": len(set(result.unit.tolist())),
        "unit": result.unit_kind,
        "bos": result.settings.bos,
        "corpus": result.facts.get("corpus", ""),
        "corpus_hash": result.facts["corpus_hash"],
        "tokenizer_hash": result.facts["tokenizer_hash"],
        **provenance(result),
    }
