"""Open prepared text for an evaluation: the text to read, and the text the model was trained on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data import DataError, Tokenizer, TokenStore, open_prepared
from data.files import read_object
from data.sources import GENERATED, open_text
from data.tasks import HaystackTask, is_for
from errors import EvaluationError
from evaluation.evaluated_model import EvaluatedRun
from evaluation.evaluation_settings import TextSettings


@dataclass(frozen=True)
class EvaluationStores:
    """The text to read, and the text of all trainings that led to a checkpoint.

    `train`: text of the run's own training; `earlier`: of its parent runs, without `train`; None
    for one that no longer exists. `overlaps`: folder that caches passages shared with `train`, for
    all runs on it.
    """

    read: TokenStore
    name: str
    train: TokenStore | None
    earlier: tuple[TokenStore | None, ...]
    overlaps: Path | None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        split: str,
        tokenizer: Tokenizer,
        own: str | None,
        earlier: Sequence[str | None] = (),
    ) -> "EvaluationStores":
        """Open `split` ("train", "valid") of the prepared `folder`; `own`, `earlier`: folders
        trained on.

        Raises EvaluationError for a folder that is no prepared corpus or has another tokenizer, and
        for a shard that does not match its hash.
        """
        try:
            prepared = open_prepared(folder)
        except DataError as error:
            raise EvaluationError(
                f"{error}; or evaluate on another prepared corpus with store=FOLDER"
            ) from error
        made_with = prepared.tokenizer.hash
        wanted = tokenizer.hash
        if made_with != wanted:
            raise EvaluationError(
                f"{folder} was prepared with another tokenizer ({made_with[:12]}) than this run's "
                f"({wanted[:12]}); prepare it with the run's tokenizer"
            )
        store = prepared.valid if split == "valid" else prepared.train
        store.verify()  # an altered shard would give plausible but wrong numbers
        train = _trained_on(own)
        others = {other: _trained_on(other) for other in earlier if other is None or other != own}
        overlaps = None if train is None else train.folder.parent / "overlaps"
        return cls(
            store,
            f"{Path(folder).name}/{split}",
            train,
            tuple(others.values()),
            overlaps,
        )


def _trained_on(folder: str | None) -> TokenStore | None:
    """The training text of a prepared folder; None if it no longer exists."""
    try:
        return None if folder is None else open_prepared(folder).train
    except DataError:
        return None


def open_stores(settings: TextSettings, runs: Sequence[EvaluatedRun]) -> EvaluationStores:
    """The text that an evaluation of the first run reads, and all text that the runs and their
    ancestors were trained on."""
    first = runs[0]
    folder = settings.store or first.data
    if folder is None:
        raise EvaluationError(f"{first.folder} does not name its training data; set store=DIR")
    manifests = []
    for run in runs:
        manifests += [run.run.manifest, *(run.run.manifest.get("lineage") or [])]
    earlier = [manifest.get("data") for manifest in manifests[1:]]
    for manifest in manifests:
        earlier += manifest.get("mixture") or ()
    groups = [Path(manifest["groups"]) for manifest in manifests if manifest.get("groups")]
    for file in groups:
        earlier += read_object(file)["folders"] if file.is_file() else []
    return EvaluationStores.open(
        folder,
        settings.split,
        first.tokenizer,
        first.data,
        earlier,
    )


def haystacks(
    task: HaystackTask, folder: str | Path | None
) -> tuple[Callable[[], Iterator[tuple[str, str]]], str]:
    """Held-out haystack texts as (name, text), and a label of their source: the validation text of
    the prepared `folder`, or the task's own haystack if it is None."""
    if folder is not None:
        prepared = open_prepared(folder)
        store = prepared.valid
        tokenizer = prepared.tokenizer
        store.verify()
        kept = [i for i, name in enumerate(store.names) if not name.startswith(GENERATED)]

        def texts() -> Iterator[tuple[str, str]]:
            return ((store.names[i], tokenizer.decode(store.document(i).tolist())) for i in kept)

        return texts, f"{Path(folder).name}/valid"
    source = open_text(task.haystack, "task.haystack")
    held = (d for d in source.documents() if d.fault is None and is_for(d.name, "evaluation"))
    return lambda: (
        (d.name, d.text) for d in held
    ), f"{source.label}, documents held out from training"
