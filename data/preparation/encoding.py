"""Tokenize the chunks of a spool, in several processes. The output does not depend on their number."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from data.errors import DataError
from data.files import read_json, save_array, write_json
from data.preparation.duplicates import ShingleIndex
from data.preparation.processes import exit_child, start_child, stdin_lines, stop_child
from data.preparation.spool import read_chunk
from data.sources import GENERATED
from data.store import EncodedDocument, token_dtype, write_shard
from data.tokenizer import load_tokenizer, lossless

Chunk = tuple[str, int]  # name of the spool, index


def result_path(folder: Path, chunk: Chunk) -> Path:
    return folder / "work" / "done" / f"{chunk[0]}-{chunk[1]:05d}.json"


def mask_path(folder: Path, chunk: Chunk) -> Path:
    """The file with one boolean per document of a chunk: whether it is validation text."""
    return folder / "work" / chunk[0] / f"{chunk[1]:05d}.valid.npy"


class EncodingJob:
    """State shared by all chunks. It is loaded from the folder under preparation and identical in every
    process.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        facts = read_json(folder / "work" / "job.json")
        self.bos, self.eos = facts["bos"], facts["eos"]
        self.threshold: float = facts["duplicate_threshold"]
        self.tokenizer = load_tokenizer(folder / "tokenizer")
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    @cached_property
    def index(self) -> ShingleIndex | None:
        return ShingleIndex(self.folder / "work" / "shingles") if self.threshold <= 1 else None

    def run(self, chunk: Chunk) -> None:
        """Write the shards of one chunk. The result file is written last and marks the chunk as done."""
        spool, number = chunk
        table = read_chunk(self.folder / "work" / spool, number)
        valid = np.load(mask_path(self.folder, chunk))
        result: dict[str, Any] = {"shards": {}, "lossy": 0, "copies": 0, "copied_bytes": 0}
        hits = [np.zeros(0, dtype=np.uint64)]
        for split, mask in (("train", ~valid), ("valid", valid)):
            shard = None
            if (
                mask.any()
            ):  # a separate validation source must not overwrite the training shard of the same number
                documents = self._encoded(
                    table, np.flatnonzero(mask), self.index if split == "train" else None, result, hits
                )
                shard = write_shard(self.folder / split, f"{number:05d}", self.dtype, documents)
            result["shards"][split] = shard
        path = result_path(self.folder, chunk)
        save_array(path.with_suffix(".hits.npy"), np.unique(np.concatenate(hits)))
        write_json(path, result)

    def _encoded(
        self,
        table: pyarrow.Table,
        chosen: np.ndarray,
        index: ShingleIndex | None,
        result: dict[str, Any],
        hits: list[np.ndarray],
    ) -> Iterator[EncodedDocument]:
        begin = [self.tokenizer.bos_id] if self.bos else []
        end = [self.tokenizer.eos_id] if self.eos else []
        for i in chosen.tolist():
            name, cluster, text, size, number = (
                table[column][i].as_py() for column in table.column_names[:5]
            )
            if index is not None and not name.startswith(GENERATED):
                match = index.match(text)
                if max(match.own, match.theirs) >= self.threshold:
                    result["copies"] += 1
                    result["copied_bytes"] += size
                    continue
                hits.append(match.hits)
            ids = self.tokenizer.encode(text)
            result["lossy"] += not lossless(self.tokenizer, ids, text)
            yield EncodedDocument(name, cluster, np.array(begin + ids + end, dtype=self.dtype), size, number)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_chunks(folder: Path, chunks: list[Chunk], workers: int | None, console: Any) -> None:
    """Tokenize the chunks, in this process if one worker is enough."""
    workers = min(workers or available_cores(), len(chunks))
    with console.bar("tokenizing", len(chunks), unit="shards") as bar:
        if workers > 1:
            _run_parallel(folder, chunks, workers, bar)
        elif chunks:
            job = EncodingJob(folder)
            for chunk in chunks:
                job.run(chunk)
                bar.advance()


def _run_parallel(folder: Path, chunks: list[Chunk], workers: int, bar: Any) -> None:
    """Each worker tokenizes every `workers`-th chunk and writes a line for each to one shared pipe."""
    read, write = os.pipe()
    children: list[subprocess.Popen] = []
    with open(read, encoding="utf-8") as answers, open(write, "w") as shared:
        try:
            for i in range(workers):
                request = json.dumps(chunks[i::workers])
                children.append(
                    start_child("data.preparation.encoding", folder, request, stdout=shared.fileno())
                )
            shared.close()  # so that the answers end when the last child exits
            for line in answers:
                answer = json.loads(line)
                if "errno" in answer:
                    raise OSError(answer["errno"], answer["error"])
                if "error" in answer:
                    raise DataError(answer["error"])
                bar.advance()
            codes = [child.wait() for child in children]
        finally:
            for child in children:
                stop_child(child)
    if any(codes):
        raise RuntimeError(
            f"a tokenizing process exited with status {max(codes, key=abs)}; see its message above"
        )


def main() -> None:
    """In a child: tokenize the chunks listed in the first line of standard input; see `_run_parallel`."""

    def answer(**facts: Any) -> None:
        os.write(
            1, f"{json.dumps(facts)}\n".encode()
        )  # one call, so that lines of several children stay whole

    try:
        chunks = json.loads(stdin_lines().get())
        job = EncodingJob(Path(sys.argv[1]))
        for chunk in chunks:
            job.run(tuple(chunk))
            answer(done=chunk)
    except DataError as error:
        answer(error=str(error))
    except OSError as error:
        answer(error=f"{error.strerror} ({error.filename})", errno=error.errno)
    except KeyboardInterrupt:  # the parent process has ended
        exit_child(1)
    exit_child(0)
