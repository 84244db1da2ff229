"""A run directory: settings, manifest, tokenizer and checkpoints of one model.

runs/<config>-<choices>-<identity>/
    settings.yaml    every setting, resolved
    manifest.json    command, commit, versions, machine, hashes of data, tokenizer and model
                     settings; one entry per attempt
    tokenizer/       a copy, so that the folder is self-contained
    metrics.jsonl    the metrics of the run
    exposure.npz     how often each position and distance was trained, up to the newest checkpoint
    checkpoints/     step-00000100, ...
"""

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from data import RunData, open_prepared
from data.files import locked, path_problem, read_object, with_keys, write_json, write_text
from data.generated import generated
from data.tokenizers import Tokenizer, load_tokenizer
from errors import TrainingError
from model import ModelSettings, Transformer
from run_directory.allowed_changes import check_resume
from run_directory.checkpoints import (
    AVERAGE,
    STATE,
    WEIGHTS,
    Checkpoint,
    find_checkpoint,
    steps_of,
    while_training,
)
from run_directory.console import Console
from run_directory.environment import attempt
from run_directory.position_overrides import override
from run_directory.run_settings import RunSettings
from run_directory.sharded_tensors import shapes_in
from run_directory.stages import last_trained
from run_directory.weights import load_average, load_weights
from settings.load import dump, identity, load_stored
from settings.yaml_io import parse_yaml

