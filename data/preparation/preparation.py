"""Prepare token shards: read, split, train the tokenizer, tokenize in parallel, write the
manifests.

Each step writes its result atomically before the next begins, so an interrupted preparation resumes
where it stopped. The result does not depend on interruptions or on the number of workers. The
folder name contains a hash of all settings and of the source's file listing, so different settings
use different folders.
"""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from data.data_settings import DataSettings, SourceSettings, TaskSource
from data.files import locked, read_json, remove_drafts, write_json
from data.preparation.duplicates import ShingleIndex, shingles
from data.preparation.spool import Spool, fill, read_chunk
from data.preparation.summary import (
    POINTS_ONLY_BELOW,
    NullConsole,
    report_few_held_out,
    show,
    split_summary,
)
from data.preparation.tokenizer_training import train_tokenizer
from data.prepared import (
    FIRST,
    VALID,
    PreparedData,
    RunData,
    check_items,
    check_texts,
    is_finished,
    open_prepared,
    other_texts,
    prepared_folder,
)
from data.sources import Source, TaskDocuments, open_source
from data.store import EncodedDocument, TokenStore, token_dtype, write_manifest, write_shard
from data.task_data import generated
from data.text_settings import FilesSource, PreparedSource
from data.tokenizers import Tokenizer, given_tokenizer, load_tokenizer, lossless
from data.tokenizers.tokenizer_settings import HuggingFaceSettings, SentencePieceSettings
from errors import DataError

PIECE = 64 << 10  # characters per sampled piece of the tokenizer's training text
# Beyond valid_fraction, at most one document in three is held out.
ENOUGH = 3 * POINTS_ONLY_BELOW
# Fewer documents than ENOUGH are split into about SPANS spans of at least SPAN bytes.
SPANS = 60
SPAN = 4096

Chunk = tuple[str, int]  # name of the spool, index


def prepare(settings: DataSettings, console: Any = None, workers: int | None = None) -> RunData:
    """Prepare texts and tokenizer, or open the result of an earlier call. Task items on symbols
    need no preparation.

    Args:
        workers: number of tokenizing threads; None: one per core.

    Raises:
        DataError: the text, the tokenizer or the folder needs a fix by the user.
        OSError: the disk is full or read-only.
    """
    if items := generated(settings):
        return items
    console = console or NullConsole()
    check_items(settings)
    if not is_finished(prepared_folder(settings)):
        check_texts(settings)
    first = _prepare_text(settings, console, workers)
    report_few_held_out(first.summary, console)
    others = [
        _prepare_text(text, console, workers, place) for text, place in other_texts(settings, first)
    ]
    return replace(first, others=tuple(others))


def _prepare_text(
    settings: DataSettings,
    console: Any,
    workers: int | None,
    place: str = FIRST,
) -> PreparedData:
    """Prepare one text or open it. `place` is the name of the setting that specifies it."""
    folder = prepared_folder(settings, place)
    if not is_finished(folder):
        with _alone(folder, console):
            if not is_finished(folder):  # another process may have finished it meanwhile
                console.info(f"preparing {folder}")
                summary = _Preparation(settings, folder, console, place).run(workers)
                # Further texts share the validation text of the first one, which was already
                # printed.
                show(summary, console, ("train", "valid") if place == FIRST else ("train",))
    # The folder remains if an earlier process crashed at this point.
    shutil.rmtree(folder / "work", ignore_errors=True)
    return open_prepared(folder)


