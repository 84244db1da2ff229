"""The usable documents of a source, stored on disk during preparation.

One process reads the source once, in order. All later steps (choice of validation documents, tokenizer
sample, tokens) read the spool, in any order and in parallel. The text is stored in chunks: `NNNNN.zst` (one
zstd frame per document, so that each document can be read separately), `NNNNN.npy` (int64 (3, n): end of the
frame, raw bytes, index in the source), `NNNNN.keys.npy` (uint64 (n,): the split keys) and, last, `NNNNN.json`
(names, clusters, skipped documents). After a crash, reading resumes after the last complete chunk. Chunk
boundaries depend on the documents alone.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from data.errors import DataError
from data.files import atomic, read_json, write_json
from data.sources import GENERATED, Document, Source

GROWTH, CEILING = (
    8,
    16,
)  # the limit doubles every 8 chunks, up to 16 times the first: parallel for small and large corpora
PATIENCE = 20_000  # reading stops after this many unusable documents without a usable one


def chunk_limit(number: int, shard_bytes: int) -> int:
    return shard_bytes * min(CEILING, 1 << (number // GROWTH))


def split_key(seed: int, name: str) -> int:
    """Key that selects validation documents. It depends on the name alone, not on other documents."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little")


class _SpoolWriter:
    """An incomplete chunk. Its compressed frames stay in memory until it is written."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.rows: list[tuple[int, int, int]] = []
        self.keys: list[int] = []
        self.names: list[str] = []
        self.clusters: list[str | None] = []
        self.end = self.raw = self.seen = 0
        self.faults: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, document: Document, raw: bytes, number: int, seed: int, compress) -> None:
        frame = compress(raw)
        self.frames.append(frame)
        self.end += len(frame)
        self.raw += len(raw)
        self.rows.append((self.end, len(raw), number))
        self.keys.append(split_key(seed, document.name))
        self.names.append(document.name)
        self.clusters.append(document.cluster)

    def pass_over(self, name: str, fault: str) -> None:
        self.faults[fault] += 1
        self.examples.setdefault(fault, name)

    def seal(self, folder: Path, number: int) -> None:
        stem = f"{number:05d}"
        with atomic(folder / f"{stem}.zst") as file:
            file.writelines(self.frames)
        with atomic(folder / f"{stem}.npy") as file:
            np.save(file, np.array(self.rows, dtype=np.int64).reshape(-1, 3).T.copy())
        with atomic(folder / f"{stem}.keys.npy") as file:
            np.save(file, np.array(self.keys, dtype=np.uint64))
        card = {"seen": self.seen, "names": self.names, "clusters": self.clusters}
        write_json(folder / f"{stem}.json", {**card, "faults": self.faults, "examples": self.examples})


def fill(
    folder: Path,
    source: Source,
    *,
    shard_bytes: int,
    seed: int,
    max_bytes: int | None,
    console: Any,
    skip: int = 0,
) -> None:
    """Read the source from document `skip` on into the spool, or resume an earlier call. Raises DataError if
    there is no usable document.
    """
    if (folder / "complete.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    sealed = list(_cards(folder))
    number = skip + sum(card["seen"] for card in sealed)
    total = sum(int(np.load(folder / f"{i:05d}.npy")[1].sum()) for i in range(len(sealed)))
    faults: Counter[str] = sum((Counter(card["faults"]) for card in sealed), Counter())
    examples = {fault: name for card in reversed(sealed) for fault, name in card["examples"].items()}
    if sealed:
        console.info(f"reading {source.label}: going on behind document {number:,}")
    compress = zstandard.ZstdCompressor(level=1).compress
    chunk, count, ended = _SpoolWriter(), len(sealed), False
    with console.bar(f"reading {source.label}", None, unit="documents") as bar:
        for document in source.documents(start=number):
            if max_bytes is not None and total >= max_bytes:
                break
            bar.advance()
            chunk.seen += 1
            if document.fault is not None:
                chunk.pass_over(document.name, document.fault)
                if not total and chunk.seen >= PATIENCE:
                    break
            else:
                raw = document.text.encode()
                chunk.add(document, raw, number, seed, compress)
                total += len(raw)
                if chunk.raw >= chunk_limit(count, shard_bytes):
                    chunk.seal(folder, count)
                    faults, examples = faults + chunk.faults, {**chunk.examples, **examples}
                    chunk, count = _SpoolWriter(), count + 1
            number += 1
        else:
            ended = True
    if chunk.rows:
        chunk.seal(folder, count)
        count += 1
    faults, examples = faults + chunk.faults, {**chunk.examples, **examples}
    if not total:
        raise DataError(_nothing_left(source, faults, examples))
    card = {"chunks": count, "documents": number - skip - sum(faults.values()), "bytes": total}
    card |= {"read": number, "ended": ended}
    write_json(folder / "complete.json", {**card, "faults": faults, "examples": examples})


def _nothing_left(source: Source, faults: Counter[str], examples: dict[str, str]) -> str:
    where = ", ".join(map(str, getattr(source, "paths", ()))) or source.label
    if not faults:
        return f"{where} holds no documents at all; give another {source.place}"
    reasons = "; ".join(f"{n:,} {fault} (such as {examples[fault]})" for fault, n in faults.most_common())
    is_keyed = any("under the key" in fault for fault in faults)
    key = f" and the right {source.place}.text_key" if is_keyed else ""
    return f"{where} holds no usable text: {reasons}; give UTF-8 text{key}"


def _cards(folder: Path) -> Iterator[dict[str, Any]]:
    number = 0
    while (path := folder / f"{number:05d}.json").is_file():
        yield read_json(path)
        number += 1


class SpoolChunk:
    """One complete chunk. Documents are read one at a time."""

    def __init__(self, folder: Path, number: int):
        self._data = folder / f"{number:05d}.zst"
        self._card = folder / f"{number:05d}.json"
        self.ends, self.bytes, self.numbers = np.load(folder / f"{number:05d}.npy")

    def __len__(self) -> int:
        return len(self.ends)

    def labels(self) -> tuple[list[str], list[str | None]]:
        card = read_json(self._card)
        return card["names"], card["clusters"]

    def text(self, i: int) -> str:
        start = int(self.ends[i - 1]) if i else 0
        with open(self._data, "rb") as file:
            file.seek(start)
            frame = file.read(int(self.ends[i]) - start)
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=int(self.bytes[i])).decode()


class Spool:
    """A complete spool. `keys`, `bytes` and `generated` (whether a task generated the document) have one
    value per document over all chunks; `first`: (chunks + 1,).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        card = read_json(folder / "complete.json")
        self.faults: dict[str, int] = card["faults"]
        self.examples: dict[str, str] = card["examples"]
        self.n_chunks: int = card["chunks"]
        # Spools of earlier versions do not record where in the source they end.
        self.read: int | None = card.get("read")
        self.ended: bool | None = card.get("ended")
        tables = [np.load(folder / f"{i:05d}.npy") for i in range(self.n_chunks)]
        self.bytes = np.concatenate([table[1] for table in tables])
        self.keys = np.concatenate([np.load(folder / f"{i:05d}.keys.npy") for i in range(self.n_chunks)])
        self.first = np.cumsum([0] + [table.shape[1] for table in tables])
        names = [name for i in range(self.n_chunks) for name in read_json(folder / f"{i:05d}.json")["names"]]
        self.generated = np.array([name.startswith(GENERATED) for name in names], dtype=bool)

    def texts(self, chosen: np.ndarray) -> Iterator[tuple[int, str]]:
        """(index, text) of the documents selected by the mask `chosen`, in order."""
        for number in range(self.n_chunks):
            low, high = self.first[number], self.first[number + 1]
            wanted = np.flatnonzero(chosen[low:high])
            if len(wanted):
                chunk = SpoolChunk(self.folder, number)
                for i in wanted:
                    yield int(low + i), chunk.text(int(i))
