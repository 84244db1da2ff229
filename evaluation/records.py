"""What an evaluation leaves behind on disk: CSV and JSON, every number with what it rests on."""

import csv
import io
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.files import write_text
from evaluation.analysis import Analysis, Part, Row
from evaluation.matrix import Result
from evaluation.numbers import finite
from evaluation.report import words
from evaluation.statistics import unit_means


def records(result: Result, analysis: Analysis) -> list[dict]:
    """One flat record per cell, each with everything its number rests on.

    `part`: `all` units; or `unseen`, `seen`: those whose cluster is not, or is, in the training text.
    """
    common = basis(result, analysis)
    rows = [
        {"part": "all", **_flat(row), **_gain_per_doubling(row, analysis), **common} for row in analysis.rows
    ]
    for part in analysis.parts:
        own = {"targets": part.n_targets, "documents": part.documents, "units": part.units}
        rows += [
            {"part": _part(part), **_flat(row), **dict.fromkeys(DOUBLING), **common, **own}
            for row in part.rows
        ]
    return rows


DOUBLING = ("gain_per_doubling", "gain_per_doubling_low", "gain_per_doubling_high")


def _gain_per_doubling(row: Row, analysis: Analysis) -> dict:
    """What the last doubling before this length gained, where there is a shorter length."""
    found = [
        one.gain
        for reach in analysis.reaches
        for one in reach.doublings
        if (reach.rule, one.longer) == (row.rule, row.length)
    ]
    values = (found[0].estimate, finite(found[0].low), finite(found[0].high)) if found else (None,) * 3
    return dict(zip(DOUBLING, values, strict=True))


def _part(part: Part) -> str:
    return "seen" if part.seen else "unseen"


def basis(result: Result, analysis: Analysis) -> dict:
    """What every number of this evaluation rests on."""
    return {
        "protocol": result.plan.protocol,
        "trained_length": result.subject.trained_length,
        "targets": analysis.n_targets,
        "documents": analysis.documents,
        "units": analysis.units,
        "unit": analysis.unit_kind,
        "family": analysis.family,
        "confidence": result.settings.confidence,
        "tolerance": result.settings.tolerance,
        "bos": result.settings.bos,
        "corpus": result.facts.get("corpus", ""),
        "corpus_hash": result.facts["corpus_hash"],
        "tokenizer_hash": result.facts["tokenizer_hash"],
        "targets_hash": result.plan.hash,
        "scored_hash": result.screening.hash(result.plan.hash),
        "checkpoint": result.subject.name,
        "checkpoint_step": result.subject.step,
        "checkpoint_hash": result.subject.checkpoint_hash,
        "dtype": result.settings.dtype,
        "seed": result.settings.seed,
    }


def _flat(row: Row) -> dict:
    out = {
        key: getattr(row, key) for key in ("rule", "scheme", "length", "nll", "perplexity", "bits_per_byte")
    }
    delta = row.delta
    for name, one in (("nll", row.level), ("delta", delta), ("gain", row.gain)):
        if name != "nll":
            out[name] = one.estimate if one else None
        out[f"{name}_low"] = finite(one.low) if one else None
        out[f"{name}_high"] = finite(one.high) if one else None
    for end in ("", "_low", "_high"):
        value = out[f"delta{end}"]
        out[f"perplexity_ratio{end}"] = None if value is None else math.exp(min(value, 700.0))
    out["delta_upper_one_sided"] = finite(row.verdict.upper) if row.verdict else None
    out["verdict"] = row.verdict.word if row.verdict else None
    out["units_needed"] = row.verdict.units_needed if row.verdict else None
    out["spans_needed"] = row.verdict.spans_needed if row.verdict else None
    out["bfloat16_minus_float32"] = row.precision
    out["failure"], out["exists"] = row.failure or None, row.exists
    return out


def _units(result: Result) -> dict:
    """Names of the units, targets of each, and whether their cluster is in the training text too."""
    ids, first, counts = np.unique(result.unit, return_index=True, return_counts=True)
    names = [result.unit_names[i] for i in ids] if result.unit_names else [str(i) for i in ids]
    seen = None if result.seen is None else result.seen[first].tolist()
    return {"kind": result.unit_kind, "names": names, "targets": counts.tolist(), "seen": seen}


def _by_unit(nll: np.ndarray | None, result: Result) -> list[float] | None:
    """Mean NLL of each unit in the order of `units`."""
    return None if nll is None else unit_means(nll, result.unit).tolist()


def write(result: Result, analysis: Analysis, folder: Path) -> None:
    """`results.csv`, `results.json`, `summary.txt` and `targets.json` in `folder`."""
    rows = records(result, analysis)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["rule"])
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / "results.csv", text.getvalue())
    summary = words(result, analysis)
    document = {
        "format": 1,
        "summary": summary,
        **basis(result, analysis),
        **{key: result.facts[key] for key in ("command", "changed", "finished") if key in result.facts},
        "settings": result.settings.model_dump(mode="json"),
        "lengths": result.plan.lengths,
        "rules": {
            rule.label: {"words": list(rule.words), "position": result.schemes[rule.label]}
            for rule in result.rules
        },
        "left_out": result.left_out,
        "contamination": result.screening.record,
        "units": _units(result),
        "unigram_nll": analysis.unigram,
        "unigram_unit_nll": _by_unit(result.unigram, result),
        "truncated_unit_nll": _by_unit(result.truncated, result),
        "cells": [
            _flat(row)
            | _gain_per_doubling(row, analysis)
            | {"unit_nll": _by_unit(result.nll.get((row.rule, row.length)), result)}
            for row in analysis.rows
        ],
        "derived": [
            {"rule": v.rule, "held_to": v.held_to, "break_point": v.break_point} for v in analysis.verdicts
        ],
        "context_reach": [
            {
                "rule": one.rule,
                "reach": one.reach,
                "longest": one.longest,
                "gain_per_doubling": [
                    {
                        "from": d.shorter,
                        "to": d.longer,
                        "gain": d.gain.estimate,
                        "low": d.gain.low,
                        "high": d.gain.high,
                    }
                    for d in one.doublings
                ],
            }
            for one in analysis.reaches
        ],
        "parts": {
            _part(part): {
                "targets": part.n_targets,
                "documents": part.documents,
                "units": part.units,
                "cells": [_flat(row) for row in part.rows],
            }
            for part in analysis.parts
        },
        "by_position": {rule: [asdict(b) for b in buckets] for rule, buckets in analysis.buckets.items()},
        "per_target_nll": result.files,
    }
    write_clean_json(folder / "results.json", document)
    write_clean_json(folder / "targets.json", result.plan.record)
    write_text(folder / "summary.txt", "\n".join(summary) + "\n")


def write_clean_json(path: Path, value) -> None:
    write_text(path, json.dumps(_clean(value), indent=1) + "\n")


def _clean(value):
    """Without what is not JSON."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: _clean(one) for key, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, list) else value
