"""Run directories: creation, checks on resume, locking, and loading of the model and tokenizer.

runs/<config>-<choices>-<identity>/
    settings.yaml    every setting, resolved
    manifest.json    command, commit, versions, machine, hashes of data and tokenizer; one entry per attempt
    tokenizer/       a copy, so that the folder is self-contained
    metrics.jsonl    the metrics of the run
    exposure.npz     how often each position and distance was trained, up to the newest checkpoint
    checkpoints/     step-00000100, ...
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, Literal

import torch

from data import PreparedData, open_prepared
from data.files import locked, read_object, remove_drafts, with_keys, write_json, write_text
from data.tokenizers import Tokenizer, load_tokenizer
from errors import ConfigError, TrainingError
from model import ModelSettings, Transformer
from run_directory.run_settings import RunSettings
from settings.load import differences, dump, identity, load_settings, split_arguments
from settings.yaml_io import parse_yaml, read_yaml
from training.checkpoint.restore import load_average, load_weights
from training.checkpoint.sharded import shapes_in
from training.checkpoint.storage import (
    AVERAGE,
    STATE,
    WEIGHTS,
    clean_leftovers,
    find_checkpoint,
    steps_of,
    while_training,
)
from training.logging.console import Console
from training.position_overrides import override
from training.run.compatibility import check_resume
from training.run.environment import attempt
from training.stages import last_trained

SETTINGS = "settings.yaml"
MANIFEST = "manifest.json"
LOCK = ".lock"
MODEL_HASH = (
    "model_hash"  # manifest key: a list of `model_hash`, of two while the settings are rewritten
)
_FIXED_KEYS = {  # manifest keys whose values must not change on resume
    "tokenizer_hash": "tokenizer",
    "vocab_size": "vocabulary",
    "data_hash": "prepared text",
    "valid_hash": "held-out text",
}


def run_folder(settings: RunSettings, arguments: Sequence[str], root: str | Path = "runs") -> Path:
    """The default run directory: `<root>/<first file>-<choices not in that file>-<identity>`, such as
    runs/tiny-alibi-0123456789. Other overrides with equal settings give the same folder."""
    stem = name_stem(arguments)
    end = identity(settings)
    known = [
        folder for folder in sorted(Path(root).glob(f"{escape(stem)}-*{end}")) if is_run(folder)
    ]
    names = dict.fromkeys([stem, *choices_of(settings, arguments), end])
    return known[0] if known else Path(root) / "-".join(names)


def choices_of(settings: RunSettings, arguments: Sequence[str]) -> list[str]:
    """The names of choices, the scheme's first, that the first YAML file of a run does not make itself; []
    for a fork without a file, which takes its parent's name."""
    files, _ = split_arguments(list(arguments))
    if not files and settings.parent is not None and settings.parent.fork:
        return []
    try:
        base = load_settings(RunSettings, files[:1])
    except ConfigError:  # a file that needs other files to be valid
        base = RunSettings()
    changed = [(key, new) for key, _, new, free in differences(base, settings) if not free]
    named = [(key, new["name"]) for key, new in changed if isinstance(new, dict) and "name" in new]
    return [
        name for _, name in sorted(named, key=lambda one: not one[0].startswith("model.position"))
    ]


def name_stem(arguments: Sequence[str]) -> str:
    """The first part of a run's name: its first YAML file, else the parent of a fork, else `default`."""
    files, overrides = split_arguments(list(arguments))
    values = dict(override.split("=", 1) for override in overrides)
    forked = values.get("parent.run") if "parent.fork" in values else None
    return Path(files[0]).stem if files else Path(forked or "default").name


