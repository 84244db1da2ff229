"""Prepare token shards: read, split, train the tokenizer, tokenize in parallel, write the manifests.

Each step writes its result atomically before the next begins, so an interrupted preparation resumes where it
stopped. The result does not depend on interruptions or on the number of workers. The folder name contains a
hash of all settings and of the source's file listing, so different settings use different folders.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.console import NullConsole
from data.errors import DataError
from data.files import canonical, locked, read_json, save_array, write_json
from data.preparation.duplicates import save_index, shingles
from data.preparation.pool import run_chunks
from data.preparation.presence import FIRST, VALID, check_texts
from data.preparation.spool import Spool, fill
from data.preparation.summary import POINTS_ONLY_BELOW, report_few_held_out, show, split_summary
from data.preparation.tokenizer_training import train_sentencepiece
from data.settings import DataSettings, SentencePieceSettings, SourceSettings
from data.sources import Source, open_source
from data.sources.prepared import finished_folder
from data.store import FORMAT, TokenStore, hint, token_dtype, write_manifest
from data.text_settings import PreparedSource
from data.tokenizer import ByteTokenizer, Tokenizer, load_sentencepiece, load_tokenizer

# Settings that change the use or the location of prepared text, but not its content.
USE = {"root", "label", "packing", "positions", "mixture"}
BESIDE = USE | {"group_bytes"}  # the remaining text is in separate folders
PIECE = 64 << 10  # characters per sampled piece of the tokenizer's training text
MOST_HELD_OUT = 3  # beyond valid_fraction, at most one document in this many is held out


@dataclass(frozen=True)
class PreparedData:
    """A finished preparation. `summary` has the data of the printed tables; `others` are further texts of a
    mixture.
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
        return hashes[0] if len(hashes) == 1 else hashlib.sha256(canonical(hashes)).hexdigest()

    @property
    def longest(self) -> int:
        """Tokens in the longest training document."""
        return max(int(text.train.lengths.max(initial=0)) for text in self.texts)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder / "tokenizer")

    @cached_property
    def train(self) -> TokenStore:
        return TokenStore(self.folder / "train")

    @cached_property
    def valid(self) -> TokenStore:
        return TokenStore(self.folder / "valid")


def open_prepared(folder: Path | str, others: Sequence[Path | str] = ()) -> PreparedData:
    """Open the folder that `prepare` wrote, with further texts of a mixture. Checks that shards exist and
    have the expected size.
    """
    return mix(_open(Path(folder)), [_open(Path(other)) for other in others])


def mix(first: PreparedData, others: Sequence[PreparedData]) -> PreparedData:
    """Combine texts into a mixture. Raises DataError if their tokenizers differ."""
    for other in others:
        if other.tokenizer.hash != first.tokenizer.hash:
            raise DataError(
                f"{other.folder} cannot be mixed with {first.folder}: it was made with another tokenizer "
                f"({other.tokenizer.hash[:12]}, not {first.tokenizer.hash[:12]}) and its tokens mean other "
                f"text; prepare it with data.tokenizer.model={first.folder / 'tokenizer' / 'tokenizer.model'}"
            )
    return replace(first, others=tuple(others))


