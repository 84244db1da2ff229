"""Finished preparations, the names of their folders, and the inputs that they require."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from data.data_settings import DataSettings, MixtureEntry, SourceSettings, TaskSource
from data.files import canonical_hash, damage_reported, read_json
from data.sources import open_source
from data.store import FORMAT, TokenStore, hint
from data.task_data import GeneratedData, generated
from data.text_settings import PreparedSource
from data.tokenizers import Tokenizer, given_tokenizer, load_tokenizer, saved_settings
from data.tokenizers.tokenizer_settings import HuggingFaceSettings, SentencePieceSettings
from errors import DataError

# the settings that specify text, for messages
FIRST = "data.source"
VALID = "data.valid_source"
OPENING = 16  # first tokens of a held-out document, which contain the default prompt of samples
# Settings that change the use or the location of prepared text, but not its content.
USE = {"root", "label", "packing", "positions", "mixture"}


@dataclass(frozen=True)
class PreparedData:
    """A finished preparation. `summary` has the data of the printed tables; `others` are further
    texts of a mixture.
    """

    folder: Path
    summary: dict[str, Any]
    others: tuple["PreparedData", ...] = ()

    @property
    def texts(self) -> tuple["PreparedData", ...]:
        """All training texts. The first one provides the validation text and the tokenizer."""
        return (self, *self.others)

    @property
    def hash(self) -> str:
        """Hash of all training text."""
        hashes = [text.train.hash for text in self.texts]
        return hashes[0] if len(hashes) == 1 else canonical_hash(hashes)

    @property
    def valid_hash(self) -> str:
        return self.valid.hash

    @property
    def longest(self) -> int:
        """Tokens in the longest training document."""
        return max(int(text.train.lengths.max(initial=0)) for text in self.texts)

    def facts(self) -> dict[str, Any]:
        """What the manifest of a run records about its data."""
        facts: dict[str, Any] = {
            "data": str(self.folder),
            "data_hash": self.hash,
            "valid_hash": self.valid_hash,
        }
        if self.others:
            facts["mixture"] = [str(text.folder) for text in self.others]
        return facts

    def verify(self) -> None:
        """Compare all text with its hashes and with the size of the vocabulary. Raises
        DataError."""
        for store in (self.valid, *(text.train for text in self.texts)):
            store.verify(self.tokenizer.vocab_size)

    def opening(self) -> str:
        """The first whole words of a held-out document, up to the end of its first line."""
        begin = int(self.valid.has_bos)
        ids = self.valid.document(0)[begin : begin + OPENING]
        text = self.tokenizer.decode(ids.tolist()).strip()
        line = text.splitlines()[0] if text else ""
        return (line.rsplit(None, 1)[0] if " " in line else line).rstrip("\ufffd")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder / "tokenizer")

    @cached_property
    def train(self) -> TokenStore:
        return TokenStore(self.folder / "train")

    @cached_property
    def valid(self) -> TokenStore:
        return TokenStore(self.folder / "valid")


RunData = PreparedData | GeneratedData


def open_prepared(folder: Path | str, others: Sequence[Path | str] = ()) -> PreparedData:
    """Open the folder that `prepare` wrote, with further texts of a mixture. Checks that shards
    exist and have the expected size.
    """
    return replace(_open(Path(folder)), others=tuple(_open(Path(other)) for other in others))


def _open(folder: Path) -> PreparedData:
    path = folder / "prepared.json"
    if not is_finished(folder):
        raise DataError(
            f"{folder} has no finished preparation (no prepared.json); run scripts/prepare.py"
        )
    with damage_reported(path, hint(folder)):
        prepared = PreparedData(folder, read_json(path)["summary"])
    for store in (prepared.train, prepared.valid):
        if store.manifest["tokenizer"] != prepared.tokenizer.hash:
            raise DataError(
                f"{store.folder} and {folder / 'tokenizer'} do not match; {hint(folder)}"
            )
    return prepared


def prepared_folder(settings: DataSettings, place: str = FIRST) -> Path:
    """The output folder of `prepare(settings)`. `place` is the name of the setting that specifies
    the text.

    If the text is missing, as on another machine, returns the finished folder in `data.root` that
    was prepared with these settings. Raises DataError if there is no such folder, or more than one.
    """
    sources = [open_source(settings.text_source, place)]
    if settings.valid_source is not None:
        sources.append(open_source(settings.valid_source, VALID))
    facts = {"format": FORMAT, "settings": settings.model_dump(exclude=USE)}
    try:
        facts["sources"] = [source.fingerprint() for source in sources]
        if getattr(settings.tokenizer, "model", None) is not None:
            given = given_tokenizer(settings.tokenizer)
            assert given is not None
            facts["model"] = given.hash
    except DataError:
        folders = _folders_prepared_with(settings)
        if len(folders) != 1:
            raise
        return folders[0]
    label = settings.label or sources[0].label
    return Path(settings.root).expanduser() / f"{label}-{canonical_hash(facts)[:10]}"


def _folders_prepared_with(settings: DataSettings) -> list[Path]:
    """The finished folders in `data.root` whose recorded settings equal these."""
    wanted = _content_of(settings.model_dump(mode="json"))
    folders = []
    for file in sorted(Path(settings.root).expanduser().glob("*/prepared.json")):
        with damage_reported(file, hint(file.parent)):
            recorded = read_json(file)["settings"]
        if _content_of(recorded) == wanted:
            folders.append(file.parent)
    return folders


def _content_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that determine the content of a prepared folder, without `split_bytes`, which is
    also recorded if it was chosen automatically. Paths of a mixture's first text are relative to
    `data.root`."""
    content = {key: value for key, value in settings.items() if key not in USE}
    content["source"] = {**settings["source"], "split_bytes": None}
    root = str(Path(settings["root"]).expanduser())
    for part, key in (("tokenizer", "model"), ("valid_source", "path")):
        path = (content[part] or {}).get(key)
        if isinstance(path, str):
            content[part] = {**content[part], key: path.removeprefix(root)}
    return content


