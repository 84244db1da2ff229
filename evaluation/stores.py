"""Open prepared text for an evaluation: the text to read and the training text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data import DataError, TokenStore, open_prepared
from data.sources import open_text
from data.tasks import HaystackTask
from data.tokenizers import saved_settings
from errors import EvaluationError
from evaluation.evaluated_model import EvaluatedRun
from evaluation.evaluation_settings import TextSettings


@dataclass(frozen=True)
class EvaluationStores:
    """The text to read, and the text of all training runs that led to a checkpoint.

    Attributes:
        train: text of the run's own training; None if it is unknown or no longer exists.
        earlier: text of parent runs and of other runs, without `train`.
        unknown: a sentence that names missing training text and the reason; '' if none is missing.
        overlaps: folder that caches passages shared with `train`, for all runs trained on it.
    """

    read: TokenStore
    name: str = ""
    train: TokenStore | None = None
    earlier: Sequence[TokenStore] = ()
    unknown: str = ""
    overlaps: Path | None = None

    @property
    def trained(self) -> list[TokenStore]:
        """All known training text."""
        return [*([] if self.train is None else [self.train]), *self.earlier]


def open_stores(settings: TextSettings, runs: Sequence[EvaluatedRun]) -> EvaluationStores:
    """The text that an evaluation of the first run reads, and all text that the runs and their
    ancestors were trained on.

    Raises EvaluationError if a folder is not a prepared corpus or has another tokenizer, or if a
    shard does not match its hash.
    """
    first = runs[0]
    folder = settings.store or first.data
    if folder is None and first.model.settings.data.is_generated:
        raise EvaluationError(
            f"{first.folder} was trained on items of a task and has no text: set protocol=tasks"
        )
    if folder is None:
        raise EvaluationError(
            f"{first.folder} was imported without text: prepare some with its tokenizer, python "
            "scripts/prepare.py configs/data/folder.yaml data.source.path=TEXTS "
            f"'data.tokenizer={_tokenizer_setting(first)}', and set store to the folder it prints"
        )
    store = _evaluated_store(folder, settings.split, first)
    trained = {}
    unknown = []
    for data in dict.fromkeys(_training_folders(runs)):
        if data is None:
            unknown.append("the text of an imported model is not known")
            continue
        try:
            trained[data] = open_prepared(data).train
        except DataError:
            unknown.append(f"{data} no longer exists")
    train = trained.pop(first.data, None)
    sentence = f"Not compared with all of the training text: {', '.join(unknown)}."
    return EvaluationStores(
        read=store,
        name=f"{Path(folder).name}/{settings.split}",
        train=train,
        earlier=list(trained.values()),
        unknown=sentence if unknown else "",
        overlaps=None if train is None else train.folder.parent / "overlaps",
    )


def _training_folders(runs: Sequence[EvaluatedRun]) -> Iterator[str | None]:
    """Prepared folders that the runs and their ancestors were trained on, the first run's folder
    first; None for an imported model."""
    manifests = []
    for run in runs:
        manifests += [run.run.manifest, *(run.run.manifest.get("lineage") or [])]
    for manifest in manifests:
        yield manifest.get("data")
    for manifest in manifests:
        yield from manifest.get("mixture") or ()


def _tokenizer_setting(run: EvaluatedRun) -> str:
    """The setting of data.tokenizer that selects the tokenizer of a run."""
    settings = saved_settings(run.folder / "tokenizer")
    model = getattr(settings, "model", None)
    return f"{{name: {settings.name}{f', model: {model}' if model else ''}}}"


def _evaluated_store(folder: str | Path, split: str, run: EvaluatedRun) -> TokenStore:
    try:
        prepared = open_prepared(folder)
    except DataError as error:
        raise EvaluationError(
            f"{error}; or evaluate on another prepared corpus with store=FOLDER"
        ) from error
    made_with = prepared.tokenizer.hash
    expected = run.tokenizer.hash
    if made_with != expected:
        raise EvaluationError(
            f"{folder} was prepared with another tokenizer ({made_with[:12]}) than this run's "
            f"({expected[:12]}); prepare it with the run's tokenizer"
        )
    store = prepared.valid if split == "valid" else prepared.train
    if not store.n_documents:
        raise EvaluationError(
            f"{folder} has no documents in split={split}; set the other split, or another store"
        )
    store.verify()  # an altered shard would give plausible but wrong numbers
    return store


def haystacks(
    task: HaystackTask, folder: str | Path | None
) -> tuple[Callable[[], Iterator[tuple[str, str]]], str]:
    """Held-out haystack texts as (name, text), and a label of their source: the validation text of
    the prepared `folder`, or the task's own haystack if `folder` is None."""
    if folder is not None:
        prepared = open_prepared(folder)
        store = prepared.valid
        tokenizer = prepared.tokenizer
        store.verify()

        def texts() -> Iterator[tuple[str, str]]:
            for i, name in enumerate(store.names):
                yield name, tokenizer.decode(store.document(i).tolist())

        return texts, f"{Path(folder).name}/valid"
    source = open_text(task.haystack, "task.haystack")
    held_out = partial(source.haystacks, "evaluation")
    return held_out, f"{source.label}, documents held out from training"
