"""The usable documents of a source, stored on disk during preparation.

One process reads the source once, in order. All later steps (choice of validation documents,
tokenizer sample, tokens) read the spool, in any order and in parallel. Chunk `NNNNN.parquet` has
one row per document and, as metadata, the state of reading after it, so reading resumes after the
last complete chunk. `spool.json` is written last. Chunk boundaries depend on the documents alone.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from data.data_settings import DataSettings
from data.files import atomic, read_json, write_json
from data.random_draws import hash64
from data.sources import Source
from errors import DataError

SCHEMA = pyarrow.schema(
    {
        "name": pyarrow.large_string(),
        "cluster": pyarrow.large_string(),
        "text": pyarrow.large_string(),
        "bytes": pyarrow.int64(),
        "number": pyarrow.int64(),  # index in the source
        "key": pyarrow.uint64(),  # selects the validation documents
    }
)
# The limit doubles every 8 chunks, up to 16 times the first: parallel for small and large corpora.
GROWTH = 8
CEILING = 16
PATIENCE = 20_000  # reading stops after this many unusable documents without a usable one


def split_key(seed: int, name: str) -> int:
    """Key that selects validation documents. It depends on the name alone, not on other
    documents."""
    return hash64(f"{seed}\0{name}")


def chunk_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.parquet"


def read_chunk(folder: Path, number: int, columns: list[str] | None = None) -> pyarrow.Table:
    with pyarrow.parquet.ParquetFile(chunk_path(folder, number)) as file:
        return file.read(columns)


def fill(
    folder: Path,
    source: Source,
    settings: DataSettings,
    max_bytes: int | None,
    console: Any,
) -> None:
    """Read the source into the spool, or resume an earlier call. Raises DataError if there is no
    usable document.
    """
    if (folder / "spool.json").is_file():
        return
    count = next(n for n in itertools.count() if not chunk_path(folder, n).is_file())
    state: dict[str, Any] = {"read": 0, "bytes": 0, "faults": {}, "examples": {}}
    if count:
        metadata = pyarrow.parquet.read_schema(chunk_path(folder, count - 1)).metadata
        state = json.loads(metadata[b"state"])
        console.info(f"reading {source.label}: resuming after document {state['read']:,}")
    rows = []
    size = 0  # bytes of `rows`
    with console.bar(f"reading {source.label}", None, unit="documents") as bar:
        for document in source.documents(start=state["read"]):
            if max_bytes is not None and state["bytes"] >= max_bytes:
                break
            bar.advance()
            if document.fault is None:
                row = document._asdict()
                row["bytes"] = len(document.text.encode())
                row["number"] = state["read"]
                row["key"] = split_key(settings.valid_seed, document.name)
                rows.append(row)
                state["bytes"] += row["bytes"]
                size += row["bytes"]
            else:
                state["faults"][document.fault] = 1 + state["faults"].get(document.fault, 0)
                state["examples"].setdefault(document.fault, document.name)
                if not state["bytes"] and state["read"] >= PATIENCE:
                    break
            state["read"] += 1
            if size >= settings.shard_bytes * min(CEILING, 1 << (count // GROWTH)):
                _write_chunk(folder, count, rows, state)
                rows = []
                size = 0
                count += 1
    if rows:
        _write_chunk(folder, count, rows, state)
        count += 1
    if not state["bytes"]:
        raise DataError(_nothing_left(source, state["faults"], state["examples"]))
    write_json(folder / "spool.json", {"chunks": count, **state})


def _write_chunk(folder: Path, number: int, rows: list[dict], state: dict[str, Any]) -> None:
    table = pyarrow.Table.from_pylist(rows, SCHEMA.with_metadata({"state": json.dumps(state)}))
    with atomic(chunk_path(folder, number)) as file:
        pyarrow.parquet.write_table(table, file, compression="zstd")


def _nothing_left(source: Source, faults: dict[str, int], examples: dict[str, str]) -> str:
    where = ", ".join(map(str, getattr(source, "paths", ()))) or source.label
    if not faults:
        return f"{where} has no documents; use another {source.place}"
    reasons = "; ".join(
        f"{count:,} {fault} (such as {examples[fault]})"
        for fault, count in sorted(faults.items(), key=lambda item: -item[1])
    )
    return (
        f"{where} has no usable text: {reasons}. Use UTF-8 text, and the right "
        f"{source.place}.text_key of records"
    )


class Spool:
    """A complete spool. `keys`, `bytes` and `valid` (whether a document is validation text; all
    False until the preparation chooses) have one value per document over all chunks.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.state: dict[str, Any] = read_json(folder / "spool.json")
        self.n_chunks: int = self.state["chunks"]
        columns = ["bytes", "key", "name"]
        tables = [read_chunk(folder, number, columns) for number in range(self.n_chunks)]
        table = pyarrow.concat_tables(tables)
        self.bytes = table["bytes"].to_numpy()
        self.keys = table["key"].to_numpy()
        self.valid = np.zeros(len(table), dtype=bool)
        names = table["name"].to_pylist()
        # whether any file has a second part or record
        self.has_parts = any("#" in name and not name.endswith("#0") for name in names)
        self._first = np.cumsum([0, *map(len, tables)])

    def valid_in(self, number: int) -> np.ndarray:
        """Whether each document of a chunk is validation text."""
        return self.valid[self._first[number] : self._first[number + 1]]

    def texts(self, valid: bool) -> Iterator[str]:
        """The validation texts, or the training texts, in order."""
        for number in range(self.n_chunks):
            chosen = np.flatnonzero(self.valid_in(number) == valid)
            if len(chosen):
                texts = read_chunk(self.folder, number, ["text"])["text"]
                yield from (texts[i].as_py() for i in chosen.tolist())