def check_writable(folder: Path) -> None:
    """Raise TrainingError for a run directory that cannot be created, before any other work."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise TrainingError(
            f"{folder}: {nearest} is not a writable directory; choose another --run-dir"
        )


def is_run(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


# Optional keys of a run's manifest that other modules read, and their types.
_OPTIONAL_KEYS: dict[str, type] = dict.fromkeys(("tokenizer_hash", "data", "groups"), str)
_OPTIONAL_KEYS |= dict.fromkeys(("mixture", "lineage", "attempts", MODEL_HASH), list)
_OPTIONAL_KEYS |= {"vocab_size": int, "inherited": dict}


def read_manifest(folder: Path, *needed: str) -> dict:
    """Read a run's manifest. Raises TrainingError for a folder that is not a run, a missing `needed` key and
    a key of the wrong type."""
    if not is_run(folder):
        raise TrainingError(not_a_run(folder))
    file = folder / MANIFEST
    about = read_object(file)
    needed += tuple(key for key, value in about.items() if value is not None)
    with_keys(file, about, {key: kind for key, kind in _OPTIONAL_KEYS.items() if key in needed})
    for one in about.get("lineage") or []:
        with_keys(f"{file}: lineage", one, {"run": str, "step": int})
    return about


@contextmanager
def create_or_resume(
    folder: Path,
    settings: RunSettings,
    tokenizer: Tokenizer,
    manifest: dict,
    lineage: dict,
    processes: dict,
    *,
    restart: bool,
    console: Console,
) -> Iterator[None]:
    """Create the run directory, or check that the existing one has these settings; locked in the block.

    Args:
        manifest: entries of the manifest that must not change on resume.
        lineage: entries of the manifest of a new extension run or fork.
        processes: the processes that share the work.
        restart: rename an existing run and start a new one.
    """
    if restart and folder.exists():
        with locked_run(folder):  # an error where the run is being trained
            kept = rename_old_run(folder)
        console.info(f"the earlier run is kept as {kept}")
    with locked_run(folder):
        remove_drafts(folder)
        clean_leftovers(folder)
        if not is_run(folder):
            create_run(folder, settings, tokenizer, sys.argv, manifest | lineage, processes)
        else:
            for change in resume_run(folder, settings, tokenizer, sys.argv, manifest, processes):
                console.info(f"changed since the last attempt: {change}")
        yield


def create_run(
    folder: Path,
    settings: RunSettings,
    tokenizer: Tokenizer,
    command: Sequence[str],
    extra: dict | None = None,
    processes: dict | None = None,
) -> Path:
    """Create a run directory. The manifest is written last: a folder with a manifest is a run.

    Args:
        extra: further entries of the manifest: data folder, `data_hash`, parameter count and the like;
            `vocab_size` where the embedding has more rows than the tokenizer has ids.
        processes: the processes that share the work, for the entry of the first attempt.

    Raises TrainingError where the tokenizer has more ids than the embedding has rows, and where the folder
    already is a run, or has checkpoints but no manifest, so that the data they were trained on are unknown.
    """
    if is_run(folder):
        raise TrainingError(f"{folder} is already a run; resume it, or start again with --restart")
    if steps_of(folder):
        raise TrainingError(
            f"{folder} contains checkpoints but no {MANIFEST}: restore it, or use --restart"
        )
    rows = (extra or {}).get("vocab_size", tokenizer.vocab_size)
    if tokenizer.vocab_size > rows:
        raise TrainingError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} ids and the embedding of the model "
            f"{rows:,} rows; use the tokenizer of the model"
        )
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer")
    write_text(folder / SETTINGS, dump(settings))
    about = {
        "format": 1,
        "identity": identity(settings),
        MODEL_HASH: [model_hash_in(folder)],
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_hash": tokenizer.hash,
        **(extra or {}),
        "attempts": [attempt(command, [], processes)],
    }
    write_json(folder / MANIFEST, about, allow_nan=False)
    return folder


def resume_run(
    folder: Path,
    settings: RunSettings,
    tokenizer: Tokenizer,
    command: Sequence[str],
    extra: dict | None = None,
    processes: dict | None = None,
) -> list[str]:
    """Check that a run can resume under these settings, record the attempt, and return the changed settings,
    one line each.

    Raises TrainingError for settings that may not change (`check_resume`), and where the tokenizer or the
    data are not the run's.
    """
    about = read_manifest(folder)
    now = {"tokenizer_hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size, **(extra or {})}
    changes = check_resume(folder, read_settings(folder), settings)
    # the settings are equal, so these changed for another reason
    for key, name in _FIXED_KEYS.items():
        if key in about and key in now and about[key] != now[key]:
            was, new = (str(value)[:12] for value in (about[key], now[key]))
            raise TrainingError(
                f"{folder}: {name} has changed ({was}, now {new}); restore it or use --restart"
            )
    about["attempts"] = [*about.get("attempts", []), attempt(command, changes, processes)]
    if not changes:
        write_json(
            folder / MANIFEST, about | {MODEL_HASH: [model_hash_in(folder)]}, allow_nan=False
        )
        return changes
    text = dump(settings)
    # Until the new file is in place, both are accepted: an interruption between the two writes is harmless.
    accepted = [model_hash_in(folder), model_hash(parse_yaml(text, SETTINGS)[0])]
    write_json(folder / MANIFEST, about | {MODEL_HASH: accepted}, allow_nan=False)
    write_text(folder / SETTINGS, text)
    write_json(folder / MANIFEST, about | {MODEL_HASH: accepted[1:]}, allow_nan=False)
    return changes


def model_hash(tree: Any) -> str:
    """SHA-256 of the stored settings that determine what the weights compute: the model, its lengths, and the
    overrides of the stages. It is taken of the values in the file, so fields that a later version adds do not
    change it."""
    training = tree.get("training") or {}
    determining = {key: tree.get(key) for key in ("model", "train_length", "original_length")}
    determining["stages"] = training.get("stages")
    return hashlib.sha256(json.dumps(determining, sort_keys=True).encode()).hexdigest()


def model_hash_in(folder: Path) -> str:
    """The `model_hash` of a run's settings file."""
    return model_hash(read_yaml(folder / SETTINGS)[0])


