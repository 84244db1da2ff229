"""A run directory: settings, manifest, tokenizer and checkpoints of one model.

runs/<config>-<choices>-<identity>/
    settings.yaml    every setting, resolved
    manifest.json    command, commit, versions, machine, hashes of data, tokenizer and model
                     settings; one entry per attempt
    tokenizer/       a copy, so that the folder is self-contained
    metrics.jsonl    the metrics of the run
    checkpoints/     step-00000100, ...
"""

import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from data import RunData, open_prepared
from data.files import (
    locked,
    path_problem,
    read_object,
    sha256_of,
    with_keys,
    write_json,
    write_text,
)
from data.task_data import generated
from data.tokenizers import Tokenizer, load_tokenizer
from errors import TrainingError
from model import ModelSettings, Transformer
from model.decoding import pack
from run_directory.checkpoints import (
    AVERAGE,
    STATE,
    WEIGHTS,
    find_checkpoint,
    steps_of,
    while_training,
)
from run_directory.console import Console
from run_directory.position_overrides import make_model, override
from run_directory.run_settings import RunSettings, describe_changes
from run_directory.training_schedule import last_trained
from run_directory.weights import load_weights, named_weights, read_into, shapes_in
from settings.load import dump, identity, load_settings
from settings.yaml_io import parse_yaml

