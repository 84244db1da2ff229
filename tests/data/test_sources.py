"""Sources: the same documents in the same order, from any start; errors name the file."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import DataError
from data.sources import Document, open_source
from data.sources.local import Stdlib
from data.text_settings import FilesSource, HubSource, StdlibSource

RECORDS = [
    {"text": "first\tdocument 天", "author": "A", "id": "x1"},
    {"text": "second\n", "author": "B", "id": "x2"},
    {"text": "  ", "author": "B", "id": "x3"},
    {"text": "fourth", "author": "A", "id": "x4"},
]
TEXTS = [record["text"] for record in RECORDS]


def files(path, **more) -> list[Document]:
    return list(open_source(FilesSource(path=str(path), **more)).documents())


def write_records(folder: Path, ending: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"records.{ending}"
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    if ending.endswith("gz"):
        path.write_bytes(gzip.compress(lines))
    elif ending.endswith("zst"):
        half = len(lines) // 2  # two frames, as tools that append write them
        compress = pyarrow.Codec("zstd").compress
        path.write_bytes(
            b"".join(compress(part, asbytes=True) for part in (lines[:half], lines[half:]))
        )
    elif ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=3)
    else:
        path.write_bytes(lines)
    return path


def test_text_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_bytes("zwei ü\r\n".encode())
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "skip.py").write_text("code")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("no")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    got = files(tmp_path)
    assert [d.name for d in got] == ["a.txt", "b/two.md", "empty.txt", "image.txt", "latin.txt"]
    assert [d.text for d in got[:2]] == ["one", "zwei ü\r\n"]
    assert [d.fault for d in got] == [None, None, "empty", "binary", "not UTF-8"]
    assert [d.name for d in files(tmp_path, patterns=["**/*.py"])] == ["skip.py"]
    assert [d.name for d in files(tmp_path, exclude=["*.txt"])] == ["b/two.md"]
    both = open_source(FilesSource(path=[str(tmp_path / "b"), str(tmp_path / "a.txt")]))
    assert [d.name for d in both.documents()] == ["b/two.md", "a.txt"]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_record_files(tmp_path, ending):
    path = write_records(tmp_path / "r", ending)
    for place in (path, path.parent):
        source = open_source(FilesSource(path=str(place), name_key="id", cluster_key="author"))
        got = list(source.documents())
        assert [d.text for d in got] == [TEXTS[0], TEXTS[1], "", TEXTS[3]]
        assert [d.name for d in got] == ["x1", "x2", "x3", "x4"]
        assert [d.fault for d in got] == [None, None, "empty", None]
        assert [got[i].cluster for i in (0, 1, 3)] == ["A", "B", "A"]
        for start in range(5):
            assert list(source.documents(start)) == got[start:]
    assert [d.name for d in files(path)] == [f"records.{ending}#{i}" for i in range(4)]


def test_invalid_records_are_named(tmp_path):
    lines = [
        '{"text": "good"}',
        '{"text": 5}',
        "[1]",
        '{"tex',
        '{"body": "x"}',
        "",
        '{"text": "\\ud800"}',
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    missing = "no text under the key 'text'"
    faults = [None, missing, "not a JSON object", "not a JSON object", missing, "invalid Unicode"]
    assert [d.fault for d in files(tmp_path / "r.jsonl")] == faults


def test_deeply_nested_records_are_skipped(tmp_path):
    (tmp_path / "r.jsonl").write_text("[" * 200_000 + '\n{"text": "good"}\n')
    assert [d.fault for d in files(tmp_path / "r.jsonl")] == ["not a JSON object", None]


def test_non_utf8_names(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    folder = tmp_path / name
    folder.mkdir()
    (folder / f"{name}.txt").write_text("one")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["two"]}), tmp_path / "t.parquet")
    (tmp_path / "t.parquet").rename(folder / f"{name}.parquet")
    (folder / "r.jsonl").write_text('{"text": "three", "id": "\\ud800", "author": "\\udcff"}\n')
    source = open_source(FilesSource(path=str(folder), name_key="id", cluster_key="author"))
    with pytest.raises(DataError, match="no column 'id'"):
        list(source.documents())
    assert source.label == r"caf\udce9" and source.fingerprint()
    got = files(folder)
    assert [d.name for d in got] == [r"caf\udce9.parquet#0", r"caf\udce9.txt", "r.jsonl#0"]
    (record,) = files(folder / "r.jsonl", name_key="id", cluster_key="author")
    assert (record.name, record.cluster) == (r"\ud800", r"\udcff")


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_large_records_are_skipped(tmp_path, monkeypatch, ending):
    monkeypatch.setattr("data.sources.local.BLOCK", 7)
    path = write_records(tmp_path / "r", ending)
    longest = len(TEXTS[0].encode() if ending == "parquet" else json.dumps(RECORDS[0]))
    faults = [d.fault for d in files(path, max_document_bytes=longest - 1)]
    assert faults[0] == f"larger than data.source.max_document_bytes ({longest - 1:,})"
    assert faults[1:] == [None, "empty", None]
    assert not files(path, max_document_bytes=longest)[0].fault


def test_large_files_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("data.sources.local.BLOCK", 3)
    (tmp_path / "a.txt").write_text("12345")
    (tmp_path / "b.txt").write_text("123456--1--2345678--12345--1234567890123")
    sizes = [len(d.text) if d.fault is None else d.fault.split()[0] for d in files(tmp_path)]
    assert sizes == [5, 40]
    sizes = [len(d.text) or d.fault.split()[0] for d in files(tmp_path, max_document_bytes=5)]
    assert sizes == [5, "larger"]
    parts = files(tmp_path / "b.txt", separator="--", max_document_bytes=5)
    assert [len(d.text) or d.fault.split()[0] for d in parts] == [
        "larger",
        1,
        "larger",
        5,
        "larger",
    ]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_one_line_file_is_read_in_bounded_memory(tmp_path, ending):
    """64 MB in some kilobytes; Python's memory is counted, of which a document may take 1 MB."""
    path = tmp_path / f"bomb.jsonl.{ending}"
    piece = b"a" * (1 << 20)
    with pyarrow.CompressedOutputStream(path, "gzip" if ending == "gz" else "zstd") as file:
        for _ in range(64):
            file.write(piece)
        file.write(b'\n{"text": "good"}\n')
    tracemalloc.start()
    got = files(path, max_document_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [d.text for d in got] == ["", "good"] and peak < 8 << 20


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_truncated_files_are_named(tmp_path, ending):
    path = write_records(tmp_path / "r", ending)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"records.{ending} is damaged or truncated"):
        files(path)


