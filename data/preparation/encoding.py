"""Tokenize the chunks of a spool, in several threads. The output does not depend on their number.

Tokenizing, hashing and decompression release Python's global lock, so threads run them in parallel.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from data.data_settings import DataSettings
from data.files import write_json
from data.preparation.duplicates import ShingleIndex
from data.preparation.spool import Spool, read_chunk
from data.store import EncodedDocument, token_dtype, write_shard
from data.tokenizers import Tokenizer, lossless

Chunk = tuple[str, int]  # name of the spool, index


def result_path(folder: Path, chunk: Chunk) -> Path:
    return folder / "work" / "done" / f"{chunk[0]}-{chunk[1]:05d}.json"


class ChunkEncoder:
    """Writes the shards of chunks.

    Args:
        index: the shingles of validation text; None: keep near-duplicates.
    """

    def __init__(
        self,
        folder: Path,
        settings: DataSettings,
        tokenizer: Tokenizer,
        spools: dict[str, Spool],
        index: ShingleIndex | None,
    ):
        self.folder = folder
        self.tokenizer = tokenizer
        self.spools = spools
        self.index = index
        self.threshold = settings.duplicate_threshold
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.begin = [tokenizer.bos_id] if settings.bos else []
        self.end = [tokenizer.eos_id] if settings.eos else []
        self.is_stopped = False

    def run(self, chunk: Chunk) -> None:
        """Write the shards of one chunk. The result file is written last and marks the chunk as
        done."""
        name, number = chunk
        spool = self.spools[name]
        table = read_chunk(spool.folder, number)
        valid = spool.valid_in(number)
        result = {"shards": {}, "lossy": 0, "copies": 0, "copied_bytes": 0, "hits": []}
        for split, mask in (("train", ~valid), ("valid", valid)):
            # An empty shard would overwrite that of the same number from the other spool.
            if mask.any():
                index = self.index if split == "train" else None
                documents = self._encoded(table.filter(mask), index, result)
                stem = f"{number:05d}"
                shard = write_shard(self.folder / split, stem, self.dtype, documents)
                result["shards"][split] = shard
        write_json(result_path(self.folder, chunk), result)

    def _encoded(
        self,
        table: pyarrow.Table,
        index: ShingleIndex | None,
        result: dict[str, Any],
    ) -> Iterator[EncodedDocument]:
        for row in table.to_pylist():
            if self.is_stopped:
                raise InterruptedError("another chunk failed")
            text = row["text"]
            if index is not None:
                match = index.match(text)
                if max(match.own, match.theirs) >= self.threshold:
                    result["copies"] += 1
                    result["copied_bytes"] += row["bytes"]
                    continue
                result["hits"] += match.hits.tolist()
            ids = self.tokenizer.encode(text)
            result["lossy"] += not lossless(self.tokenizer, ids, text)
            stored = np.array([*self.begin, *ids, *self.end], dtype=self.dtype)
            yield EncodedDocument(row["name"], row["cluster"], stored, row["bytes"], row["number"])

    def run_all(self, chunks: list[Chunk], workers: int | None, console: Any) -> None:
        workers = min(workers or available_cores(), max(1, len(chunks)))
        bar = console.bar("tokenizing", len(chunks), unit="shards")
        with bar as progress, ThreadPoolExecutor(workers) as pool:
            try:
                for _ in pool.map(self.run, chunks):
                    progress.advance()
            # after an error or an interrupt, end the other threads at their next document
            finally:
                self.is_stopped = True


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