def rename_old_run(folder: Path) -> Path | None:
    """Rename a run to `<name>.old1` (or the next free number), so that a new run can use the name."""
    if not folder.exists():
        return None
    number = 1
    while (away := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    os.rename(folder, away)
    return away


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Lock a run against training by other processes; the lock of a killed process is released by the system.

    Both the folder and a file in it are locked: the file can be deleted, and on network file systems the lock
    of the folder is not visible on other machines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with open(folder / LOCK, "a") as lock:
            if locked(handle) is False or locked(lock) is False:
                raise TrainingError(
                    f"{folder} is being trained by another process; wait for it or end it"
                )
            yield
    finally:
        os.close(handle)


def read_settings(folder: Path) -> RunSettings:
    """The settings of a run. Raises TrainingError where those of its model were edited after training."""
    settings = load_settings(RunSettings, [str(folder / SETTINGS)])
    recorded = read_manifest(folder).get(MODEL_HASH) if is_run(folder) else None
    if recorded is not None and model_hash_in(folder) not in recorded:
        raise TrainingError(
            f"{folder / SETTINGS}: model, train_length, original_length or training.stages was edited after "
            f"training (hash {model_hash_in(folder)[:12]}, not that in {MANIFEST}); restore the file"
        )
    return settings


def open_run_data(folder: Path) -> PreparedData:
    """The prepared text that a run was trained on, according to its manifest."""
    about = read_manifest(folder)
    return open_prepared(about.get("data") or "", about.get("mixture", ()))


@dataclass(frozen=True)
class LoadedRun:
    """A trained model, ready for evaluation or generation."""

    model: Transformer
    tokenizer: Tokenizer
    settings: RunSettings  # with the scheduled changes up to `step`, and the given overrides
    step: int
    folder: Path
    checkpoint_hash: str  # differs where `weights` is not the run's default
    changed: str = ""  # a line about the scheduled changes
    weights: Literal["ema", "last"] = "last"


def load(
    run: str | Path,
    overrides: Sequence[str] | ModelSettings = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    checkpoint: int | None = None,
    console=None,
    weights: Literal["ema", "last"] | None = None,
) -> LoadedRun:
    """Load the model and the tokenizer of a run directory, in evaluation mode.

    Args:
        run: the run directory.
        overrides: of the positional scheme, e.g. `model.position.scaling.name=yarn`, applied to the settings
            the checkpoint was last trained with (`training.stages`), or another model; see `override`.
        dtype: dtype of the weights; None: float64 if they are stored in it, else float32.
        checkpoint: step of the checkpoint; None: the newest good one.
        console: reports damaged checkpoints that are skipped; None: standard error.
        weights: the weights of the last step, or their EMA (`training.ema`); None: the EMA if there is one.

    Raises:
        TrainingError: not a run, no good checkpoint, no EMA in it, another tokenizer, or an override
            outside the positional scheme.
        ModelError: an override that the trained scheme does not allow.
    """
    folder = Path(run)
    about = read_manifest(folder, "vocab_size", "tokenizer_hash")
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer.hash != about.get("tokenizer_hash"):
        raise TrainingError(
            f"{folder / 'tokenizer'} is not the tokenizer of this run "
            f"(hash {tokenizer.hash[:12]}, the run's {str(about.get('tokenizer_hash'))[:12]}); restore it"
        )
    trained = read_settings(folder)
    console = console or Console()
    if MODEL_HASH not in about:
        console.info(
            f"{folder}: its model settings are not verified, because an earlier version saved the run"
        )

    def read() -> LoadedRun:
        found = find_checkpoint(folder, console, checkpoint, only=(WEIGHTS, AVERAGE, STATE))
        if found is None:
            raise TrainingError(f"{folder} has no checkpoint yet; train it first")
        last, changed = last_trained(trained, found.step)
        settings = override(last, overrides)
        length = settings.train_length
        original = settings.original_length
        model = Transformer(settings.model, about["vocab_size"], length, original)
        stored = {kind for _, kind in shapes_in(found.folder, (WEIGHTS,)).values()}
        model.to(dtype or (torch.float64 if torch.float64 in stored else torch.float32))
        load_weights(model, found)
        usual = "ema" if found.has_average else "last"
        chosen = weights or usual
        notes = [changed] if changed else []
        if chosen == "ema":
            if not found.has_average:
                raise TrainingError(
                    f"{found.folder} has no EMA weights: it was trained without training.ema"
                )
            load_average(model, found)
            notes.append("weights are their exponential mean (training.ema)")
        model.to(device).eval().pack()
        digest = (
            found.hash
            if chosen == usual
            else hashlib.sha256(f"{chosen} {found.hash}".encode()).hexdigest()
        )
        return LoadedRun(
            model, tokenizer, settings, found.step, folder, digest, "; ".join(notes), chosen
        )

    return while_training(folder, read)


def not_a_run(folder: Path) -> str:
    """An error message for a folder that is not a run, with the runs in the same parent folder."""
    if not folder.exists():
        near = sorted(path.parent.name for path in folder.parent.glob(f"*/{MANIFEST}"))
        known = f"; {folder.parent} holds {', '.join(near)}" if near else ""
        return f"{folder}: no such run directory{known}"
    return f"{folder} is not a run directory: it has no {MANIFEST}"
