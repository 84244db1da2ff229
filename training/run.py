"""Run folders: made once, checked on resume, held by one process, read back as model and tokenizer.

runs/<config>-<identity>/
    settings.yaml    every setting, resolved
    manifest.json    command, commit, versions, machine, hashes of data and tokenizer; one entry per attempt
    tokenizer/       a copy, so that the folder speaks for itself
    metrics.jsonl    what happened
    exposure.npz     how often each position and distance was trained, up to the newest checkpoint
    checkpoints/     step-00000100, ...
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch

from data import Prepared, open_prepared
from data.locks import locked
from data.tokenizer import Tokenizer, load_tokenizer
from model import Transformer
from training.checkpoint import AVERAGE, STATE, WEIGHTS, Checkpoint, find_checkpoint
from training.config import differences, dump, identity, load_settings, split_words
from training.console import Console
from training.errors import TrainingError
from training.files import read_json, write_json, write_text
from training.machine import attempt
from training.overrides import override
from training.restore import load_average, load_weights
from training.settings import RunSettings
from training.sharded import is_weight, shapes_in
from training.stages import last_trained

SETTINGS, MANIFEST = "settings.yaml", "manifest.json"
_SAME = {  # what a resumed run must find as it left it, by key of the manifest
    "tokenizer_hash": "the tokenizer is not the one this run was started with",
    "vocab_size": "the vocabulary is not the one this run was started with",
    "data_hash": "the prepared data are not those this run was started with",
    "valid_hash": "the held-out text is not the one this run was started with",
}


def run_folder(settings: RunSettings, words: Sequence[str], root: str | Path = "runs") -> Path:
    """`<root>/<stem_of(words)>-<identity>`: the same command finds its run again."""
    return Path(root) / f"{stem_of(words)}-{identity(settings)}"


def stem_of(words: Sequence[str]) -> str:
    """The first part of a run's name: its first YAML file, else the run it is a fork of, else `default`."""
    files, dotted = split_words(list(words))
    said = dict(word.split("=", 1) for word in dotted)
    forked = said.get("parent.run") if "parent.fork" in said else None
    return Path(files[0]).stem if files else Path(forked or "default").name