def _open(folder: Path) -> PreparedData:
    path = folder / "prepared.json"
    if not path.is_file():
        raise DataError(f"{folder} holds no finished preparation (no prepared.json); run scripts/prepare.py")
    try:
        prepared = PreparedData(folder, read_json(path)["summary"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged; {hint(folder)}") from error
    for store in (prepared.train, prepared.valid):
        if store.manifest["tokenizer"] != prepared.tokenizer.hash:
            raise DataError(
                f"{store.folder} was made with another tokenizer than {folder / 'tokenizer'}; {hint(folder)}"
            )
    return prepared


def prepared_folder(settings: DataSettings, place: str = FIRST) -> Path:
    """The output folder of `prepare(settings)`. `place` is the name of the setting that specifies
    the text.
    """
    sources = [open_source(settings.source, place)]
    if settings.valid_source is not None:
        sources.append(open_source(settings.valid_source, VALID))
    facts = {
        "format": FORMAT,
        "settings": settings.model_dump(exclude=BESIDE | (set() if settings.skip else {"skip"})),
        "sources": [source.fingerprint() for source in sources],
    }
    tokenizer = settings.tokenizer
    if isinstance(tokenizer, SentencePieceSettings) and tokenizer.model is not None:
        facts["model"] = load_sentencepiece(Path(tokenizer.model).expanduser()).hash
    digest = hashlib.sha256(canonical(facts)).hexdigest()[:10]
    return Path(settings.root).expanduser() / f"{settings.label or sources[0].label}-{digest}"


def prepare(settings: DataSettings, console: Any = None, workers: int | None = None) -> PreparedData:
    """Prepare texts and tokenizer, or open the result of an earlier call. For text in groups, prepare the
    first group.

    Args:
        workers: number of tokenizing processes; None: one per core.

    Raises:
        DataError: the text, the tokenizer or the folder needs a fix by the user.
        OSError: the disk is full or read-only.
    """
    console = console or NullConsole()
    most = [n for n in (settings.group_bytes, settings.max_bytes) if n is not None]
    begun = settings.model_copy(update={"max_bytes": min(most, default=None), "group_bytes": None})
    if not (prepared_folder(begun) / "prepared.json").is_file():
        check_texts(settings)
    first, others = prepare_one(begun, console, workers), []
    report_few_held_out(first.summary, settings.valid_source is None, console)
    for i, mixed in enumerate(settings.mixture):
        if mixed.prepared is not None:
            others.append(open_prepared(finished_folder(mixed.prepared, f"data.mixture.{i}.prepared")))
        elif mixed.source is not None:
            asked = beside(settings, first, mixed.source, mixed.max_bytes)
            others.append(prepare_one(asked, console, workers, f"data.mixture.{i}.source"))
    return mix(first, others)


def beside(
    settings: DataSettings, first: PreparedData, source: SourceSettings, max_bytes: int | None
) -> DataSettings:
    """Settings to prepare a further text. All of it is training text, except copies of the first text's
    validation text.
    """
    model = first.folder / "tokenizer" / "tokenizer.model"
    held = PreparedSource(path=str(first.folder), split="valid") if first.valid.n_documents else None
    is_trained = isinstance(settings.tokenizer, SentencePieceSettings)
    more = {
        "source": source,
        "max_bytes": max_bytes,
        "valid_source": held,
        "valid_fraction": 0.0,
        "tokenizer": SentencePieceSettings(model=str(model)) if is_trained else settings.tokenizer,
        "label": None,
        "mixture": [],
        "group_bytes": None,
    }
    return settings.model_copy(update=more)


def prepare_one(
    settings: DataSettings, console: Any, workers: int | None, place: str = FIRST
) -> PreparedData:
    """Prepare one text or open it. `place` is the name of the setting that specifies it."""
    folder = prepared_folder(settings, place)
    if not (folder / "prepared.json").is_file():
        with _alone(folder, console):
            if not (folder / "prepared.json").is_file():  # another process may have finished it meanwhile
                console.info(f"preparing {folder}")
                summary = _make(settings, folder, console, workers, place)
                # A further text has the validation text of the first one, which was already printed.
                show(summary, console, splits=("train", "valid") if place == FIRST else ("train",))
    shutil.rmtree(folder / "work", ignore_errors=True)  # left if an earlier process crashed at this point
    return _open(folder)


@contextmanager
def _alone(folder: Path, console: Any) -> Iterator[None]:
    """Lock a folder for one preparing process at a time. The lock is released when its process ends, for any
    reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        ours = locked(lock)
        if ours is False:
            console.info(f"waiting for another process that prepares {folder}")
            locked(lock, wait=True)
        elif ours is None:
            console.warn(f"{folder} lies on a disk without locks: let no other process prepare it now")
        if ours is not None:  # left by killed processes; no other process writes here now
            for draft in folder.rglob(".*.tmp"):
                draft.unlink(missing_ok=True)
        yield


def _make(
    settings: DataSettings, folder: Path, console: Any, workers: int | None, place: str
) -> dict[str, Any]:
    work = folder / "work"
    spools = _read(settings, work, console, place)
    masks = _split(settings, spools)
    tokenizer, training = _tokenizer(settings, folder, spools, masks, console)
    _check_symbols(settings, tokenizer)
    for name, mask in masks.items():
        save_array(work / f"{name}.valid.npy", mask)
        save_array(work / f"{name}.first.npy", spools[name].first)
    if settings.duplicate_threshold <= 1:
        # Task items differ by construction, and their context is not validation text.
        kept = {name: masks[name] & ~spool.generated for name, spool in spools.items()}
        sets = [shingles(text) for name, spool in spools.items() for _, text in spool.texts(kept[name])]
        save_index(work / "shingles", sets)
    job = {"bos": settings.bos, "eos": settings.eos, "duplicate_threshold": settings.duplicate_threshold}
    write_json(work / "job.json", job)

    tasks = [(name, number) for name, spool in spools.items() for number in range(spool.n_chunks)]
    done = {task for task in tasks if _is_done(folder, *task)}
    if done:
        console.info(f"{len(done)} of {len(tasks)} shards are already tokenised")
    run_chunks(folder, [task for task in tasks if task not in done], workers, console)
    return _seal(settings, folder, spools, masks, tasks, tokenizer, training)


def _read(settings: DataSettings, work: Path, console: Any, place: str) -> dict[str, Spool]:
    sources: dict[str, tuple[Source, int | None]] = {
        "text": (open_source(settings.source, place), settings.max_bytes)
    }
    if settings.valid_source is not None:
        sources["held"] = (open_source(settings.valid_source, VALID), None)
    for name, (source, most) in sources.items():
        console.info(f"reading {source.label}")
        fill(
            work / name,
            source,
            shard_bytes=settings.shard_bytes,
            seed=settings.valid_seed,
            max_bytes=most,
            console=console,
            skip=(settings.skip or 0) if name == "text" else 0,
        )
    return {name: Spool(work / name) for name in sources}


def _split(settings: DataSettings, spools: dict[str, Spool]) -> dict[str, np.ndarray]:
    """Choose the validation documents: one boolean per document."""
    keys = spools["text"].keys
    mask = np.zeros(len(keys), dtype=bool)
    if settings.valid_source is not None:
        return {"text": mask, "held": np.ones(len(spools["held"].keys), dtype=bool)}
    if 0 < settings.valid_fraction < 1:
        if len(keys) < 2:
            raise DataError(
                "the source holds a single document, so none can be held out for validation: cut it with "
                "data.source.separator, give data.valid_source, or set data.valid_fraction to 0 or 1"
            )
        least = POINTS_ONLY_BELOW if len(keys) >= MOST_HELD_OUT * POINTS_ONLY_BELOW else 1
        count = min(max(least, round(settings.valid_fraction * len(keys))), len(keys) - 1)
        mask[np.argsort(keys, kind="stable")[:count]] = True
    elif settings.valid_fraction == 1:
        mask[:] = True
    return {"text": mask}


def _tokenizer(
    settings: DataSettings, folder: Path, spools: dict[str, Spool], masks: dict[str, np.ndarray], console: Any
) -> tuple[Tokenizer, dict[str, Any]]:
    """Train or load the tokenizer and save it in `folder`. Returns it and statistics of its training."""
    place, card = folder / "tokenizer", folder / "work" / "tokenizer.json"
    if card.is_file():
        return load_tokenizer(place), read_json(card)
    wanted, training = settings.tokenizer, {}
    if not isinstance(wanted, SentencePieceSettings):
        tokenizer: Tokenizer = ByteTokenizer()
    elif wanted.model is not None:
        tokenizer = load_sentencepiece(Path(wanted.model).expanduser())
    else:
        spool, chosen = spools["text"], ~masks["text"]
        available = int(spool.bytes[chosen].sum())
        if not available:
            raise DataError(
                "there is no training text to train a tokenizer on (data.valid_fraction is 1): name the "
                "tokenizer of a run with data.tokenizer.model=PATH or use data.tokenizer.name=bytes"
            )
        console.info(
            f"training a {wanted.kind} tokenizer of {wanted.vocab_size:,} ids on "
            f"{min(available, wanted.train_bytes) / 1e6:,.1f} MB of {available / 1e6:,.1f} MB"
        )
        tokenizer, used = train_sentencepiece(wanted, _sample(spool, chosen, available, wanted.train_bytes))
        training = {"bytes_used": used, "unused_share": 1 - used / available}
    tokenizer.save(place)
    write_json(card, training)
    return tokenizer, training


def _sample(spool: Spool, chosen: np.ndarray, available: int, most: int) -> Iterator[str]:
    """Yield pieces spread evenly over the training text, at most `most` bytes in total."""
    share, due, used = min(1.0, most / available), 0.0, 0
    for _, text in spool.texts(chosen):
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            size = len(piece.encode())
            due += share * size  # bytes that should have been sampled so far
            if share == 1.0 or (used + size / 2 <= due and used + size <= most):
                used += size
                yield piece


def _check_symbols(settings: DataSettings, tokenizer: Tokenizer) -> None:
    for key, symbol in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
        if getattr(settings, key) and symbol is None:
            raise DataError(
                f"data.{key} is true, but the tokenizer has no {key} symbol: set data.{key}=false"
            )


def _result(folder: Path, spool: str, number: int) -> Path:
    return folder / "work" / "done" / f"{spool}-{number:05d}.json"


def _is_done(folder: Path, spool: str, number: int) -> bool:
    path = _result(folder, spool, number)
    if not path.is_file():
        return False
    for split, shard in read_json(path)["shards"].items():
        for name, facts in shard["files"].items() if shard else ():
            file = folder / split / name
            if not file.is_file() or file.stat().st_size != facts["bytes"]:
                return False
    return True


def _seal(
    settings: DataSettings,
    folder: Path,
    spools: dict[str, Spool],
    masks: dict[str, np.ndarray],
    tasks: list[tuple[str, int]],
    tokenizer: Tokenizer,
    training: dict[str, Any],
) -> dict[str, Any]:
    results = [read_json(_result(folder, *task)) for task in tasks]
    for split in ("train", "valid"):
        write_manifest(
            folder / split,
            token_dtype(tokenizer.vocab_size),
            [result["shards"][split] for result in results if result["shards"][split]],
            tokenizer=tokenizer.hash,
            has_bos=settings.bos,
            has_eos=settings.eos,
            source=(
                settings.source if split == "train" else settings.valid_source or settings.source
            ).model_dump(),
        )
    faults: Counter[str] = sum((Counter(spool.faults) for spool in spools.values()), Counter())
    summary = {
        "label": folder.name,
        **{split: split_summary(TokenStore(folder / split)) for split in ("train", "valid")},
        "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size, **training},
        "passed_over": dict(faults),
        "examples": {fault: name for spool in spools.values() for fault, name in spool.examples.items()},
        "read": spools["text"].read,
        "ended": spools["text"].ended,
        "bytes_read": int(spools["text"].bytes.sum()),
        "lossy_documents": sum(result["lossy"] for result in results),
        "near_duplicates": _duplicates(settings, folder, spools, masks, tasks, results),
    }
    write_json(folder / "prepared.json", {"settings": settings.model_dump(), "summary": summary})
    return summary


def _duplicates(settings, folder, spools, masks, tasks, results) -> dict[str, Any]:
    """Statistics of the text excluded from training, and the fraction of validation shingles that remain in
    it.
    """
    if settings.duplicate_threshold > 1:
        return {"documents": None, "share_of_bytes": None, "shingles_remaining": None}
    candidates = sum(int(spool.bytes[~masks[name]].sum()) for name, spool in spools.items())
    valid = np.unique(np.load(folder / "work" / "shingles" / "hashes.npy"))
    hits = [np.load(_result(folder, *task).with_suffix(".hits.npy")) for task in tasks]
    remaining = len(np.unique(np.concatenate(hits)))
    return {
        "documents": sum(result["copies"] for result in results),
        "share_of_bytes": sum(result["copied_bytes"] for result in results) / candidates
        if candidates
        else 0.0,
        "shingles_remaining": remaining / len(valid) if len(valid) else 0.0,
    }
