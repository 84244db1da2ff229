"""Prepared text as an evaluation opens it: what is read, and what the model has been trained on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data import DataError, Store, Tokenizer, open_prepared
from data.sources import GENERATED, open_text
from data.tasks.haystack import belongs
from data.tasks.settings import Hidden
from evaluation.errors import EvaluationError


@dataclass(frozen=True)
class Stores:
    """The text that is read and that of all trainings behind a checkpoint.

    `train`: of the run's own training; `earlier`: of those it goes on from, without `train` again; None where
    one is gone. `overlaps`: folder in which passages shared with `train` are kept, for all runs on it.
    """

    read: Store
    name: str
    train: Store | None
    earlier: tuple[Store | None, ...]
    overlaps: Path | None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        split: str,
        tokenizer: Tokenizer,
        own: str | None,
        earlier: Sequence[str | None] = (),
    ) -> "Stores":
        """Open `split` ("train", "valid") of the prepared `folder`; `own`, `earlier`: folders trained on.

        Raises EvaluationError where the folder is none, was made with another tokenizer, or a shard is not
        what its hash says.
        """
        try:
            prepared = open_prepared(folder)
        except DataError as error:
            raise EvaluationError(
                f"{error}; or evaluate on another prepared corpus with store=FOLDER"
            ) from error
        made_with, wanted = prepared.tokenizer.hash, tokenizer.hash
        if made_with != wanted:
            raise EvaluationError(
                f"{folder} was prepared with another tokenizer ({made_with[:12]}) than this run's "
                f"({wanted[:12]}): its tokens mean other text; prepare it with the run's tokenizer"
            )
        store = prepared.valid if split == "valid" else prepared.train
        store.verify()  # an altered shard would give numbers that look right
        train = _trained_on(own)
        others = {one: _trained_on(one) for one in earlier if one is None or one != own}
        overlaps = None if train is None else train.folder.parent / "overlaps"
        return cls(store, f"{Path(folder).name}/{split}", train, tuple(others.values()), overlaps)


def _trained_on(folder: str | None) -> Store | None:
    """The training text of a prepared folder; None where it is gone."""
    try:
        return None if folder is None else open_prepared(folder).train
    except DataError:
        return None


def haystacks(task: Hidden, folder: str | Path | None) -> tuple[Callable[[], Iterator[tuple[str, str]]], str]:
    """Texts that no training has seen, to hide something in, as (name, text), and where they come from:
    held-out text of the prepared `folder`, or, where it is None, the task's own haystack."""
    if folder is not None:
        prepared = open_prepared(folder)
        store, tokenizer = prepared.valid, prepared.tokenizer
        store.verify()
        kept = [i for i, name in enumerate(store.names) if not name.startswith(GENERATED)]

        def texts() -> Iterator[tuple[str, str]]:
            return ((store.names[i], tokenizer.decode(store.document(i).tolist())) for i in kept)

        return texts, f"{Path(folder).name}/valid"
    source = open_text(task.haystack, "task.haystack")
    held = (d for d in source.documents() if d.fault is None and belongs(d.name, "evaluation"))
    return lambda: ((d.name, d.text) for d in held), f"{source.label}, documents kept from training"
