"""Measure what a trained run does with context, at its trained length and beyond.

    python evaluate.py RUN                                     as trained, and cut to the trained length
    python evaluate.py RUN configs/evaluation/extension.yaml   a file of settings
    python evaluate.py RUN lengths=[256,512] rules=[trained,truncate,yarn] targets=128
    python evaluate.py RUN --matrix                            every rule it can take, in one table
    python evaluate.py RUN --matrix --verbose                  ... and why the other rules do not apply
    torchrun --nproc_per_node 2 evaluate.py RUN                shared by two processes, on a CPU or two GPUs
    python evaluate.py RUN configs/tasks/passkey.yaml          a task: right answers by length, depth ...
    python evaluate.py --help                                  every setting

`protocol` says what is measured: the loss of text (fixed-targets, sliding, non-overlapping, by-position), and
whatever else KINDS below lists; each kind has settings of its own.

--matrix lays every built-in rule over the checkpoint and keeps those that exist for its scheme, are legal for
its weights, can be built at its sizes, and change something. A checkpoint with a pattern of layer kinds is
given a rule kind by kind: each kind that can take the whole rule takes it, the others stay as trained, and a
kind with a narrower window keeps it. Words of one's own are laid over patterns in the same way, unless they
name a kind: model.position.kinds.KIND.window=64. A cell that cannot exist, such as a length past the end of a
learned table, is shown as a dash with its reason.

Rules follow the declared length of a window, chosen once for all its tokens: chunks through a cache give the
numbers of a single pass. A rule that follows the running length, which no cache can hold, is not offered.

Results go to RUN/evaluation/<folder>/: results.csv, results.json, summary.txt, targets.json and figures.
Cells that were measured before are not measured again; an interrupted call goes on where it stopped. Several
processes give the very numbers of one; rank 0 writes and prints.
"""

import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.files import write_text
from data.tasks.settings import Hidden, TaskSource
from evaluation import (
    EvaluationError,
    EvaluationSettings,
    Subject,
    analyse,
    compatible_rules,
    draw_figures,
    evaluate,
    read_rules,
    resolve_rules,
)
from evaluation.diagnostics import (
    AttentionSettings,
    DiagnosticSettings,
    GenerationSettings,
    attention_report,
    generation_report,
    measure_attention,
    measure_generation,
)
from evaluation.diagnostics.attention_figures import draw_attention
from evaluation.exposure_strip import add_strip
from evaluation.grid import footnotes, grid
from evaluation.ranks import joined, this_process
from evaluation.records import write
from evaluation.report import parts_table, table, words
from evaluation.rules import new_sinks
from evaluation.settings import MeasurementSettings
from evaluation.stores import Stores, haystacks
from evaluation.tasks_analysis import analyse_tasks
from evaluation.tasks_figures import draw_task_figures
from evaluation.tasks_items import draw_items
from evaluation.tasks_measure import answer_tasks
from evaluation.tasks_report import task_table, task_words, write_tasks
from evaluation.tasks_settings import TaskEvaluationSettings
from model import ModelError, Transformer, legal_overrides
from training.config import asked_for, dump, load_settings
from training.console import Console, run_main
from training.describe import asked, describe, foot
from training.errors import TrainingError
from training.exposure import exposure_of
from training.files import read_json
from training.hardware import prepare_cpu
from training.overrides import longest_input, override, why, widens
from training.run import MANIFEST, Loaded, load
from training.settings import RunSettings

RULES = Path(__file__).resolve().parent / "configs" / "evaluation" / "rules.yaml"
FLAGS = {"--matrix", "--verbose"}


def main() -> int:
    arguments = [word for word in sys.argv[1:] if word not in FLAGS]
    if not arguments or "--help" in arguments or "-h" in arguments:
        show_help([word for word in arguments if not word.startswith("-")])
        return 0
    prepare_cpu(None)
    # A batch system's notice is as good as Ctrl-C: what was measured is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kind = kind_of(arguments[1:])
    wanted = ["matrix=true"] if "--matrix" in sys.argv else []
    settings = load_settings(kind.settings, [*arguments[1:], *wanted])
    with joined() as ranks:
        if ranks.world > 1 and not kind.shared:
            raise EvaluationError(
                f"protocol={asked_for(arguments[1:], 'protocol')} is measured by one process, and "
                f"{ranks.world} were started: run it without torchrun"
            )
        return kind.measure(settings, Path(arguments[0]), Console(quiet=not ranks.main))


def show_help(words: list[str]) -> None:
    """Every setting of every kind, or the settings that words name."""
    branches = asked(words, *(kind.settings for kind in KINDS))
    if not branches:
        print(__doc__)
    for kind in KINDS:
        told = [describe(kind.settings, branch=branch) for branch in branches or [""]]
        if any(told):
            print(f"{kind.title} (protocol = {', '.join(kind.protocols)})\n")
            print("\n\n".join(filter(None, told)) + "\n")
    if not branches:
        print(f"rules: {', '.join(read_rules(RULES))} (configs/evaluation/rules.yaml), or your own")
        print(foot("contamination"))