def is_run(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def create_run(
    folder: Path,
    settings: RunSettings,
    tokenizer: Tokenizer,
    command: Sequence[str],
    extra: dict | None = None,
    processes: dict | None = None,
) -> Path:
    """Make a run folder; its manifest, written last, makes it a run.

    `extra` goes into the manifest: data folder, `data_hash`, parameter count and the like; `processes`, those
    that share the work, into its first attempt.  Raises TrainingError where the folder already is a run.
    """
    if is_run(folder):
        raise TrainingError(f"{folder} already is a run; resume it, or start anew with --fresh")
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer")
    write_text(folder / SETTINGS, dump(settings))
    about = {
        "format": 1,
        "identity": identity(settings),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_hash": tokenizer.hash,
        **(extra or {}),
        "attempts": [attempt(command, [], processes)],
    }
    write_json(folder / MANIFEST, about)
    return folder


def resume_run(
    folder: Path,
    settings: RunSettings,
    tokenizer: Tokenizer,
    command: Sequence[str],
    extra: dict | None = None,
    processes: dict | None = None,
) -> list[str]:
    """Check that a run may go on under these settings, note the attempt, and return what changed, in words.

    Only settings marked `may_change` may differ.  Raises TrainingError listing every other difference, or
    where tokenizer or data are not the run's.
    """
    about = read_json(folder / MANIFEST)
    now = {"tokenizer_hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size, **(extra or {})}
    changes = changed(read_settings(folder), settings)
    if barred := changed(read_settings(folder), settings, free=False):
        raise TrainingError(
            f"{folder} was started with other settings; change them back, go on under the new ones in "
            f"another run (--fork {folder} in place of --folder), or start anew (--fresh):\n       "
            + "\n       ".join(barred)
        )
    for key, sentence in _SAME.items():  # the settings are the same: something else happened to these
        if key in about and key in now and about[key] != now[key]:
            was, is_now = (str(value)[:12] for value in (about[key], now[key]))
            raise TrainingError(f"{folder}: {sentence} ({was}, now {is_now}); restore it, or use --fresh")
    about["attempts"] = [*about.get("attempts", []), attempt(command, changes, processes)]
    write_json(folder / MANIFEST, about)
    if changes:
        write_text(folder / SETTINGS, dump(settings))
    return changes


def changed(old: RunSettings, new: RunSettings, free: bool = True) -> list[str]:
    """Every setting that differs, as `key: old → new`; `free` with those that may change on resume."""
    return [
        f"{key}: {_short(a)} → {_short(b)}"
        for key, a, b, may_change in differences(old, new)
        if free or not may_change
    ]


def set_aside(folder: Path) -> Path | None:
    """Give a run folder another name (`<name>.old1`, ...) so that a fresh run can take its place."""
    if not folder.exists():
        return None
    number = 1
    while (away := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    os.rename(folder, away)
    return away


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from training the same run; a killed process lets go by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as lock:
        if locked(lock) is False:
            raise TrainingError(f"{folder} is being trained by another process; wait for it or end it")
        yield


def read_settings(folder: Path) -> RunSettings:
    return load_settings(RunSettings, [str(folder / SETTINGS)])


def text_of(folder: Path) -> Prepared:
    """The prepared text a run has been trained on, by its manifest."""
    if not is_run(folder):
        raise TrainingError(not_a_run(folder))
    about = read_json(folder / MANIFEST)
    return open_prepared(about.get("data") or "", about.get("mixture", ()))


def _short(value: object) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{k}: {_short(v)}" for k, v in value.items() if k != "name" and v is not None)
        return f"{value.get('name', '')}({inside})" if inside else str(value.get("name", "{}"))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Loaded:
    """A trained model, ready for evaluation or generation."""

    model: Transformer
    tokenizer: Tokenizer
    settings: RunSettings  # with the changes on the way up to `step`, and the overrides asked for
    step: int
    folder: Path
    checkpoint_hash: str  # another one under weights that were chosen against what is usual for the run
    changed: str = ""  # those changes in one sentence
    weights: Literal["last", "ema"] = "last"


def load(
    run: str | Path,
    words: Sequence[str] = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    checkpoint: int | None = None,
    console=None,
    weights: Literal["last", "ema"] | None = None,
) -> Loaded:
    """Model and tokenizer of a run folder, in evaluation mode.

    Args:
        run: the run folder.
        words: overrides of the positional scheme, e.g. `model.position.scaling.name=yarn`, laid over what the
            checkpoint was last trained under (`training.changes`); see `override`.
        dtype: of the weights; None: float64 if they are stored so, else float32.
        checkpoint: step of the checkpoint; None: the newest good one.
        console: told where a damaged checkpoint is passed over; None: standard error.
        weights: those of the last step, or their mean (`training.ema`); None: the mean where there is one.

    Raises:
        TrainingError: not a run folder, no good checkpoint, no mean in it, another tokenizer, an override
            outside the positional scheme.
        ModelError: an override that the trained scheme does not allow.
    """
    folder = Path(run)
    if not is_run(folder):
        raise TrainingError(not_a_run(folder))
    about = read_json(folder / MANIFEST)
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer.hash != about.get("tokenizer_hash"):
        raise TrainingError(
            f"{folder / 'tokenizer'} is not the tokenizer of this run "
            f"(hash {tokenizer.hash[:12]}, the run's {str(about.get('tokenizer_hash'))[:12]}); restore it"
        )
    trained, console = read_settings(folder), console or Console()

    def read() -> Loaded:
        found = find_checkpoint(folder, console, checkpoint, only=(WEIGHTS, AVERAGE, STATE))
        if found is None:
            raise TrainingError(f"{folder} has no checkpoint yet; train it first")
        last, changed = last_trained(trained, found.step)
        settings = override(last, words)
        length, original = settings.train_length, settings.original_length
        model = Transformer(settings.model, about["vocab_size"], length, original)
        model.to(dtype or _stored_dtype(found))
        load_weights(model, found)
        usual = "ema" if found.has_average else "last"
        chosen, said = weights or usual, [changed] if changed else []
        if chosen == "ema":
            if not found.has_average:
                raise TrainingError(
                    f"{found.folder} holds no mean of its weights: it was trained without training.ema"
                )
            load_average(model, found)
            said.append("weights are their exponential mean (training.ema)")
        model.to(device).eval()
        digest = found.hash if chosen == usual else sha256(f"{chosen} {found.hash}".encode()).hexdigest()
        return Loaded(model, tokenizer, settings, found.step, folder, digest, "; ".join(said), chosen)

    try:
        return read()
    except FileNotFoundError:  # a training under way has just replaced the checkpoint that was being read
        return read()


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    stored = {dtype for name, (_, dtype) in shapes_in(checkpoint.folder).items() if is_weight(name)}
    return torch.float64 if torch.float64 in stored else torch.float32


def not_a_run(folder: Path) -> str:
    """Why a folder is no run, and which runs stand beside it."""
    if not folder.exists():
        near = sorted(path.parent.name for path in folder.parent.glob(f"*/{MANIFEST}"))
        known = f"; {folder.parent} holds {', '.join(near)}" if near else ""
        return f"{folder}: no such run folder{known}"
    return f"{folder} is not a run folder: it has no {MANIFEST}"
