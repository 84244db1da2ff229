"""Foreign checkpoints as run directories, so that every command that takes a run takes them too.

`hf:FOLDER` and `hf:NAME` are a Hugging Face folder or a model of the hub, `gguf:FILE` is a GGUF
file.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from data.data_settings import DataSettings
from data.files import locked
from data.tokenizers import Tokenizer, load_folder_tokenizer, load_tokenizer_file
from data.tokenizers.tokenizer_settings import HuggingFaceSettings, SentencePieceSettings
from errors import InteropError
from interop.build import ImportedModel, build_model
from interop.checkpoint import ForeignCheckpoint
from interop.export.files import check_new, new_folder, space_for
from interop.gguf import converted_gguf
from interop.huggingface.folder import read_folder
from interop.huggingface.hub import download
from run_directory.checkpoints import save_weights
from run_directory.console import Console
from run_directory.run import Run, is_run
from run_directory.run_settings import RunSettings
from run_directory.training_settings import TrainingSettings, ValidationSettings
from settings.load import setting_before_validation

IMPORTED = Path("runs/imported")
FORMAT = 1  # part of the names of imported runs; raise it when the conversion changes


@dataclass(frozen=True)
class CheckpointSource:
    """A foreign checkpoint that has been found but not read.

    Attributes:
        name: what to call it.
        files: the files that determine it.
        open: reads it; its weights can be read until the context ends.
    """

    name: str
    files: list[Path]
    open: Callable[[], AbstractContextManager[ForeignCheckpoint]]

    @property
    def folder(self) -> Path:
        """The run directory of its import: another one whenever a file changes."""
        about = [
            (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
            for file in sorted(self.files)
        ]
        digest = hashlib.sha256(json.dumps([FORMAT, about]).encode()).hexdigest()[:10]
        name = re.sub(r"[^\w.+-]", "-", self.name)
        return IMPORTED / f"{name}-{digest}"


def _huggingface(name: str) -> CheckpointSource:
    folder = Path(name).expanduser()
    if folder.is_dir():
        short = folder.resolve().name
    else:
        folder = download(name)
        short = name.replace("/", "-")
    files = [file for file in folder.iterdir() if file.is_file()]
    return CheckpointSource(
        short,
        files,
        lambda: nullcontext(read_folder(folder, short)),
    )


def _gguf(name: str) -> CheckpointSource:
    file = Path(name).expanduser()
    if not file.is_file():
        raise InteropError(f"gguf:{name}: no such file")
    return CheckpointSource(file.stem, [file], lambda: converted_gguf(file))


_FORMATS: dict[str, Callable[[str], CheckpointSource]] = {"hf": _huggingface, "gguf": _gguf}


def is_foreign(argument: object) -> bool:
    """Whether an argument names a foreign checkpoint rather than a run directory."""
    return isinstance(argument, str) and argument.partition(":")[0] in _FORMATS and ":" in argument


def find_source(argument: str) -> CheckpointSource:
    """The checkpoint that `hf:...` or `gguf:...` names. Raises InteropError if there is none."""
    if not is_foreign(argument):
        raise InteropError(
            f"{argument} must begin with {' or '.join(f'{kind}:' for kind in _FORMATS)}"
        )
    kind, _, name = argument.partition(":")
    return _FORMATS[kind](name)


def run_of(argument: str | Path) -> Path:
    """The run directory that an argument names; a foreign checkpoint is imported first, unless it
    already is.

    Raises:
        InteropError, DataError: a checkpoint or tokenizer that cannot be imported.
    """
    if not is_foreign(argument):
        return Path(argument)
    source = find_source(str(argument))
    folder = source.folder
    with _alone(folder):  # several processes may be given the same checkpoint
        if not is_run(folder):
            import_source(source, folder)
            Console().info(f"{source.name!r} is imported into {folder}, with its results")
    return folder


def with_imported_parent(overrides: Sequence[str]) -> list[str]:
    """The files and overrides of train.py, with the run directory of a foreign `parent.run`."""
    parent = setting_before_validation(list(overrides), "parent")
    argument = parent.get("run") if isinstance(parent, dict) else None
    if not is_foreign(argument):
        return list(overrides)
    return [*overrides, f"parent.run={run_of(str(argument))}"]


def import_source(
    source: CheckpointSource, folder: Path, tokenizer_file: Path | None = None
) -> ImportedModel:
    """Convert a checkpoint that was found to a run directory; see `write_run`."""
    with source.open() as checkpoint:
        return write_run(checkpoint, folder, tokenizer_file)


def write_run(
    checkpoint: ForeignCheckpoint, folder: Path, tokenizer_file: Path | None = None
) -> ImportedModel:
    """Convert a checkpoint to a run directory. It appears only when it is complete.

    Args:
        tokenizer_file: tokenizer.json or tokenizer.model, for a checkpoint without one.

    Raises:
        InteropError: the folder is already a run, or the checkpoint cannot be imported.
        DataError: a tokenizer that cannot be read.
    """
    check_new(folder)
    tokenizer = _tokenizer(checkpoint, tokenizer_file)
    imported = build_model(checkpoint)
    _check_tokenizer(tokenizer, imported, tokenizer_file)
    source = {"imported_from": [str(path) for path in checkpoint.files]}
    about = source | {"vocab_size": imported.model.vocab_size}  # the tokenizer may have fewer ids
    with space_for(imported.model.state_dict(), folder), new_folder(folder) as draft:
        settings = _settings(imported, tokenizer, folder)
        Run.create(draft, settings, tokenizer, sys.argv, about)
        save_weights(draft, 0, imported.model, state=source)
    return imported


def _tokenizer(checkpoint: ForeignCheckpoint, file: Path | None) -> Tokenizer:
    if file is not None:
        return load_tokenizer_file(file)
    if checkpoint.tokenizer is None:
        raise InteropError(
            f"{checkpoint.config_file}: there is no tokenizer.json or tokenizer.model beside it; "
            "import it with scripts/import_model.py --tokenizer FILE"
        )
    return load_folder_tokenizer(checkpoint.tokenizer.parent)


def _check_tokenizer(
    tokenizer: Tokenizer,
    imported: ImportedModel,
    file: Path | None,
) -> None:
    """The embedding has a row for every id; a tokenizer given separately has the BOS and EOS of
    `config`."""
    shape = imported.shape
    config = imported.checkpoint.config_file
    name = file or imported.checkpoint.tokenizer
    # Embeddings are padded by a few rows or a few percent, never by as many rows as there are ids.
    if not tokenizer.vocab_size <= shape.vocab_size < 2 * tokenizer.vocab_size:
        raise InteropError(
            f"{name} is not the tokenizer of this model: it has {tokenizer.vocab_size} ids, "
            f"{config} has vocab_size {shape.vocab_size}"
        )
    if file is None:
        return
    for what, given, accepted in (
        ("begin-of-document id", tokenizer.bos_id, () if shape.bos_id is None else (shape.bos_id,)),
        ("end-of-document id", tokenizer.eos_id, shape.eos_ids),
    ):
        if accepted and given not in accepted:
            raise InteropError(
                f"{name} is not the tokenizer of this model: its {what} is {given}, {config} has "
                f"{', '.join(map(str, accepted))}"
            )


def _settings(
    imported: ImportedModel,
    tokenizer: Tokenizer,
    folder: Path,
) -> RunSettings:
    shape = imported.shape
    plain = TrainingSettings()
    kind = SentencePieceSettings if tokenizer.name == "sentencepiece" else HuggingFaceSettings
    saved = str(folder / "tokenizer" / tokenizer.file)
    choice = kind(model=saved, vocab_size=max(264, tokenizer.vocab_size))
    # The training data of an imported model are unknown; only its length and sizes are recorded.
    targets = min(plain.validation.targets, shape.train_length)
    steps = 1000 * plain.batch_size * shape.train_length
    return RunSettings(
        train_length=shape.train_length,
        original_length=shape.original_length,
        model=shape.model,
        data=DataSettings.model_validate(
            {"tokenizer": choice, "bos": tokenizer.add_bos, "eos": tokenizer.eos_id is not None}
        ),
        training=TrainingSettings(
            tokens=max(plain.tokens, steps), validation=ValidationSettings(targets=targets)
        ),
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process imports the same checkpoint."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock"), wait=True):
        yield
