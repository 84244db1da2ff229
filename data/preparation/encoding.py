"""Tokenize one chunk of the spool: the parallel part of preparation."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.files import atomic, read_json, write_json
from data.preparation.duplicates import ShingleIndex
from data.preparation.spool import SpoolChunk
from data.sources import GENERATED
from data.store import EncodedDocument, token_dtype, write_shard
from data.tokenizer import load_tokenizer, lossless


class EncodingJob:
    """State shared by all chunks. It is loaded from the folder under preparation and identical in every
    process.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.work = folder / "work"
        facts = read_json(self.work / "job.json")
        self.bos, self.eos = facts["bos"], facts["eos"]
        self.threshold: float = facts["duplicate_threshold"]
        self.tokenizer = load_tokenizer(folder / "tokenizer")
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    @cached_property
    def index(self) -> ShingleIndex | None:
        return ShingleIndex(self.work / "shingles") if self.threshold <= 1 else None

    def result_path(self, spool: str, number: int) -> Path:
        return self.work / "done" / f"{spool}-{number:05d}.json"

    def hits_path(self, spool: str, number: int) -> Path:
        return self.work / "done" / f"{spool}-{number:05d}.hits.npy"

    def run(self, spool: str, number: int) -> dict[str, Any]:
        """Write the shards of one chunk. The result file is written last and marks the chunk as done."""
        chunk = SpoolChunk(self.work / spool, number)
        low = int(np.load(self.work / f"{spool}.first.npy", mmap_mode="r")[number])
        valid = np.load(self.work / f"{spool}.valid.npy", mmap_mode="r")[low : low + len(chunk)]
        labels = chunk.labels()
        counts = {"lossy": 0, "copies": 0, "copied_bytes": 0}
        hits: list[np.ndarray] = []
        shards = {}
        for split in ("train", "valid"):
            chosen = np.flatnonzero(valid if split == "valid" else ~valid)
            if not len(
                chosen
            ):  # a separate validation source must not overwrite the training shard of the same number
                shards[split] = None
                continue
            index = self.index if split == "train" else None
            documents = self._encoded(chunk, labels, chosen, index, counts, hits)
            shards[split] = write_shard(self.folder / split, f"{number:05d}", self.dtype, documents)
        remaining = np.unique(np.concatenate(hits)) if hits else np.zeros(0, dtype=np.uint64)
        with atomic(self.hits_path(spool, number)) as file:
            np.save(file, remaining)
        result = {"shards": shards, **counts}
        write_json(self.result_path(spool, number), result)
        return result

    def _encoded(self, chunk: SpoolChunk, labels, chosen, index, counts, hits) -> Iterator[EncodedDocument]:
        begin = [self.tokenizer.bos_id] if self.bos else []
        end = [self.tokenizer.eos_id] if self.eos else []
        names, clusters = labels
        for i in chosen:
            text, size = chunk.text(int(i)), int(chunk.bytes[i])
            if index is not None and not names[i].startswith(GENERATED):
                match = index.match(text)
                if max(match.own, match.theirs) >= self.threshold:
                    counts["copies"] += 1
                    counts["copied_bytes"] += size
                    continue
                hits.append(match.hits)
            ids = self.tokenizer.encode(text)
            counts["lossy"] += not lossless(self.tokenizer, ids, text)
            stored = np.array(begin + ids + end, dtype=self.dtype)
            yield EncodedDocument(names[i], clusters[i], stored, size, int(chunk.numbers[i]))