SETTINGS = "settings.yaml"
MANIFEST = "manifest.json"
LOCK = ".lock"
HOLDER = ".holder"
METRICS = "metrics.jsonl"
MODEL_HASHES = "model_hash"  # manifest key: a list, of two hashes while the settings are rewritten
# Keys of the manifest whose values must not change on resume.
_RECORDED_FACTS = {
    "tokenizer_hash": "tokenizer",
    "vocab_size": "vocabulary",
    "data_hash": "prepared text",
    "valid_hash": "held-out text",
}
_REQUIRED = {"vocab_size": int, "tokenizer_hash": str, MODEL_HASHES: list}  # manifest keys
_LIBRARIES = ("accelerate", "datasets", "numpy", "pydantic", "safetensors", "sentencepiece")


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A trained model, ready for evaluation or generation: `run.model(ids)` gives its logits."""

    model: Transformer
    tokenizer: Tokenizer
    settings: RunSettings  # with the scheduled changes up to `step`, and the given overrides
    step: int
    folder: Path
    checkpoint_hash: str  # differs if `weights` is not the run's default
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
        """The run in a folder. Raises TrainingError if it is not a run."""
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
                the like; `vocab_size` if the embedding has more rows than the tokenizer has ids.
            processes: the processes that share the work, for the entry of the first attempt.

        Raises TrainingError if the tokenizer has more ids than the embedding has rows, if the
        folder is already a run, or if it has checkpoints but no manifest, so that their data are
        unknown.
        """
        facts = facts or {}
        if is_run(folder) or steps_of(folder):
            known = (
                "is already a run; choose another --run-dir"
                if is_run(folder)
                else f"has checkpoints but no {MANIFEST}; restore its {MANIFEST}"
            )
            raise TrainingError(f"{folder} {known}, or start again with --restart")
        rows = facts.get("vocab_size", tokenizer.vocab_size)
        if tokenizer.vocab_size > rows:
            raise TrainingError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size:,} ids, but the embedding "
                f"of the model has {rows:,} rows; use the tokenizer of the model"
            )
        (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / "tokenizer")
        text = dump(settings)
        write_text(folder / SETTINGS, text)
        run = cls(folder)
        run.write_manifest(
            {
                "format": 1,
                "identity": identity(settings),
                MODEL_HASHES: [model_hash(text)],
                "vocab_size": tokenizer.vocab_size,
                "tokenizer_hash": tokenizer.hash,
                "attempts": [attempt(command, [], processes)],
            }
            | facts
        )
        return run

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

        Raises TrainingError, with the list of settings that differ but may not change, or if the
        tokenizer or the data are not the run's.
        """
        if forbidden := describe_changes(self.settings, settings, include_allowed=False):
            raise TrainingError(
                f"{self.folder}: these settings cannot change on resume; restore them, continue in "
                f"a new run with the new values (--fork {shlex.quote(str(self.folder))} instead of "
                "--run-dir), or train again from step 0 (--restart):\n       "
                + "\n       ".join(forbidden)
            )
        manifest = dict(self.manifest)
        now = {"tokenizer_hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size}
        now |= facts or {}
        # The settings are equal, so these changed for another reason.
        for key, name in _RECORDED_FACTS.items():
            if key in manifest and key in now and manifest[key] != now[key]:
                raise TrainingError(
                    f"{self.folder}: {name} has changed ({str(manifest[key])[:12]}, now "
                    f"{str(now[key])[:12]}); restore it or use --restart"
                )
        manifest |= facts or {}  # the prepared folder may have moved
        changes = describe_changes(self.settings, settings)
        attempts = manifest.get("attempts", [])
        manifest["attempts"] = [*attempts, attempt(command, changes, processes)]
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
        """Every setting of the run. Raises TrainingError if those of the model were edited after
        training."""
        settings = load_settings(RunSettings, [str(self.folder / SETTINGS)])
        if (own := self._stored_hash()) not in self._recorded(MODEL_HASHES):
            raise TrainingError(
                f"{self.folder / SETTINGS}: model, train_length, original_length or "
                f"training.stages was edited after training (its hash {own[:12]} is not in "
                f"{MANIFEST}); restore the file"
            )
        return settings

    def _stored_hash(self) -> str:
        return model_hash((self.folder / SETTINGS).read_text(encoding="utf-8"))

    @cached_property
    def manifest(self) -> dict:
        """The manifest; a key that was not recorded is absent or None.

        Raises TrainingError for a folder that is not a run.
        """
        if not is_run(self.folder):
            raise TrainingError(not_a_run(self.folder))
        return read_object(self.folder / MANIFEST)

    def _recorded(self, key: str) -> Any:
        """A value of the manifest. Raises TrainingError if it is missing."""
        return with_keys(self.folder / MANIFEST, self.manifest, {key: _REQUIRED[key]})[key]

    def write_manifest(self, manifest: dict) -> None:
        """Replace the manifest."""
        write_json(self.folder / MANIFEST, manifest, allow_nan=False)
        self.manifest = manifest

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding, which may exceed the number of the tokenizer's ids."""
        return self._recorded("vocab_size")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder. Raises TrainingError if it is not the run's."""
        recorded = self._recorded("tokenizer_hash")
        tokenizer = load_tokenizer(self.folder / "tokenizer")
        if tokenizer.hash != recorded:
            raise TrainingError(
                f"{self.folder / 'tokenizer'} is not the tokenizer of this run (its hash is "
                f"{tokenizer.hash[:12]}, expected {recorded[:12]}); restore it"
            )
        return tokenizer

    @property
    def steps(self) -> list[int]:
        """The steps of the run's checkpoints, good or damaged, ascending."""
        return steps_of(self.folder)

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
        skip_damaged: bool = False,
    ) -> LoadedRun:
        """Load the model and the tokenizer, in evaluation mode.

        Args:
            overrides: overrides of the positional scheme, e.g. `model.position.scaling.name=yarn`,
                applied to the settings with which the checkpoint was last trained
                (`training.stages`); or the settings of another model. See `override`.
            dtype: dtype of the weights; None: float64 if they are stored in it, else float32.
            checkpoint: step of the checkpoint; None: the newest.
            weights: the weights of the last step, or their EMA (`training.ema`); None: the EMA if
                there is one.
            console: prints warnings; None: to standard error.
            skip_damaged: use the newest intact checkpoint if the newest one is damaged.

        Raises:
            TrainingError: not a run, no checkpoint, a damaged one, no EMA in it, another tokenizer,
                edited settings, or an override outside the positional scheme.
            ModelError: an override that the trained scheme does not allow.
        """
        console = console or Console()

        def read() -> LoadedRun:
            files = (WEIGHTS, AVERAGE, STATE)
            warn = console.warn if skip_damaged else None
            source = find_checkpoint(self.folder, checkpoint, files, warn)
            if source is None:
                raise TrainingError(f"{self.folder} has no checkpoint yet; train it first")
            trained, change = last_trained(self.settings, source.step)
            settings = override(trained, overrides)
            model = make_model(settings, self.vocab_size)
            stored = {kind for _, kind in shapes_in(source.folder, "model").values()}
            model.to(dtype or (torch.float64 if torch.float64 in stored else torch.float32))
            load_weights(model, source.folder)
            default: Literal["ema", "last"] = "ema" if source.has(AVERAGE) else "last"
            chosen = weights or default
            notes = [change] if change else []
            if chosen == "ema":
                if default != "ema":
                    raise TrainingError(
                        f"{source.folder} has no EMA weights: it was trained without training.ema"
                    )
                read_into(source.folder, "average", named_weights(model))
                notes.append("weights are their exponential moving average (training.ema)")
            return LoadedRun(
                model=pack(model.to(device).eval()),
                tokenizer=self.tokenizer,
                settings=settings,
                step=source.step,
                folder=self.folder,
                checkpoint_hash=source.hash_of(chosen),
                changed="; ".join(notes),
                weights=chosen,
            )

        return while_training(self.folder, read)


