"""Token shards on disk, written once and memory-mapped for reading.

A store is a folder with `manifest.json` and three files per shard: `NNNNN.tokens` (ids of the
concatenated documents, uint16 or uint32), `NNNNN.documents.npy` (int64 (3, n): tokens, raw bytes,
index in the source) and `NNNNN.names.json` (names and clusters). The manifest is written last and
records the size and sha256 of each file.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.files import (
    atomic,
    canonical_hash,
    damage_reported,
    read_json,
    save_array,
    sha256_of,
    write_json,
    write_text,
)
from errors import DataError

FORMAT = 1


class EncodedDocument(NamedTuple):
    """One document to write to a shard; `ids` include begin and end symbols."""

    name: str
    cluster: str | None
    ids: np.ndarray
    raw_bytes: int
    number: int


def hint(folder: Path) -> str:
    """How to repair a damaged store or the prepared folder that contains it."""
    whole = folder.parent if (folder.parent / "prepared.json").is_file() else folder
    return f"delete {whole} and prepare the data again"


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned dtype that represents every id, little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(
    folder: Path,
    stem: str,
    dtype: np.dtype,
    documents: Iterator[EncodedDocument],
) -> dict[str, Any] | None:
    """Write one shard with one document in memory at a time. Returns its manifest entry, or None if
    there are no documents.
    """
    names = []
    clusters = []
    rows = []
    paths = [folder / f"{stem}.{ending}" for ending in ("tokens", "documents.npy", "names.json")]
    with atomic(paths[0]) as file:
        for document in documents:
            file.write(document.ids.astype(dtype).tobytes())
            names.append(document.name)
            clusters.append(document.cluster)
            rows.append((len(document.ids), document.raw_bytes, document.number))
    if not rows:
        paths[0].unlink()
        return None
    table = np.array(rows, dtype="<i8").T.copy()
    save_array(paths[1], table)
    # These bytes are part of the corpus hash, which seeds the draw of evaluation targets: keep
    # their format.
    write_text(
        paths[2],
        json.dumps({"names": names, "clusters": clusters}, ensure_ascii=False, indent=1),
    )
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
    return {"stem": stem, "documents": len(rows), "tokens": int(table[0].sum()), "files": files}


def write_manifest(
    folder: Path,
    dtype: np.dtype,
    shards: list[dict[str, Any]],
    *,
    tokenizer: str,
    has_bos: bool,
    has_eos: bool,
    source: dict[str, Any],
) -> None:
    """Write the manifest of a store.

    Args:
        tokenizer: hash of the tokenizer.
        source: description of the text's origin for users. It contains paths, so the hash of the
            store excludes it.
    """
    manifest = {"format": FORMAT, "dtype": dtype.str, "tokenizer": tokenizer}
    manifest |= {"has_bos": has_bos, "has_eos": has_eos, "shards": shards}
    write_json(folder / "manifest.json", {**manifest, "source": source, "hash": _hash(manifest)})


def _hash(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key not in ("source", "hash")}
    return canonical_hash(content)


class TokenStore:
    """Read-only documents of one split. Opening checks the size of every file; `verify` also
    checks its hash.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        self.hash: str = self.manifest["hash"]
        self.dtype = np.dtype(self.manifest["dtype"])
        self.has_bos: bool = self.manifest["has_bos"]
        self.has_eos: bool = self.manifest["has_eos"]
        self._shards: list[dict[str, Any]] = self.manifest["shards"]
        self._files: dict[str, dict[str, Any]] = {}
        for shard in self._shards:
            self._files |= shard["files"]
        for name in self._files:
            self._check(name)
        tables = [np.zeros((3, 0), dtype=np.int64), *map(self._table, self._shards)]
        self.lengths, self.bytes, _ = np.concatenate(tables, axis=1)
        self._first = np.cumsum([0] + [shard["documents"] for shard in self._shards])
        # offset of each document in its shard
        starts = [np.cumsum(lengths) - lengths for lengths, _, _ in tables]
        self._starts = np.concatenate(starts)
        self._maps: dict[int, np.ndarray] = {}

    def _check(self, name: str, content: Path | memoryview | None = None) -> None:
        """Compare the size of a file, and the hash of `content`, with the manifest."""
        path = self.folder / name
        expected = self._files[name]
        if not path.is_file():
            raise DataError(f"{path} is missing; {hint(self.folder)}")
        actual = path.stat().st_size
        if actual != expected["bytes"]:
            raise DataError(
                f"{path} is damaged: it has {actual:,} bytes instead of {expected['bytes']:,}; "
                f"{hint(self.folder)}"
            )
        if content is not None and sha256_of(content) != expected["sha256"]:
            raise DataError(f"{path} does not match its recorded hash; {hint(self.folder)}")

    def verify(self, vocab_size: int | None = None) -> None:
        """Compare every file with its hash, and the ids with the size of the vocabulary.

        Raises DataError naming the first file that differs.
        """
        for name in self._files:
            self._check(name, self.folder / name)
        for i in range(len(self._shards)):
            largest = int(self._map(i).max(initial=0))
            if vocab_size is not None and largest >= vocab_size:
                raise DataError(
                    f"{self.folder / self._tokens_file(i)} has the id {largest}, but the tokenizer "
                    f"has {vocab_size} ids; {hint(self.folder)}"
                )

    def verify_tokens(self, shard: int) -> None:
        """Compare the ids of one shard, as `document` reads them, with their hash. Raises DataError
        if they were changed after the store was opened.
        """
        name = self._tokens_file(shard)
        self._check(name)  # reading the map of a truncated file would end the process
        self._check(name, self._map(shard).data)

    def _table(self, shard: dict[str, Any]) -> np.ndarray:
        path = self.folder / f"{shard['stem']}.documents.npy"
        with damage_reported(path, hint(self.folder)):
            table = np.load(path)
            if table.shape != (3, shard["documents"]) or table[0].sum() != shard["tokens"]:
                raise DataError(f"{path} does not match manifest.json; {hint(self.folder)}")
        return table

    @property
    def n_documents(self) -> int:
        return len(self.lengths)

    @cached_property
    def n_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def _labels(self) -> tuple[list[str], list[str | None]]:
        names: list[str] = []
        clusters: list[str | None] = []
        for shard in self._shards:
            path = self.folder / f"{shard['stem']}.names.json"
            with damage_reported(path, hint(self.folder)):
                table = read_json(path)
                names += table["names"]
                clusters += table["clusters"]
        return names, clusters

    @property
    def names(self) -> list[str]:
        return self._labels[0]

    @property
    def clusters(self) -> list[str | None]:
        """The cluster of each document (author, series), if the source provides one."""
        return self._labels[1]

    def document(self, i: int) -> np.ndarray:
        """Ids of document `i` in the dtype of the store: a view of the mapped file, not a copy."""
        start = self._starts[i]
        return self._map(self.shard_of(i))[start : start + self.lengths[i]]

    def shard_of(self, i: int) -> int:
        """The index of the shard that has document `i`."""
        return int(np.searchsorted(self._first, i, side="right")) - 1

    def _tokens_file(self, shard: int) -> str:
        return f"{self._shards[shard]['stem']}.tokens"

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            path = self.folder / self._tokens_file(shard)
            self._maps[shard] = np.memmap(path, dtype=self.dtype, mode="r")
        return self._maps[shard]


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.is_file():
        raise DataError(f"{path} is missing: {folder} has no prepared data; run scripts/prepare.py")
    with damage_reported(path, hint(folder)):
        manifest = read_json(path)
        if manifest["hash"] != _hash(manifest):
            raise DataError(f"{path} does not match its recorded hash; {hint(folder)}")
        if manifest["format"] != FORMAT:
            raise DataError(
                f"{path} has format {manifest['format']}, but this version reads {FORMAT}; "
                f"{hint(folder)}"
            )
    return manifest