def is_prepared(settings: DataSettings) -> bool:
    """Whether `prepare(settings)` finds its result on the disk."""
    if generated(settings):
        return True
    folder = prepared_folder(settings)
    if not is_finished(folder):
        return False
    first = open_prepared(folder)
    return all(is_finished(prepared_folder(*other)) for other in other_texts(settings, first))


def is_finished(folder: Path) -> bool:
    """Whether the preparation of this folder has finished."""
    return (folder / "prepared.json").is_file()


def other_texts(settings: DataSettings, first: PreparedData) -> Iterator[tuple[DataSettings, str]]:
    """For each further text of a mixture, the settings to prepare it, and the name of the setting
    that specifies it."""
    for i, entry in enumerate(settings.mixture):
        yield _of_entry(settings, entry, first), f"data.mixture.{i}.source"


def _of_entry(settings: DataSettings, entry: MixtureEntry, first: PreparedData) -> DataSettings:
    """Settings to prepare a further text of a mixture. All of it is training text, except copies of
    the first text's validation text.
    """
    held_out = None
    if first.valid.n_documents:
        held_out = PreparedSource(path=str(first.folder), split="valid")
    changes = {
        "source": entry.source,
        "max_bytes": entry.max_bytes,
        "valid_source": held_out,
        "valid_fraction": 0.0,
        "tokenizer": saved_settings(first.folder / "tokenizer"),
        "label": None,
        "mixture": [],
    }
    return settings.model_copy(update=changes)


def check_texts(settings: DataSettings) -> None:
    """Check that text, prepared folders and tokenizer models exist on this machine, and that a
    given tokenizer has the symbols that the settings require.

    Raises DataError naming the setting. Reads no text, writes nothing and makes no network request.
    """
    if generated(settings):
        return
    for place, source in _sources(settings):
        open_source(source, place).check()
    given = given_tokenizer(settings.tokenizer)  # trained tokenizers have both symbols
    for key in ("bos", "eos"):
        if given is not None and getattr(settings, key) and getattr(given, f"{key}_id") is None:
            raise DataError(
                f"data.{key} is true, but the tokenizer has no {key} symbol; set data.{key}=false"
            )


def _sources(settings: DataSettings) -> Iterator[tuple[str, SourceSettings]]:
    """The sources by the names of their settings."""
    yield FIRST, settings.text_source
    if settings.valid_source is not None:
        yield VALID, settings.valid_source
    for i, entry in enumerate(settings.mixture):
        yield f"data.mixture.{i}.source", entry.source


def check_items(settings: DataSettings) -> None:
    """Raise DataError if training text has the same task items as the validation text. Items are a
    function of the task's name, the seed and their index."""
    held = settings.valid_source or settings.source
    if not isinstance(held, TaskSource) or not (settings.valid_source or settings.valid_fraction):
        return
    for place, source in _sources(settings):
        if (
            isinstance(source, TaskSource)
            and source is not held
            and (source.task.name, source.seed) == (held.task.name, held.seed)
        ):
            raise DataError(
                f"{place} has the same items as the validation text; set {place}.seed to another "
                f"number than {held.seed}"
            )


def expected_vocabulary(settings: DataSettings) -> int:
    """Vocabulary size of the given tokenizer model, of the tokenizer to be trained, or of bytes.

    Raises DataError if the model does not exist.
    """
    if items := generated(settings):
        return items.tokenizer.vocab_size
    tokenizer = settings.tokenizer
    if (given := given_tokenizer(tokenizer)) is not None:
        return given.vocab_size
    assert isinstance(tokenizer, SentencePieceSettings | HuggingFaceSettings)
    return tokenizer.vocab_size