def kind_of(words: list[str]) -> "Kind":
    """What the words ask to have measured: the kind of evaluation their `protocol` names."""
    protocol = asked_for(words, "protocol") or KINDS[0].protocols[0]
    for kind in KINDS:
        if protocol in kind.protocols:
            return kind
    known = ", ".join(name for kind in KINDS for name in kind.protocols)
    raise EvaluationError(f"protocol={protocol} is unknown; known are {known}")


def measure_loss(settings: EvaluationSettings, run: Path, console: Console) -> int:
    """Loss of text under one or many rules, by length or by position."""
    verbose, ranks = "--verbose" in sys.argv, this_process()
    trained = load(run, console=console, weights=settings.weights)
    if trained.changed:
        console.say(trained.changed)
    root, tokenizer = trained.settings, trained.tokenizer
    subject = subject_of(trained, settings.device, console)
    builtin = read_rules(RULES)
    rules, left_out = resolve_rules(settings.rules, builtin, root.train_length), {}
    if settings.matrix:
        found, left_out = compatible_rules(
            builtin, root.train_length, lambda words: offered(root, words, settings.bos, subject.bos_first)
        )
        rules += [rule for rule in found if rule.label not in {one.label for one in rules}]

    stores = open_stores(settings, run, tokenizer)
    result = evaluate(
        settings,
        subject,
        store=stores.read,
        train=stores.train,
        earlier=stores.earlier,
        tokenizer=tokenizer,
        rules=rules,
        cells=run / "evaluation" / "cells",
        overlaps=stores.overlaps,
        console=console if ranks.main else None,
        ranks=ranks,
    )
    if not ranks.main:
        return 0
    result.left_out = left_out
    result.facts |= told(trained, stores.name)
    analysis = analyse(result)
    folder = run / "evaluation" / (settings.folder or f"{settings.protocol}-{settings.identity()}")
    write(result, analysis, folder)
    write_text(folder / "settings.yaml", dump(settings))
    exposure = exposure_of(run, trained.step)
    below = None if exposure is None else partial(add_strip, exposure=exposure)
    figures = draw_figures(result, analysis, folder, below)

    as_grid = settings.matrix and not analysis.buckets
    for line in words(result, analysis, brief=as_grid):
        print(line)
    console.table(*(grid if as_grid else table)(result, analysis))
    if analysis.parts and not as_grid:
        console.table(*parts_table(result, analysis))
    for line in footnotes(result, verbose) if settings.matrix else []:
        print(line)
    print(f"figure: {figures[0]}\nnumbers: {folder / 'results.csv'}, {folder / 'results.json'}")
    return 0


def measure_tasks(settings: TaskEvaluationSettings, run: Path, console: Console) -> int:
    """Items of one task under one or many rules, by length, depth and distance."""
    trained = load(run, console=console, weights=settings.weights)
    if trained.changed:
        console.say(trained.changed)
    root, tokenizer = trained.settings, trained.tokenizer
    source = root.data.source
    task = settings.task or (source.task if isinstance(source, TaskSource) else None)
    if task is None:
        raise EvaluationError(
            f"{run} was not trained on a task: say which to measure, as in task.name=passkey"
        )
    if isinstance(task, Hidden):
        task = task.model_copy(update={"queries": 1})
    documents, haystack = None, "none"
    if isinstance(task, Hidden):
        folder = settings.haystack_store
        if folder is None and not isinstance(source, TaskSource):
            folder = read_json(run / MANIFEST).get("data")
        documents, haystack = haystacks(task, folder)
    rules = resolve_rules(settings.rules, read_rules(RULES), root.train_length)
    drawn = draw_items(
        settings,
        task,
        tokenizer,
        bos=root.data.bos,
        trained_length=root.train_length,
        documents=documents,
        origin=haystack,
    )
    subject = subject_of(trained, settings.device, console)
    facts = {"task": task.name, "haystack": haystack, "tokenizer_hash": tokenizer.hash}
    facts |= told(trained, haystack)
    result = answer_tasks(
        settings, subject, drawn, rules, cells=run / "evaluation" / "cells", facts=facts, console=console
    )
    analysis = analyse_tasks(result)
    folder = run / "evaluation" / (settings.folder or f"{task.name}-{settings.identity()}")
    write_tasks(result, analysis, folder)
    write_text(folder / "settings.yaml", dump(settings))
    figures = draw_task_figures(result, analysis, folder)
    for line in task_words(result, analysis):
        print(line)
    console.table(*task_table(result, analysis))
    for figure in figures:
        print(f"figure: {figure}")
    print(f"numbers: {folder / 'results.csv'}, {folder / 'results.json'}, {folder / 'items.csv'}")
    return 0


def diagnose_attention(settings: AttentionSettings, run: Path, console: Console) -> int:
    """Where attention goes, by length, layer and head."""
    return diagnose(settings, run, console, measure_attention, attention_report, draw_attention)


def diagnose_generation(settings: GenerationSettings, run: Path, console: Console) -> int:
    """What the model writes past its trained length."""
    return diagnose(settings, run, console, measure_generation, generation_report, generation_report.draw)