def model_hash(text: str) -> str:
    """SHA-256 of the stored settings that determine what the weights compute: the model, its
    lengths, and the stages.

    It is computed from the values in the text of the file, so fields that a later version adds do
    not change it.
    """
    tree: Any = parse_yaml(text, SETTINGS)[0]
    stored = {key: tree.get(key) for key in ("model", "train_length", "original_length")}
    stored["stages"] = (tree.get("training") or {}).get("stages")
    return sha256_of(json.dumps(stored, sort_keys=True))


def attempt(command: Sequence[str], changes: list[str], processes: dict | None) -> dict:
    """One entry of the manifest's `attempts`: command, commit, versions and hardware. `processes`
    describes the processes that share the run."""
    cuda = range(torch.cuda.device_count())
    versions = {name: metadata.version(name) for name in _LIBRARIES}
    versions |= {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "changed_settings": changes,
        "versions": versions | {"cuda": torch.version.cuda},
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),  # bytes
            "gpus": [torch.cuda.get_device_name(i) for i in cuda],
        },
        "parallel": processes,
    }


def processor() -> str:
    """The model of the CPU, or its architecture if the system does not name the model."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    named = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    """Output of git about this code; None without git or a repository of its own."""
    home = Path(__file__).resolve().parents[1]
    if not (home / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(home), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def is_run(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def not_a_run(folder: Path) -> str:
    """An error message for a folder that is not a run."""
    if folder.exists():
        return f"{folder} is not a run directory: it has no {MANIFEST}"
    if is_run(usual := Path("runs") / folder):
        return f"{folder}: no such run directory; did you mean {usual}?"
    return f"{folder}: no such run directory"


def check_writable(folder: Path) -> None:
    """Raise TrainingError for a run directory that cannot be created, before any other work."""
    if not str(folder).isprintable():
        raise TrainingError(f"--run-dir={str(folder)!r} has control characters; remove them")
    if problem := path_problem(folder / SETTINGS):
        raise TrainingError(f"--run-dir={folder} {problem}")


def rename_old_run(folder: Path) -> Path:
    """Rename a run to `<name>.old1` (or the next free number), so that a new run can use the
    name."""
    number = 1
    while (away := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    os.rename(folder, away)
    return away


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Lock a run against training by other processes; the system releases the lock of a killed
    process. Another file names the process that holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder = folder / HOLDER
    with locked(folder / LOCK) as is_own:
        if not is_own:
            name = holder.read_text(encoding="utf-8") if holder.is_file() else "another process"
            raise TrainingError(
                f"{folder} is being trained by {name}; wait for it or end it (a stopped process "
                "keeps its lock)"
            )
        write_text(holder, f"process {os.getpid()} on {socket.gethostname()}")
        yield