@contextmanager
def _alone(folder: Path, console: Any) -> Iterator[None]:
    """Lock a folder for one preparing process at a time. The lock is released when its process
    ends, for any reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if not stack.enter_context(locked(folder / ".lock")):
            console.info(f"waiting for another process that prepares {folder}")
            stack.enter_context(locked(folder / ".lock", wait=True))
        remove_drafts(folder)
        yield


class _Preparation:
    """The preparation of one text in a locked folder."""

    def __init__(self, settings: DataSettings, folder: Path, console: Any, place: str):
        self.settings = settings
        self.folder = folder
        self.console = console
        self.place = place
        self.work = folder / "work"
        self.is_stopped = False

    def run(self, workers: int | None) -> dict[str, Any]:
        """Run all steps. Returns the summary."""
        self.spools = self._read()
        self._split()
        self.tokenizer, training = self._tokenizer()
        self.index = self._shingles()
        chunks = []
        for name, spool in self.spools.items():
            chunks += [(name, number) for number in range(spool.n_chunks)]
        self._encode(chunks, workers)
        return self._finish(chunks, training)

    def _read(self) -> dict[str, Spool]:
        s = self.settings
        source = open_source(s.text_source, self.place)
        if s.valid_source is None:
            text = self._filled("text", source, s.max_bytes)
            if isinstance(s.source, FilesSource) and 0 < s.valid_fraction < 1:
                text = self._in_spans(text, s.source)
            return {"text": text}
        held = self._filled("held", open_source(s.valid_source, VALID), None)
        if (
            isinstance(source, TaskDocuments)
            and s.duplicate_threshold <= 1
            and not _has_items(s.valid_source)
        ):
            index = ShingleIndex([shingles(text) for text in held.texts(valid=False)])
            source.is_held_out = lambda text: max(index.shared(text)) >= s.duplicate_threshold
        return {"text": self._filled("text", source, s.max_bytes), "held": held}

    def _filled(self, name: str, source: Source, max_bytes: int | None) -> Spool:
        """The spool of a source."""
        self.console.info(f"reading {source.label}")
        fill(self.work / name, source, self.settings, max_bytes, self.console)
        spool = Spool(self.work / name)
        separator = getattr(source.settings, "separator", None)
        if separator is not None and not spool.has_parts:
            self.console.warn(
                f"{source.place}.separator {separator!r} does not occur in {source.label}: "
                "each file is one document"
            )
        return spool

    def _in_spans(self, spool: Spool, source: FilesSource) -> Spool:
        """Split few long documents, so that spans of them can be held out."""
        s = self.settings
        documents = len(spool.keys)
        total = min(int(spool.bytes.sum()), s.max_bytes or sys.maxsize)
        size = max(SPAN, total // SPANS)
        fewest = 2 if documents == 1 else ENOUGH
        if source.split_bytes is not None or documents >= ENOUGH or total < fewest * size:
            return spool
        source = source.model_copy(update={"split_bytes": size})
        fill(self.work / "spans", open_source(source, self.place), s, s.max_bytes, self.console)
        spool = Spool(self.work / "spans")
        self.settings = s.model_copy(update={"source": source})  # recorded in the manifests
        self.console.info(
            f"{self.place} has {documents} long document{'s' * (documents > 1)}: spans of at most "
            f"{size:,} bytes are held out, as with data.source.split_bytes={size}"
        )
        return spool

    def _split(self) -> None:
        """Choose the validation documents."""
        text = self.spools["text"]
        keys = text.keys
        fraction = self.settings.valid_fraction
        if "held" in self.spools:
            self.spools["held"].valid[:] = True
        elif fraction == 1:
            text.valid[:] = True
        elif fraction > 0:
            if len(keys) < 2:
                raise DataError(
                    "the source has a single short document, so none can be held out for "
                    "validation. Add text, split it with data.source.separator, set "
                    "data.valid_source, or set data.valid_fraction to 0 or 1"
                )
            least = POINTS_ONLY_BELOW if len(keys) >= ENOUGH else 1
            count = min(max(least, round(fraction * len(keys))), len(keys) - 1)
            text.valid[np.argsort(keys, kind="stable")[:count]] = True

    def _tokenizer(self) -> tuple[Tokenizer, dict[str, Any]]:
        """Train or load the tokenizer and save it. Returns it and statistics of its training."""
        place = self.folder / "tokenizer"
        card = self.work / "tokenizer_training.json"
        if card.is_file():
            return load_tokenizer(place), read_json(card)
        settings = self.settings.tokenizer
        training: dict[str, Any] = {}
        tokenizer = given_tokenizer(settings)
        if tokenizer is None:
            assert isinstance(settings, SentencePieceSettings | HuggingFaceSettings)
            tokenizer, training = self._train_tokenizer(settings)
        tokenizer.save(place)
        write_json(card, training)
        return tokenizer, training

    def _train_tokenizer(
        self,
        settings: SentencePieceSettings | HuggingFaceSettings,
    ) -> tuple[Tokenizer, dict[str, Any]]:
        text = self.spools["text"]
        available = int(text.bytes[~text.valid].sum())
        if not available:
            raise DataError(
                "there is no training text to train a tokenizer on (data.valid_fraction is 1); "
                "set data.tokenizer.model=PATH or data.tokenizer.name=bytes"
            )
        most = settings.train_bytes
        self.console.info(
            f"training a {settings.name} tokenizer of {settings.vocab_size:,} ids on "
            f"{min(available, most) / 1e6:,.1f} MB of {available / 1e6:,.1f} MB"
        )
        pieces = list(self._sample(available, most))
        used = sum(len(piece.encode()) for piece in pieces)
        return train_tokenizer(settings, pieces), {"bytes_used": used}

    def _sample(self, available: int, most: int) -> Iterator[str]:
        """Yield pieces spread evenly over the training text, at most `most` bytes in total."""
        share = min(1.0, most / available)
        due = 0.0
        used = 0
        for text in self.spools["text"].texts(valid=False):
            for start in range(0, len(text), PIECE):
                piece = text[start : start + PIECE]
                size = len(piece.encode())
                due += share * size  # bytes that should have been sampled so far
                if share == 1.0 or (used + size / 2 <= due and used + size <= most):
                    used += size
                    yield piece

    def _shingles(self) -> ShingleIndex | None:
        """The shingles of validation text; None: keep near-duplicates."""
        # Task items differ by construction, and `_read` keeps validation text out of their context.
        if self.settings.duplicate_threshold > 1 or isinstance(self.settings.source, TaskSource):
            return None
        texts = (text for spool in self.spools.values() for text in spool.texts(valid=True))
        return ShingleIndex([shingles(text) for text in texts])

    def _result_path(self, chunk: Chunk) -> Path:
        return self.work / "done" / f"{chunk[0]}-{chunk[1]:05d}.json"

    def _encode(self, chunks: list[Chunk], workers: int | None) -> None:
        """Write the shards of the chunks that are not done. Threads run in parallel, because
        tokenizing, hashing and decompression release Python's global lock; the shards do not depend
        on the number of threads."""
        missing = [chunk for chunk in chunks if not self._result_path(chunk).is_file()]
        workers = min(workers or available_cores(), max(1, len(missing)))
        bar = self.console.bar("tokenizing", len(missing), unit="shards")
        with bar as progress, ThreadPoolExecutor(workers) as pool:
            try:
                for _ in pool.map(self._encode_chunk, missing):
                    progress.advance()
            # after an error or an interrupt, end the other threads at their next document
            finally:
                self.is_stopped = True

    def _encode_chunk(self, chunk: Chunk) -> None:
        """Write the shards of one chunk. The result file is written last and marks the chunk as
        done."""
        name, number = chunk
        spool = self.spools[name]
        table = read_chunk(spool.folder, number)
        valid = spool.valid_in(number)
        dtype = token_dtype(self.tokenizer.vocab_size)
        result = {"shards": {}, "lossy": 0, "copies": 0}
        for split, mask in (("train", ~valid), ("valid", valid)):
            # An empty shard would overwrite that of the same number from the other spool.
            if mask.any():
                index = self.index if split == "train" else None
                documents = self._encoded(table.filter(mask), index, result)
                shard = write_shard(self.folder / split, f"{number:05d}", dtype, documents)
                result["shards"][split] = shard
        write_json(self._result_path(chunk), result)

    def _encoded(
        self,
        table: pyarrow.Table,
        index: ShingleIndex | None,
        result: dict[str, Any],
    ) -> Iterator[EncodedDocument]:
        begin = [self.tokenizer.bos_id] * self.settings.bos
        end = [self.tokenizer.eos_id] * self.settings.eos
        for row in table.to_pylist():
            if self.is_stopped:
                raise InterruptedError("another chunk failed")
            text = row["text"]
            if index is not None and max(index.shared(text)) >= self.settings.duplicate_threshold:
                result["copies"] += 1
                continue
            ids = self.tokenizer.encode(text)
            result["lossy"] += not lossless(self.tokenizer, ids, text)
            stored = np.array([*begin, *ids, *end])
            yield EncodedDocument(row["name"], row["cluster"], stored, row["bytes"], row["number"])

    def _finish(self, chunks: list[Chunk], training: dict[str, Any]) -> dict[str, Any]:
        """Write the manifests and prepared.json. Returns the summary."""
        s = self.settings
        results = [read_json(self._result_path(chunk)) for chunk in chunks]
        for split, source in (("train", s.source), ("valid", s.valid_source or s.source)):
            write_manifest(
                self.folder / split,
                token_dtype(self.tokenizer.vocab_size),
                [result["shards"][split] for result in results if result["shards"].get(split)],
                tokenizer=self.tokenizer.hash,
                has_bos=s.bos,
                has_eos=s.eos,
                source=source.model_dump(),
            )
        text = self.spools["text"]
        faults: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for spool in self.spools.values():
            faults.update(spool.state["faults"])
            examples |= spool.state["examples"]
        summary = {
            "label": self.folder.name,
            "train": split_summary(TokenStore(self.folder / "train")),
            "valid": split_summary(TokenStore(self.folder / "valid")),
            "tokenizer": {
                "hash": self.tokenizer.hash,
                "vocab_size": self.tokenizer.vocab_size,
                "normalization": self.tokenizer.normalization,
                **training,
            },
            "passed_over": dict(faults),
            "examples": examples,
            "bytes_read": int(text.bytes.sum()),
            "lossy_documents": sum(result["lossy"] for result in results),
            "near_duplicates": {"documents": sum(result["copies"] for result in results)},
        }
        write_json(self.folder / "prepared.json", {"settings": s.model_dump(), "summary": summary})
        return summary


def _has_items(source: SourceSettings) -> bool:
    """Whether the documents are task items. The haystacks of training items may be theirs."""
    if isinstance(source, PreparedSource):
        made = read_json(Path(source.path).expanduser() / "prepared.json")["settings"]
        held = made.get("valid_source") if source.split == "valid" else None
        return (held or made["source"])["name"] == "task"
    return isinstance(source, TaskSource)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