def diagnose(settings: DiagnosticSettings, run: Path, console: Console, measure, report, draw) -> int:
    """What the diagnostics share: measure, write, draw, and print words and a table."""
    trained = load(run, console=console, weights=settings.weights)
    if trained.changed:
        console.say(trained.changed)
    subject = subject_of(trained, settings.device, console)
    rules = resolve_rules(settings.rules, read_rules(RULES), subject.trained_length)
    stores = open_stores(settings, run, trained.tokenizer)
    how = {"store": stores.read, "tokenizer": trained.tokenizer, "rules": rules, "console": console}
    found = measure(settings, subject, **how)
    found.facts |= told(trained, stores.name)
    folder = run / "evaluation" / (settings.folder or f"{settings.protocol}-{settings.identity()}")
    report.write(found, folder)
    write_text(folder / "settings.yaml", dump(settings))
    figures = draw(found, folder)
    for line in report.words(found):
        print(line)
    console.table(*report.table(found))
    print(f"figures: {', '.join(map(str, figures))}")
    print(f"numbers: {folder / 'results.csv'}, {folder / 'results.json'}")
    return 0


def told(trained: Loaded, corpus: str) -> dict:
    """What results say of where they come from."""
    return {
        "corpus": corpus,
        "changed": trained.changed,
        "command": shlex.join(["python", "evaluate.py", *sys.argv[1:]]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def subject_of(trained: Loaded, device: str, console: Console) -> Subject:
    """A run's checkpoint as something to evaluate on `device` (auto: a GPU where there is one)."""
    root, place = trained.settings, this_process().device(device)

    def resolve(rule_words) -> dict:
        return override(root, rule_words).model.position.model_dump(mode="json")

    def load_rule(rule_words, dtype: str) -> Transformer:
        arithmetic, step, weights = getattr(torch, dtype), trained.step, trained.weights
        return load(trained.folder, rule_words, place, arithmetic, step, console, weights).model

    return Subject(
        name=str(trained.folder),
        checkpoint_hash=trained.checkpoint_hash,
        step=trained.step,
        trained_length=root.train_length,
        original_length=root.original_length or root.train_length,
        resolve=resolve,
        load=load_rule,
        longest=lambda rule_words: longest_input(override(root, rule_words)),
        legal=legal_overrides(root.model),
        bos_first=bos_first(root, read_json(trained.folder / MANIFEST)),
    )


def bos_first(root: RunSettings, manifest: dict) -> str:
    """Why the model knows BOS as the first token it can see, '' where it was trained otherwise.

    Running text is cut into windows anywhere: there the first token of one is any token.
    """
    if not root.data.bos:
        return ""
    if manifest.get("data") is None:
        return "This model comes from elsewhere, and is taken to be trained with BOS first"
    if root.data.packing == "documents":
        return "This model was trained with BOS first (data.bos=true, data.packing=documents)"
    return ""


def offered(root: RunSettings, rule_words, bos: str, begins: str) -> dict:
    """Position settings under a built-in rule; raises where --matrix leaves it out, saying why."""
    try:
        asked = override(root, rule_words)
    except (ModelError, TrainingError) as error:
        raise EvaluationError(why(error)) from error
    if widens(root, asked):
        raise EvaluationError("the window it was trained with is narrower")
    scheme = asked.model.position.model_dump(mode="json")
    if begins and bos != "every-window" and new_sinks(scheme, root.model.position.model_dump(mode="json")):
        raise EvaluationError(f"sinks need bos=every-window. {begins}")
    return scheme


def open_stores(settings: EvaluationSettings | DiagnosticSettings, run: Path, tokenizer) -> Stores:
    """The text a run is evaluated on, and all it has been trained on: its own and its parents'."""
    about = read_json(run / MANIFEST)
    folder = settings.store or about.get("data")
    if folder is None:
        raise EvaluationError(f"{run} does not say which data it was trained on; give store=FOLDER")
    trained = [about, *about.get("lineage", [])]
    earlier = [parent.get("data") for parent in trained[1:]]
    earlier += [folder for one in trained for folder in one.get("mixture", ())]
    lists = [Path(one["groups"]) for one in trained if one.get("groups")]
    earlier += [folder for file in lists if file.is_file() for folder in read_json(file)["folders"]]
    return Stores.open(folder, settings.split, tokenizer, about.get("data"), earlier)


@dataclass(frozen=True)
class Kind:
    """One kind of evaluation: its protocols, their settings, and what measures, writes and prints."""

    title: str
    protocols: tuple[str, ...]
    settings: type[MeasurementSettings]
    measure: Callable[[Any, Path, Console], int]
    shared: bool = False  # whether several processes may share the work


KINDS = [
    Kind(
        "Loss of text",
        ("fixed-targets", "sliding", "non-overlapping", "by-position"),
        EvaluationSettings,
        measure_loss,
        shared=True,
    ),
    Kind("Items of a task", ("tasks",), TaskEvaluationSettings, measure_tasks),
    Kind("Where attention goes", ("attention",), AttentionSettings, diagnose_attention),
    Kind("What the model writes", ("generation",), GenerationSettings, diagnose_generation),
]

if __name__ == "__main__":
    run_main(main)