SETTINGS = "settings.yaml"
MANIFEST = "manifest.json"
LOCK = ".lock"
METRICS = "metrics.jsonl"
MODEL_HASHES = "model_hash"  # manifest key: a list; of two hashes while the settings are rewritten
# Keys of the manifest whose values must not change on resume.
_FIXED = {
    "tokenizer_hash": "tokenizer",
    "vocab_size": "vocabulary",
    "data_hash": "prepared text",
    "valid_hash": "held-out text",
}
# Keys of the manifest that other modules read, and their types; absent or null where not recorded.
_TYPES: dict[str, type] = {
    "vocab_size": int,
    "tokenizer_hash": str,
    "data": str,
    "mixture": list,
    "lineage": list,
    "inherited": dict,
    "attempts": list,
    MODEL_HASHES: list,
}


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A trained model, ready for evaluation or generation: `run.model(ids)` gives its logits."""

    model: Transformer
    tokenizer: Tokenizer
    settings: RunSettings  # with the scheduled changes up to `step`, and the given overrides
    step: int
    folder: Path
    checkpoint_hash: str  # differs where `weights` is not the run's default
    changed: str = ""  # a line about the scheduled changes
    weights: Literal["ema", "last"] = "last"

    def __repr__(self) -> str:
        parameters = self.model.parameter_count() / 1e6
        return f"LoadedRun({str(self.folder)!r}, step {self.step}, {parameters:.1f}M parameters)"


class Run:
    """A run directory. Its files are read at first use; `Run(folder)` itself reads nothing."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, checkpoints {self.steps})"

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """The run in a folder. Raises TrainingError where it is none."""
        run = cls(folder)
        if not is_run(run.folder):
            raise TrainingError(not_a_run(run.folder))
        return run

    @classmethod
    def create(
        cls,
        folder: Path,
        settings: RunSettings,
        tokenizer: Tokenizer,
        command: Sequence[str],
        facts: dict | None = None,
        processes: dict | None = None,
    ) -> "Run":
        """Create a run directory. The manifest is written last: a folder with a manifest is a run.

        Args:
            facts: further entries of the manifest: data folder, `data_hash`, parameter count and
                the like; `vocab_size` where the embedding has more rows than the tokenizer has ids.
            processes: the processes that share the work, for the entry of the first attempt.

        Raises TrainingError where the tokenizer has more ids than the embedding has rows, and where
        the folder already is a run, or has checkpoints but no manifest, so that their data are
        unknown.
        """
        facts = facts or {}
        if is_run(folder):
            raise TrainingError(
                f"{folder} is already a run; resume it, or start again with --restart"
            )
        if steps_of(folder):
            raise TrainingError(
                f"{folder} contains checkpoints but no {MANIFEST}: restore it, or use --restart"
            )
        rows = facts.get("vocab_size", tokenizer.vocab_size)
        if tokenizer.vocab_size > rows:
            raise TrainingError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size:,} ids and the embedding of "
                f"the model {rows:,} rows; use the tokenizer of the model"
            )
        (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / "tokenizer")
        text = dump(settings)
        write_text(folder / SETTINGS, text)
        manifest = {
            "format": 1,
            "identity": identity(settings),
            MODEL_HASHES: [model_hash(text)],
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_hash": tokenizer.hash,
            "attempts": [attempt(command, [], processes)],
        }
        write_json(folder / MANIFEST, manifest | facts, allow_nan=False)
        return cls(folder)

    def resume(
        self,
        settings: RunSettings,
        tokenizer: Tokenizer,
        command: Sequence[str],
        facts: dict | None = None,
        processes: dict | None = None,
    ) -> list[str]:
        """Check that this run can resume under these settings, record the attempt, and return the
        changed settings, one line each.

        Raises TrainingError for settings that may not change (`check_resume`), and where the
        tokenizer or the data are not the run's.
        """
        manifest = dict(self.manifest)
        now = {"tokenizer_hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size}
        now |= facts or {}
        changes = check_resume(self.folder, self.settings, settings)
        # The settings are equal, so these changed for another reason.
        for key, name in _FIXED.items():
            if key in manifest and key in now and manifest[key] != now[key]:
                raise TrainingError(
                    f"{self.folder}: {name} has changed ({str(manifest[key])[:12]}, now "
                    f"{str(now[key])[:12]}); restore it or use --restart"
                )
        before = attempt(command, changes, processes)
        manifest["attempts"] = [*manifest.get("attempts", []), before]
        manifest[MODEL_HASHES] = [self._stored_hash()]
        if changes:
            text = dump(settings)
            # Both hashes are valid until the file is in place: an interruption between writes is
            # harmless.
            both = [*manifest[MODEL_HASHES], model_hash(text)]
            self.write_manifest(manifest | {MODEL_HASHES: both})
            write_text(self.folder / SETTINGS, text)
            self.settings = settings
            manifest[MODEL_HASHES] = both[1:]
        self.write_manifest(manifest)
        return changes

    @cached_property
    def settings(self) -> RunSettings:
        """Every setting. Raises TrainingError where those of the model were edited after
        training."""
        settings = load_stored(RunSettings, self.folder / SETTINGS)
        hashes = self.manifest.get(MODEL_HASHES)
        if hashes is not None and (own := self._stored_hash()) not in hashes:
            raise TrainingError(
                f"{self.folder / SETTINGS}: model, train_length, original_length or "
                f"training.stages was edited after training (hash {own[:12]}, not that in "
                f"{MANIFEST}); restore the file"
            )
        return settings

    def _stored_hash(self) -> str:
        return model_hash((self.folder / SETTINGS).read_text(encoding="utf-8"))

    @cached_property
    def manifest(self) -> dict:
        """The manifest; a key that was not recorded is absent or None.

        Raises TrainingError for a folder that is not a run, and a key of the wrong type.
        """
        if not is_run(self.folder):
            raise TrainingError(not_a_run(self.folder))
        file = self.folder / MANIFEST
        manifest = read_object(file)
        recorded = {key: kind for key, kind in _TYPES.items() if manifest.get(key) is not None}
        with_keys(file, manifest, recorded)
        for parent in manifest.get("lineage") or []:
            with_keys(f"{file}: lineage", parent, {"run": str, "step": int})
        return manifest

    def write_manifest(self, manifest: dict) -> None:
        """Replace the manifest."""
        write_json(self.folder / MANIFEST, manifest, allow_nan=False)
        self.manifest = manifest

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which may be more than the ids of the tokenizer."""
        needed = {"vocab_size": int}
        return with_keys(self.folder / MANIFEST, self.manifest, needed)["vocab_size"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder. Raises TrainingError where it is not the run's."""
        needed = {"tokenizer_hash": str}
        recorded = with_keys(self.folder / MANIFEST, self.manifest, needed)["tokenizer_hash"]
        tokenizer = load_tokenizer(self.folder / "tokenizer")
        if tokenizer.hash != recorded:
            raise TrainingError(
                f"{self.folder / 'tokenizer'} is not the tokenizer of this run (hash "
                f"{tokenizer.hash[:12]}, the run's {recorded[:12]}); restore it"
            )
        return tokenizer

    @property
    def steps(self) -> list[int]:
        """The steps of its checkpoints, good or damaged, ascending."""
        return steps_of(self.folder)

    def checkpoint(
        self,
        step: int | None = None,
        only: tuple[str, ...] | None = None,
        console: Console | None = None,
    ) -> Checkpoint:
        """A good checkpoint, as `find_checkpoint` finds it. Raises TrainingError where there is
        none."""
        checkpoint = find_checkpoint(self.folder, console, step, only)
        if checkpoint is None:
            raise TrainingError(f"{self.folder} has no checkpoint yet; train it first")
        return checkpoint

    def open_data(self) -> RunData:
        """The prepared text that the run was trained on, according to its manifest."""
        if items := generated(self.settings.data):
            return items
        return open_prepared(self.manifest.get("data") or "", self.manifest.get("mixture") or ())

    def load(
        self,
        overrides: Sequence[str] | ModelSettings = (),
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        checkpoint: int | None = None,
        weights: Literal["ema", "last"] | None = None,
        console: Console | None = None,
    ) -> LoadedRun:
        """Load the model and the tokenizer, in evaluation mode.

        Args:
            overrides: of the positional scheme, e.g. `model.position.scaling.name=yarn`, applied to
                the settings the checkpoint was last trained with (`training.stages`), or another
                model; see `override`.
            dtype: dtype of the weights; None: float64 if they are stored in it, else float32.
            checkpoint: step of the checkpoint; None: the newest good one.
            weights: the weights of the last step, or their EMA (`training.ema`); None: the EMA if
                there is one.
            console: reports damaged checkpoints that are skipped; None: standard error.

        Raises:
            TrainingError: not a run, no good checkpoint, no EMA in it, another tokenizer, edited
                settings, or an override outside the positional scheme.
            ModelError: an override that the trained scheme does not allow.
        """
        console = console or Console()
        if MODEL_HASHES not in self.manifest:
            console.info(
                f"{self.folder}: an earlier version saved it; its model settings are not verified"
            )
        vocab_size = self.vocab_size
        tokenizer = self.tokenizer

        def read() -> LoadedRun:
            source = self.checkpoint(
                checkpoint,
                (WEIGHTS, AVERAGE, STATE),
                console,
            )
            trained, changed = last_trained(self.settings, source.step)
            settings = override(trained, overrides)
            model = Transformer(
                settings.model, vocab_size, settings.train_length, settings.original_length
            )
            stored = {kind for _, kind in shapes_in(source.folder, (WEIGHTS,)).values()}
            model.to(dtype or (torch.float64 if torch.float64 in stored else torch.float32))
            load_weights(model, source)
            default = "ema" if source.has_average else "last"
            chosen = weights or default
            notes = [changed] if changed else []
            if chosen == "ema":
                if not source.has_average:
                    raise TrainingError(
                        f"{source.folder} has no EMA weights: it was trained without training.ema"
                    )
                load_average(model, source)
                notes.append("weights are their exponential mean (training.ema)")
            model.to(device).eval().pack()
            digest = source.hash
            if chosen != default:
                digest = hashlib.sha256(f"{chosen} {digest}".encode()).hexdigest()
            return LoadedRun(
                model=model,
                tokenizer=tokenizer,
                settings=settings,
                step=source.step,
                folder=self.folder,
                checkpoint_hash=digest,
                changed="; ".join(notes),
                weights=chosen,
            )

        return while_training(self.folder, read)


def model_hash(text: str) -> str:
    """SHA-256 of the stored settings that determine what the weights compute: the model, its
    lengths, and the stages.

    It is taken of the values in the text of the file, so fields that a later version adds do not
    change it.
    """
    tree: Any = parse_yaml(text, SETTINGS)[0]
    stored = {key: tree.get(key) for key in ("model", "train_length", "original_length")}
    stored["stages"] = (tree.get("training") or {}).get("stages")
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def is_run(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def not_a_run(folder: Path) -> str:
    """An error message for a folder that is not a run, with the runs in the same parent folder."""
    if not folder.exists():
        if is_run(usual := Path("runs") / folder):
            return f"{folder}: no such run directory; did you mean {usual}?"
        near = sorted(path.parent.name for path in folder.parent.glob(f"*/{MANIFEST}"))
        known = f"; {folder.parent} holds {', '.join(near)}" if near else ""
        return f"{folder}: no such run directory{known}"
    return f"{folder} is not a run directory: it has no {MANIFEST}"


def check_writable(folder: Path) -> None:
    """Raise TrainingError for a run directory that cannot be created, before any other work."""
    if not str(folder).isprintable():
        raise TrainingError(f"--run-dir={str(folder)!r} has control characters; remove them")
    if problem := path_problem(folder / SETTINGS):
        raise TrainingError(f"--run-dir={folder} {problem}")


def rename_old_run(folder: Path) -> Path | None:
    """Rename a run to `<name>.old1` (or the next free number), so that a new run can use the
    name."""
    if not folder.exists():
        return None
    number = 1
    while (away := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    os.rename(folder, away)
    return away


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Lock a run against training by other processes; the system releases the lock of a killed
    process.

    Both the folder and a file in it are locked: the file can be deleted, and on network file
    systems the lock of the folder is not visible on other machines. The file names the process that
    has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with open(
            folder / LOCK,
            "a+",
            encoding="utf-8",
            errors="replace",
        ) as lock:
            if locked(handle) is False or locked(lock) is False:
                lock.seek(0)
                holder = lock.read(200).strip() or "another process"
                raise TrainingError(
                    f"{folder} is being trained by {holder}; wait for it or end it (a stopped "
                    "process keeps its lock)"
                )
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
            yield
    finally:
        os.close(handle)
