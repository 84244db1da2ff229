"""Sources: the same documents in the same order, from any start; errors name the file."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import DataError
from data.sources import Document, open_source
from data.text_settings import FilesSource, HubSource, StdlibSource

RECORDS = [
    {"text": "first\tdocument 天", "author": "A", "id": "x1"},
    {"text": "second\n", "author": "B", "id": "x2"},
    {"text": "  ", "author": "B", "id": "x3"},
    {"text": "fourth", "author": "A", "id": "x4"},
]
KEYS = {"name_key": "id", "cluster_key": "author"}
EXPECTED = [
    Document("x1", "first\tdocument 天", "A"),
    Document("x2", "second\n", "B"),
    Document("x3", "", fault="empty"),
    Document("x4", "fourth", "A"),
]
RECORD_ENDINGS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]


def files(path, **settings) -> list[Document]:
    return list(open_source(FilesSource(path=str(path), **settings)).documents())


def names(documents: Iterable[Document]) -> list[str]:
    return [document.name for document in documents]


def write_records(folder: Path, ending: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"records.{ending}"
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    if ending.endswith("gz"):
        lines = gzip.compress(lines)
    elif ending.endswith("zst"):
        half = len(lines) // 2  # two frames, as tools that append write them
        compress = pyarrow.Codec("zstd").compress
        parts = (lines[:half], lines[half:])
        lines = b"".join(compress(part, asbytes=True) for part in parts)
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=3)
    else:
        path.write_bytes(lines)
    return path


def test_text_folder(tmp_path):
    contents = {
        "b/two.md": "zwei ü\r\n".encode(),
        "a.txt": b"one",
        "skip.py": b"code",
        ".git/hidden.txt": b"no",
        "empty.txt": b" \n",
        "image.txt": b"\x89PNG\0\0",
        "latin.txt": "café".encode("latin-1"),
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert files(tmp_path) == [
        Document("a.txt", "one"),
        Document("b/two.md", "zwei ü\r\n"),
        Document("empty.txt", "", fault="empty"),
        Document("image.txt", "", fault="binary"),
        Document("latin.txt", "", fault="not UTF-8"),
    ]
    assert names(files(tmp_path, patterns=["**/*.py"])) == ["skip.py"]
    assert names(files(tmp_path, exclude=["*.txt"])) == ["b/two.md"]
    both = open_source(FilesSource(path=[str(tmp_path / "b"), str(tmp_path / "a.txt")]))
    assert names(both.documents()) == ["b/two.md", "a.txt"]
    for settings, error in (
        (FilesSource(path=str(tmp_path / "nowhere")), r"data\.source\.path"),
        (FilesSource(path=str(tmp_path), patterns=["*.rs"]), "patterns"),
        (HubSource(path="nobody/nothing-at-all"), "nobody/nothing-at-all"),
    ):
        with pytest.raises(DataError, match=error):
            list(open_source(settings).documents())


@pytest.mark.parametrize("ending", RECORD_ENDINGS)
def test_record_files(tmp_path, monkeypatch, ending):
    path = write_records(tmp_path / "r", ending)
    for place in (path, path.parent):
        source = open_source(FilesSource(path=str(place), **KEYS))
        for start in range(5):
            assert list(source.documents(start)) == EXPECTED[start:]
    assert names(files(path)) == [f"records.{ending}#{i}" for i in range(4)]
    # larger than allowed
    monkeypatch.setattr("data.sources.local.BLOCK", 7)
    text = RECORDS[0]["text"] if ending == "parquet" else json.dumps(RECORDS[0])
    longest = len(text.encode())
    faults = [d.fault for d in files(path, max_document_bytes=longest - 1)]
    assert f"data.source.max_document_bytes ({longest - 1:,})" in faults[0]
    assert faults[1:] == [None, "empty", None]
    assert not files(path, max_document_bytes=longest)[0].fault
    # truncated, or without the column
    if ending == "parquet":
        with pytest.raises(
            DataError, match=r"'body' \(data\.source\.text_key\); its columns are .*text"
        ):
            files(path, text_key="body")
    if ending != "jsonl":
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(DataError, match=str(path)):
            files(path)


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_one_line_file_is_read_in_bounded_memory(tmp_path, ending):
    """64 MB in some kilobytes; Python's memory is counted, of which a document may take 1 MB."""
    path = tmp_path / f"bomb.jsonl.{ending}"
    with pyarrow.CompressedOutputStream(path, "gzip" if ending == "gz" else "zstd") as file:
        for _ in range(64):
            file.write(b"a" * (1 << 20))
        file.write(b'\n{"text": "good"}\n')
    tracemalloc.start()
    documents = files(path, max_document_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [d.text for d in documents] == ["", "good"]
    assert peak < 8 << 20


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_separator_splits_file_into_documents(tmp_path, monkeypatch, block):
    """Separators and characters extend across the edges of blocks."""
    monkeypatch.setattr("data.sources.local.BLOCK", block)
    (tmp_path / "all.txt").write_text("one é<|end|>two<|end|>\n<|end|>three\n<|end|>")
    source = open_source(FilesSource(path=str(tmp_path / "all.txt"), separator="<|end|>"))
    assert [d.text for d in source.documents()] == ["one é", "two", "", "three\n"]
    assert names(source.documents(2)) == ["all.txt#2", "all.txt#3"]


def test_clusters_from_a_manifest(tmp_path):
    for name in ("p.txt", "q.txt"):
        (tmp_path / name).write_text(name)
    manifest = tmp_path / "MANIFEST.jsonl"
    settings = {"patterns": ["*.txt"], "manifest": str(manifest), "cluster_key": "author"}
    manifest.write_text('{"file": "z.txt", "author": "Poe"}\n{"file": "p.txt", "author": "Eliot"}')
    assert [d.cluster for d in files(tmp_path, **settings)] == ["Eliot", None]
    source = open_source(FilesSource(path=str(tmp_path), **settings))
    before = source.fingerprint()
    manifest.write_text('{"file": "p.txt", "author": null}\n{"file": "q.txt", "author": "Poe"}')
    assert source.fingerprint() != before
    assert [d.cluster for d in files(tmp_path, **settings)] == [None, "Poe"]
    manifest.write_text('{"file": "p.txt"}\n')
    with pytest.raises(DataError, match=r"MANIFEST.jsonl line 1: .* 'author'"):
        files(tmp_path, **settings)
    with pytest.raises(ValueError, match="cluster_key"):
        FilesSource(path="x", manifest="m")


def test_records_without_a_name_are_numbered(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "one", "id": null}\n{"text": "two", "id": 7}\n{"text": "three"}\n')
    assert names(files(path, name_key="id")) == ["records.jsonl#0", "7", "records.jsonl#2"]


@pytest.mark.parametrize(("ending", "streaming"), [("jsonl", True), ("parquet", False)])
def test_hub_calls_on_local_files(tmp_path, monkeypatch, streaming, ending):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    settings = HubSource(
        path="parquet" if ending == "parquet" else "json",
        data_files=str(write_records(tmp_path / "r", ending)),
        streaming=streaming,
        **KEYS,
    )
    source = open_source(settings)
    for start in range(5):
        assert list(source.documents(start)) == EXPECTED[start:]
    other = open_source(settings.model_copy(update={"split": "test"}))
    before = source.fingerprint()
    assert before != other.fingerprint()
    os.utime(settings.data_files, (1, 1))
    assert source.fingerprint() != before
    with pytest.raises(
        DataError, match=r"'body' \(data\.source\.text_key\); its columns are .*text"
    ):
        list(open_source(settings.model_copy(update={"text_key": "body"})).documents())


def test_standard_library_source():
    source = open_source(StdlibSource())
    assert source.files == sorted(source.files)
    folders = {folder for name in source.files for folder in name.split("/")[:-1]}
    assert not {"site-packages", "encodings", "pydoc_data", "__pycache__"} & folders
    document = next(source.documents(source.files.index("json/decoder.py")))
    assert document.name == "json/decoder.py"
    assert document.text
