"""The model card of an exported run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.files import read_object, with_keys
from data.sampling.exposure import Exposure
from evaluation.reports.results_table import markdown_table
from interop.export.classes import ClassChoice
from interop.export.parity import Parity
from run_directory.exposure import exposure_of
from run_directory.run import LoadedRun, Run

FIGURE = "nll_by_length.png"  # of an evaluation, and in the exported folder
RESULTS = "results.json"
# Keys of results.json that the card shows.
SHOWN = {
    "protocol": str,
    "targets": int,
    "documents": int,
    "corpus": str,
    "summary": list,
    "cells": list,
}


@dataclass(frozen=True)
class StoredEvaluation:
    """An evaluation of the run by length: the content of results.json, and its figure."""

    results: dict[str, Any]
    figure: Path


def stored_evaluation(run: LoadedRun) -> StoredEvaluation | None:
    """The newest evaluation of the exported weights by length, or None."""
    results_files = sorted(
        (run.folder / "evaluation").glob(f"*/{RESULTS}"), key=lambda path: path.stat().st_mtime
    )
    for path in reversed(results_files):
        figure = path.parent / FIGURE
        if not figure.is_file():
            continue
        results = read_object(path)
        if results.get("checkpoint_hash") == run.checkpoint_hash:  # a comparison of runs has none
            return StoredEvaluation(with_keys(path, results, SHOWN), figure)
    return None


def model_card(
    run: LoadedRun,
    choice: ClassChoice,
    parity: Sequence[Parity],
    evaluation: StoredEvaluation | None,
    dtype: str,
) -> str:
    """README.md of the folder."""
    settings = run.settings
    model = run.model
    about = Run(run.folder).manifest
    length = model.train_length
    original = model.original_length
    positions = settings.model.describe_positions(length, original)
    tags = [
        "sextant",
        "text-generation",
        *sorted({kind.position.name for kind in model.kinds.values()}),
    ]
    origin = "imported into Sextant" if "imported_from" in about else "trained with Sextant"
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    front += [f"- {tag}" for tag in tags] + ["---"]
    parts = [
        "\n".join(front),
        f"# {run.folder.resolve().name}",
        f"A decoder of {model.parameter_count():,} parameters with the positional scheme "
        f"{positions}, {origin}. Its trained length is {length:,} tokens.",
        _usage(choice),
        "## Model\n\n"
        + _table(
            [
                ("positional scheme", positions),
                ("trained length", f"{length:,} tokens"),
                ("original length of scaling methods", f"{original:,} tokens"),
                (
                    "longest input",
                    "unlimited" if model.limit is None else f"{model.limit:,} tokens",
                ),
                ("width, layers, heads", _sizes(run)),
                ("vocabulary", f"{model.vocab_size:,} ({run.tokenizer.name})"),
                ("weights", f"step {run.step:,}, {_weights(run)}, {dtype}"),
                ("class", _class_name(choice)),
            ]
        ),
        "## Training\n\n" + _table(_training(run, about)),
        _exposure(exposure_of(Run(run.folder), run.step)),
    ]
    if evaluation is not None:
        parts.append(_evaluation(evaluation.results))
    parts.append(_parity(parity, choice))
    return "\n\n".join(part for part in parts if part) + "\n"


def _usage(choice: ClassChoice) -> str:
    code = "" if choice.model_type else ", trust_remote_code=True"
    note = (
        "The folder contains no code."
        if choice.model_type
        else "The modeling file is generated from Sextant's model code and does not import "
        f"Sextant: no class of transformers represents the model ({choice.reason}). It requires "
        "torch 2.13 and transformers 5.23 or later. Where the positions depend on the length of "
        "the sequence, `generate` uses the final length, prompt and new tokens."
    )
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{code})\n'
        f'model = AutoModelForCausalLM.from_pretrained("FOLDER"{code})\n'
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))\n```\n\n" + note
    )


def _class_name(choice: ClassChoice) -> str:
    if choice.model_type is None:
        return f"generated modeling file ({choice.reason})"
    return f"{choice.model_type} of transformers ({choice.reason})"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return markdown_table(["", ""], [[name, _cell(value)] for name, value in rows], texts=2)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _sizes(run: LoadedRun) -> str:
    s = run.settings.model
    return f"{s.dim}, {s.layers}, {s.heads} ({s.kv_heads} for keys and values) of {s.head_dim}"


def _weights(run: LoadedRun) -> str:
    return "exponential mean (EMA)" if run.weights == "ema" else "as trained"


def _training(run: LoadedRun, about: dict) -> list[tuple[str, str]]:
    settings = run.settings
    if "imported_from" in about:
        names = ", ".join(Path(path).name for path in about["imported_from"])
        return [("origin", f"imported from {names}; the training data are unknown")]
    attempt = (about.get("attempts") or [{}])[-1]
    command = shlex.join(
        [Path(attempt.get("command", ["train.py"])[0]).name, *attempt.get("command", [""])[1:]]
    )
    dirty = " with uncommitted changes" if attempt.get("uncommitted_changes") else ""
    rows = [
        (
            "data",
            ", ".join(
                Path(path).name for path in [about.get("data", ""), *about.get("mixture", ())]
            ),
        ),
        ("packing", settings.data.packing),
        ("sequence length", f"{settings.train_length:,} tokens"),
        ("steps", f"{run.step:,}"),
        ("optimizer", settings.training.optimizer.name),
        ("command", f"`{command}`"),
        ("commit", f"{attempt.get('commit') or 'unknown'}{dirty}"),
    ]
    if run.changed:
        rows.append(("changes", run.changed))
    return rows


def _evaluation(results: dict[str, Any]) -> str:
    """NLL of the same targets by context-extension method and length."""
    cells = {(cell["method"], cell["length"]): cell["nll"] for cell in results["cells"]}
    lengths = sorted({length for _, length in cells})
    rows = []
    for method in dict.fromkeys(method for method, _ in cells):
        row = [cells.get((method, length)) for length in lengths]
        rows.append([method, *("" if nll is None else f"{nll:.3f}" for nll in row)])
    table = markdown_table(["method", *(f"{length:,}" for length in lengths)], rows)
    return (
        f"## Loss by length\n\n![NLL by length]({FIGURE})\n\nNLL in nats per token, protocol "
        f"{results['protocol']}: {results['targets']:,} targets in {results['documents']} "
        f"documents of {results['corpus']}, by length of the context in tokens.\n\n"
        + table
        + "\n\n"
        + "\n".join(f"- {line}" for line in results["summary"])
    )


def _exposure(exposure: Exposure | None) -> str:
    """Which positions and distances the training data contained."""
    if exposure is None:
        return ""
    seen = np.flatnonzero(exposure.positions)
    distances = np.flatnonzero(exposure.distances)
    if not len(seen) or not len(distances):
        return ""
    total = exposure.distances.sum()
    median = int(np.searchsorted(exposure.distances.cumsum(), total / 2))
    return "## Exposure\n\n" + _table(
        [
            ("input tokens", f"{exposure.tokens:,}"),
            ("positions", f"{seen[0] + exposure.first:,} to {seen[-1] + exposure.first:,}"),
            (
                "distances",
                f"{distances[0]:,} to {distances[-1]:,}; half of the pairs within {median:,}",
            ),
        ]
    )


def _parity(parity: Sequence[Parity], choice: ClassChoice) -> str:
    rows = [[f"{p.length:,}", f"{p.difference:.1e}", f"{p.tolerance:.1e}"] for p in parity]
    why = (
        "transformers computes rotation angles in float32, with errors proportional to the "
        "position: its tables of cos and sin agree with the exact ones up to this rounding, and "
        "logits are compared with exact tables."
        if choice.model_type
        else "The generated file has the operations of the training code."
    )
    return (
        "## Parity\n\nLargest difference of a logit between this folder in transformers and "
        f"Sextant, on random tokens, in float32 on a CPU. {why}\n\n"
        + markdown_table(["tokens", "difference", "tolerance"], rows, texts=0)
    )
