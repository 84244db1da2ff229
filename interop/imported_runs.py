"""Foreign checkpoints as run directories, so that every command that accepts a run also accepts a
foreign checkpoint.

`hf:FOLDER` names a Hugging Face folder, `hf:NAME` a model of the hub.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data.data_settings import DataSettings
from data.files import locked, sha256_of
from data.tokenizers import Tokenizer, load_folder_tokenizer, load_tokenizer_file
from data.tokenizers.tokenizer_settings import HuggingFaceSettings, SentencePieceSettings
from errors import InteropError
from interop.build import ImportedModel, build_model
from interop.checkpoint import ForeignCheckpoint, read_folder
from interop.huggingface.hub import download
from interop.new_folder import check_new, new_folder, space_for
from run_directory.checkpoints import save_weights
from run_directory.console import Console
from run_directory.run import Run, is_run
from run_directory.run_settings import RunSettings
from run_directory.training_settings import TrainingSettings, ValidationSettings
from settings.load import setting_before_validation

PREFIX = "hf:"
IMPORTED = Path("runs/imported")
FORMAT = 1  # part of the names of imported runs; raise it when the conversion changes


def is_foreign(argument: object) -> bool:
    """Whether an argument names a foreign checkpoint rather than a run directory."""
    return isinstance(argument, str) and argument.startswith(PREFIX)


def find_foreign_checkpoint(argument: str) -> ForeignCheckpoint:
    """The checkpoint that `hf:...` names. Raises InteropError if it does not exist."""
    if not is_foreign(argument):
        raise InteropError(f"{argument} must begin with {PREFIX}")
    name = argument.removeprefix(PREFIX)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return read_folder(folder)
    return read_folder(download(name), name.replace("/", "-"))


def imported_folder(checkpoint: ForeignCheckpoint) -> Path:
    """The run directory of an imported checkpoint; its name changes if a file of the checkpoint
    changes."""
    folder = Path(checkpoint.config_file).parent
    about = [
        (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(folder.iterdir())
        if file.is_file()
    ]
    digest = sha256_of(json.dumps([FORMAT, about]))[:10]
    name = re.sub(r"[^\w.+-]", "-", checkpoint.name)
    return IMPORTED / f"{name}-{digest}"


def run_of(argument: str | Path) -> Path:
    """The run directory that an argument names. A foreign checkpoint is imported first, unless it
    was imported before.

    Raises:
        InteropError, DataError: the checkpoint or tokenizer cannot be imported.
    """
    if not is_foreign(argument):
        return Path(argument)
    checkpoint = find_foreign_checkpoint(str(argument))
    folder = imported_folder(checkpoint)
    with _alone(folder):  # several processes may receive the same checkpoint
        if not is_run(folder):
            write_run(checkpoint, folder)
            Console().info(f"{checkpoint.name!r} is imported into {folder}, with its results")
    return folder


def with_imported_parent(overrides: Sequence[str]) -> list[str]:
    """The files and overrides of train.py, with the run directory of a foreign `parent.run`."""
    parent = setting_before_validation(list(overrides), "parent")
    argument = parent.get("run") if isinstance(parent, dict) else None
    if not is_foreign(argument):
        return list(overrides)
    return [*overrides, f"parent.run={run_of(str(argument))}"]


def write_run(
    checkpoint: ForeignCheckpoint, folder: Path, tokenizer_file: Path | None = None
) -> ImportedModel:
    """Convert a checkpoint to a run directory, which appears only when it is complete.

    Args:
        tokenizer_file: tokenizer.json or tokenizer.model, for a checkpoint without one.

    Raises:
        InteropError: the folder is already a run, or the checkpoint cannot be imported.
        DataError: the tokenizer cannot be read.
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
    """Check that the embedding has a row for every id, and that a tokenizer given separately has
    the BOS and EOS ids of `config`."""
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