def test_invalid_requests(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        files(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no file in .* matches"):
        files(tmp_path)
    with pytest.raises(DataError, match="no column 'body'; its columns are text, author, id"):
        files(write_records(tmp_path / "r", "parquet"), text_key="body")


def test_separator_splits_file_into_documents(tmp_path, monkeypatch):
    (tmp_path / "all.txt").write_text("one é<|end|>two<|end|>\n<|end|>three\n<|end|>")
    expected = [("one é", None), ("two", None), ("", "empty"), ("three\n", None)]
    for block in (1, 3, 1 << 20):  # separators and characters lie across the edges of blocks
        monkeypatch.setattr("data.sources.local.BLOCK", block)
        source = open_source(FilesSource(path=str(tmp_path / "all.txt"), separator="<|end|>"))
        assert [(d.text, d.fault) for d in source.documents()] == expected
        assert [d.name for d in source.documents(2)] == ["all.txt#2", "all.txt#3"]


def test_clusters_from_a_manifest(tmp_path):
    for name in ("p.txt", "q.txt"):
        (tmp_path / name).write_text(name)
    manifest = tmp_path / "MANIFEST.jsonl"
    manifest.write_text(
        '{"file": "p.txt", "author": "Eliot"}\n{"file": "z.txt", "author": "Poe"}\n'
    )
    more = {"patterns": ["*.txt"], "manifest": str(manifest), "cluster_key": "author"}
    assert [d.cluster for d in files(tmp_path, **more)] == ["Eliot", None]
    manifest.write_text('{"file": "p.txt"}\n')
    with pytest.raises(DataError, match=r"MANIFEST.jsonl line 1: .* 'author'"):
        files(tmp_path, **more)
    with pytest.raises(ValueError, match="manifest requires cluster_key"):
        FilesSource(path="x", manifest="m")


def test_fingerprint_depends_on_files(tmp_path):
    def fingerprint() -> str:
        return open_source(FilesSource(path=str(tmp_path))).fingerprint()

    (tmp_path / "a.txt").write_text("one")
    first = fingerprint()
    assert fingerprint() == first
    (tmp_path / "b.txt").write_text("two")
    second = fingerprint()
    (tmp_path / "b.txt").write_text("three")
    assert len({first, second, fingerprint()}) == 3


@pytest.mark.parametrize(
    ("ending", "streaming"),
    [
        ("jsonl", True),
        ("parquet", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("jsonl", False),
                ("parquet", True),
                ("jsonl.gz", False),
                ("jsonl.gz", True),
            ]
        ),
    ],
)
def test_hub_calls_on_local_files(tmp_path, monkeypatch, streaming, ending):
    path = "parquet" if ending == "parquet" else "json"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data_files = str(write_records(tmp_path / "r", ending))
    settings = HubSource(
        path=path, data_files=data_files, streaming=streaming, name_key="id", cluster_key="author"
    )
    source = open_source(settings)
    got = list(source.documents())
    assert [(d.name, d.text, d.cluster) for d in got if not d.fault] == [
        (r["id"], r["text"], r["author"]) for r in RECORDS if r["text"].strip()
    ]
    for start in range(5):
        assert list(source.documents(start)) == got[start:]
    assert (
        source.fingerprint()
        != open_source(settings.model_copy(update={"split": "test"})).fingerprint()
    )
    with pytest.raises(DataError, match="no column 'body'"):
        list(open_source(settings.model_copy(update={"text_key": "body"})).documents())


def test_missing_dataset_raises_one_error():
    with pytest.raises(DataError, match=r"cannot load 'nobody/nothing-at-all'"):
        list(open_source(HubSource(path="nobody/nothing-at-all")).documents())


def test_standard_library_source(tmp_path):
    source = open_source(StdlibSource())
    names = source.files
    assert names == sorted(names) and "argparse.py" in names and "json/decoder.py" in names
    assert not [
        n
        for n in names
        if {"site-packages", "encodings", "pydoc_data", "__pycache__"} & {*n.split("/")}
    ]
    first = next(d for d in source.documents() if not d.fault)
    assert (
        first.text
        and next(iter(source.documents(names.index("argparse.py")))).name == "argparse.py"
    )
    with pytest.raises(DataError, match="standard library"):
        Stdlib(StdlibSource(), "data.source", tmp_path).check()
