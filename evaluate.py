"""Measure what a trained run does with context, at its trained length and beyond.

    python evaluate.py RUN                                     as trained, and cut to the trained length
    python evaluate.py RUN configs/evaluation/extension.yaml   a file of settings
    python evaluate.py RUN lengths=[256,512] rules=[trained,truncate,yarn] targets=128
    python evaluate.py --help                                  every setting

Results go to RUN/evaluation/<folder>/: results.csv, results.json, summary.txt, targets.json and figures.
Cells that were measured before are not measured again; an interrupted call goes on where it stopped.
"""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from data import DataError, Store, open_prepared
from data.files import write_text
from evaluation import (
    EvaluationError,
    EvaluationSettings,
    Subject,
    analyse,
    draw_figures,
    evaluate,
    read_rules,
    resolve_rules,
)
from evaluation.report import table, words, write
from evaluation.settings import settings_hash
from model import Transformer, check_override
from training.config import apply_words, describe, dump, load_settings
from training.console import Console, run_main
from training.files import read_json
from training.hardware import prepare_cpu
from training.run import MANIFEST, load

RULES = Path(__file__).resolve().parent / "configs" / "evaluation" / "rules.yaml"


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(__doc__)
        print(describe(EvaluationSettings))
        print(f"\nrules: {', '.join(read_rules(RULES))} (configs/evaluation/rules.yaml), or your own")
        return 0
    run, console = Path(arguments[0]), Console()
    prepare_cpu(None)
    settings = load_settings(EvaluationSettings, arguments[1:])
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"

    trained = load(run, console=console)
    root, tokenizer = trained.settings, trained.tokenizer
    rules = resolve_rules(settings.rules, read_rules(RULES), root.train_length)

    def resolve(rule_words) -> dict:
        asked = apply_words(root, list(rule_words)).model
        check_override(root.model, asked)
        return asked.position.model_dump(mode="json")

    def load_rule(rule_words, dtype: str) -> Transformer:
        return load(run, rule_words, device, getattr(torch, dtype), trained.step, console).model

    subject = Subject(
        name=str(run),
        checkpoint_hash=trained.checkpoint_hash,
        step=trained.step,
        trained_length=root.train_length,
        original_length=root.original_length or root.train_length,
        resolve=resolve,
        load=load_rule,
    )
    store, corpus, train = open_stores(settings, run, tokenizer)
    result = evaluate(
        settings,
        subject,
        store=store,
        train=train,
        tokenizer=tokenizer,
        rules=rules,
        cells=run / "evaluation" / "cells",
        console=console,
    )
    result.facts["corpus"] = corpus
    result.facts["command"] = shlex.join(["python", "evaluate.py", *arguments])
    result.facts["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
    analysis = analyse(result)
    folder = run / "evaluation" / (settings.folder or f"{settings.protocol}-{settings_hash(settings)}")
    write(result, analysis, folder)
    write_text(folder / "settings.yaml", dump(settings))
    figures = draw_figures(result, analysis, folder)

    for line in words(result, analysis):
        print(line)
    console.table(*table(result, analysis))
    print(f"figure: {figures[0]}\nnumbers: {folder / 'results.csv'}, {folder / 'results.json'}")
    return 0


def open_stores(settings: EvaluationSettings, run: Path, tokenizer) -> tuple[Store, str, Store | None]:
    """The store to read, its name, and the run's own training store for the unigram model (None if gone)."""
    own = read_json(run / MANIFEST).get("data")
    folder = settings.store or own
    if folder is None:
        raise EvaluationError(f"{run} does not say which data it was trained on; give store=FOLDER")
    try:
        prepared = open_prepared(folder)
    except DataError as error:
        raise EvaluationError(f"{error}; or evaluate on another prepared corpus with store=FOLDER") from error
    if prepared.tokenizer.hash != tokenizer.hash:
        raise EvaluationError(
            f"{folder} was prepared with another tokenizer ({prepared.tokenizer.hash[:12]}) than this run's "
            f"({tokenizer.hash[:12]}): its tokens mean other text; prepare it with the run's tokenizer"
        )
    store = prepared.valid if settings.split == "valid" else prepared.train
    store.verify()  # an altered shard would give numbers that look right
    try:
        train = open_prepared(own).train if own else None
    except DataError:
        train = None
    return store, f"{Path(folder).name}/{settings.split}", train


if __name__ == "__main__":
    run_main(main)
