"""Preparation: equal shards with interruptions and any number of workers; errors."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import data.preparation.preparation
from data import (
    DataError,
    PreparedData,
    check_texts,
    is_prepared,
    open_prepared,
    prepared_folder,
)
from data.files import _host, locked
from data.preparation.preparation import prepare
from tests.data.conftest import Listener, changed
from tests.files import ROOT

BYTES = {"tokenizer": {"name": "bytes"}, "duplicate_threshold": 2}
BPE = {"name": "huggingface", "vocab_size": 300}


def facts(prepared: PreparedData) -> tuple:
    """All that must be equal between two preparations of the same text, wherever it is stored."""
    prepared.verify()
    summary = {key: value for key, value in prepared.summary.items() if key != "label"}
    files = sorted(str(path.relative_to(prepared.folder)) for path in prepared.folder.rglob("*"))
    return prepared.hash, prepared.valid_hash, prepared.tokenizer.hash, summary, files


@pytest.fixture
def whole(settings) -> tuple:
    """What an uninterrupted preparation by one worker gives."""
    root = str(Path(settings.root).parent / "whole")
    return facts(prepare(changed(settings, root=root), workers=1))


def test_prepared_text_round_trips(settings, corpus, monkeypatch):
    prepared = prepare(settings, workers=1)
    tokenizer = prepared.tokenizer
    assert len({*prepared.train.names, *prepared.valid.names}) == 37
    for store in (prepared.train, prepared.valid):
        assert len(store.manifest["shards"]) > 2  # else resuming would not be tested below
        for i, name in enumerate(store.names):
            ids = store.document(i).astype(np.int64)
            text = (corpus / name).read_bytes()
            assert ids[0] == tokenizer.bos_id
            assert ids[-1] == tokenizer.eos_id
            assert tokenizer.decode(ids.tolist()).encode() == text
            assert tokenizer.token_bytes[ids].sum() == len(text) == store.bytes[i]
    assert prepared.valid.n_documents == round(0.2 * 37)
    summary = prepared.summary
    assert summary["bytes_read"] == prepared.train.bytes.sum() + prepared.valid.bytes.sum()
    assert summary["train"]["tokens"] == prepared.train.n_tokens
    long = (prepared.train.lengths >= 512).sum()
    assert summary["train"]["documents_at_least"]["512"] == long
    assert summary["lossy_documents"] == 0
    # A second call changes nothing.
    before = {path: path.stat().st_mtime_ns for path in prepared.folder.rglob("*")}
    monkeypatch.setattr("data.preparation.preparation._Preparation", None)
    assert facts(prepare(settings, workers=1)) == facts(prepared)
    assert {path: path.stat().st_mtime_ns for path in prepared.folder.rglob("*")} == before


def test_result_is_independent_of_workers(settings, whole):
    assert facts(prepare(settings, workers=3)) == whole


class Stop(Exception):
    pass


@contextmanager
def stopped(monkeypatch, target, calls):
    """Stop at the call of a function of data.preparation after so many `calls`."""
    module, name = f"data.preparation.{target}".rsplit(".", 1)
    real = getattr(sys.modules[module], name)
    made = []

    def counted(*args, **keywords):
        made.append(args)
        if len(made) > calls:
            raise Stop
        return real(*args, **keywords)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(sys.modules[module], name, counted)
        yield


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        ("preparation.write_shard", 5),
        ("spool.write_json", 0),
        ("preparation.train_tokenizer", 0),
        ("preparation.write_manifest", 1),
        ("preparation.split_summary", 0),
    ],
)
def test_interrupted_preparation_gives_same_result(settings, whole, monkeypatch, target, calls):
    with stopped(monkeypatch, target, calls):
        prepare(settings, workers=1)
    with pytest.raises(DataError, match=r"prepared\.json"):
        open_prepared(prepared_folder(settings))
    assert facts(prepare(settings, workers=1)) == whole


def test_killed_preparation_resumes(settings, whole):
    """SIGKILL to a process with two workers, as soon as the first shard is done."""
    code = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from data import DataSettings
from data.preparation.preparation import prepare
prepare(DataSettings.model_validate({settings.model_dump()!r}), workers=2)"""
    process = subprocess.Popen([sys.executable, "-c", code])
    done = prepared_folder(settings) / "work" / "done"
    while not list(done.glob("text-*.json")) and process.poll() is None:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    draft = prepared_folder(settings) / f"train/.00000.tokens.{_host()}.{process.pid}.tmp"
    draft.parent.mkdir(exist_ok=True)
    draft.write_text("half")
    assert facts(prepare(settings, workers=1)) == whole
    assert not draft.exists()


def test_settings_determine_directory(settings, corpus):
    changes = [{}, {"valid_seed": 1}, {"eos": False}, {"tokenizer": {"name": "bytes"}}]
    folders = {prepared_folder(changed(settings, **values)) for values in changes}
    assert len(folders) == 4
    # same shards, other batches
    assert prepared_folder(changed(settings, packing="intra_document")) in folders
    (corpus / "new.txt").write_text("more")
    assert prepared_folder(settings) not in folders


@pytest.mark.parametrize(
    ("files", "fraction", "held_out"),
    [
        (20, 0.05, 6),  # 1 by the fraction alone
        (17, 0.05, 1),  # holding out 6 would take more than a third
        (37, 0.2, 7),  # enough by the fraction
        (37, 1, 37),
        (37, 0, 0),
    ],
)
def test_minimum_validation_size(settings, corpus, files, fraction, held_out):
    for path in sorted(corpus.rglob("*.txt"))[files:]:
        path.unlink()
    console = Listener()
    prepared = prepare(changed(settings, **BYTES, valid_fraction=fraction), console, workers=1)
    assert prepared.valid.n_documents == held_out
    assert prepared.train.n_documents == files - held_out
    lines = [line for line in console.lines if "held out" in line]
    assert len(lines) == (0 < held_out < 20)
    assert all(f"fewer than {6 if held_out < 6 else 20}" in line for line in lines)


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
@pytest.mark.parametrize("documents", [1, 5])
def test_spans_of_few_long_documents_are_held_out(settings, corpus, monkeypatch, ending, documents):
    """All spans are the text, each in one split, also after an interruption of the second reading."""
    text = "".join(path.read_text() for path in sorted(corpus.rglob("*.txt")))
    folder = corpus.parent / "books"
    folder.mkdir()
    books = {f"{i}.{ending}": f"Book {i}\n{text}" for i in range(documents)}
    for name, book in books.items():
        (folder / name).write_text(book if ending == "txt" else json.dumps({"text": book}))
    asked = changed(settings, **BYTES, source={"name": "files", "path": str(folder)})
    console = Listener()
    with stopped(monkeypatch, "spool._write_chunk", documents + 3):
        prepare(asked, workers=1)
    prepared = prepare(asked, console, workers=1)
    size = max(4096, sum(map(len, books.values())) // 60)
    assert sum(f"{size:,} bytes are held out" in line for line in console.lines) == 1
    for store in (prepared.train, prepared.valid):
        assert store.manifest["source"]["split_bytes"] == size
        assert store.bytes.max() <= size
    assert prepared.valid.n_documents >= 6
    spans = {}
    for store in (prepared.train, prepared.valid):
        for i, name in enumerate(store.names):
            book, number = name.replace("#0", "").split("@")
            spans[book, int(number)] = prepared.tokenizer.decode(store.document(i))
    assert len(spans) == prepared.train.n_documents + prepared.valid.n_documents
    for name, book in books.items():
        assert "".join(span for (own, _), span in sorted(spans.items()) if own == name) == book


def test_documents_that_are_not_split(settings, corpus):
    """Short documents, and those whose splitting is set; reading ends at `max_bytes`."""
    book = corpus.parent / "book.txt"
    source = {"name": "files", "path": str(book)}
    asked = changed(settings, **BYTES, source=source)
    book.write_text("one short line\n")
    with pytest.raises(DataError, match=r"data\.source\.separator"):
        prepare(asked, workers=1)
    book.write_text("one short line\n" * 10_000)
    limited = prepare(changed(asked, max_bytes=40_000), workers=1)
    assert 40_000 <= limited.summary["bytes_read"] < 45_000
    given = prepare(changed(asked, source={**source, "split_bytes": 75_000}), workers=1)
    assert (given.train.n_documents, given.valid.n_documents) == (1, 1)


@pytest.mark.parametrize(("separator", "documents"), [(r"\n\n", 30), ("=====", 1)])
def test_separators(settings, corpus, separator, documents):
    """A line break may be typed as backslash and n; a separator that does not occur is reported."""
    file = corpus.parent / "parts.txt"
    file.write_text("\n\n".join(f"part {i} of the file" for i in range(30)))
    source = {"name": "files", "path": str(file), "separator": separator}
    console = Listener()
    changes = {"source": source, "valid_fraction": 0}
    prepared = prepare(changed(settings, **BYTES, **changes), console, workers=1)
    assert prepared.train.n_documents == documents
    assert any("does not occur" in line for line in console.lines) == (documents == 1)


def test_near_duplicates_of_validation_text_are_excluded(settings, corpus, tmp_path):
    held_out = tmp_path / "held"
    held_out.mkdir()
    rng = random.Random(1)
    unseen = ["".join(rng.choices("klmnop", k=5)) for _ in range(600)]
    (held_out / "v.txt").write_text(" ".join(unseen))
    copies = [corpus / "copy.txt", corpus / "part.txt"]
    copies[0].write_text("\n".join(unseen).upper())
    copies[1].write_text(" ".join(unseen[100:400]))
    source = {"name": "files", "path": str(held_out)}
    prepared = prepare(changed(settings, valid_source=source), workers=1)
    assert prepared.valid.names == ["v.txt"]
    assert prepared.train.n_documents == 37
    assert not {"copy.txt", "part.txt"} & set(prepared.train.names)
    assert prepared.summary["near_duplicates"] == {"documents": 2}
    off = prepare(changed(settings, valid_source=source, duplicate_threshold=2), workers=1)
    assert off.train.n_documents == 39


def test_unusable_text_raises(settings, tmp_path):
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xff\xfe")
    (folder / "b.txt").write_text("")
    asked = changed(settings, source={"name": "files", "path": str(folder)})
    with pytest.raises(DataError, match=rf"{folder} .*1 not UTF-8 \(such as a.txt\); 1 empty"):
        prepare(asked, workers=1)
    (folder / "b.txt").write_text("one usable text\n" * 30)
    with pytest.raises(DataError, match=r"data\.valid_fraction"):  # nothing to hold out
        prepare(asked, workers=1)
    for changes in ({"tokenizer": BPE | {"vocab_size": 30_000}}, {"valid_fraction": 1}):
        with pytest.raises(DataError, match=r"data\.tokenizer"):
            prepare(changed(settings, **changes), workers=1)


def test_records_without_text_name_the_setting_and_the_keys(settings, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "words"}\n')
    asked = changed(settings, source={"name": "files", "path": str(tmp_path / "a.jsonl")})
    with pytest.raises(DataError, match=r"keys id, body\)\..* data\.source\.text_key"):
        prepare(asked, workers=1)


def test_record_keys_that_are_not_unicode(settings, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"\\ud800": 1}\n' + '{"text": "some words"}\n' * 9)
    source = {"name": "files", "path": str(tmp_path / "a.jsonl")}
    prepared = prepare(changed(settings, source=source, **BYTES), workers=1)
    assert sum(prepared.summary["passed_over"].values()) == 1


def test_a_copied_folder_is_found_without_its_text(settings, corpus, tmp_path):
    """Also where spans were chosen; not with other settings, nor where two folders match."""
    (tmp_path / "long.txt").write_text("".join(f"line {i}\n" for i in range(20_000)))
    one = {"source": {"name": "files", "path": str(tmp_path / "long.txt")}, **BYTES}
    for asked in (settings, changed(settings, **one)):
        prepared = prepare(asked, workers=1)
        text = Path(asked.source.path)
        away = text.rename(tmp_path / "away")
        assert is_prepared(asked)
        assert prepare(asked, workers=1).hash == prepared.hash
        with pytest.raises(DataError, match=str(text)):
            prepare(changed(asked, valid_seed=9), workers=1)
        shutil.copytree(prepared.folder, prepared.folder.with_suffix(".copy"))
        with pytest.raises(DataError, match=str(text)):
            prepare(asked, workers=1)
        away.rename(text)


def test_limits_of_reading_and_of_the_tokenizer_sample(settings):
    tokenizer = {"name": "sentencepiece", "vocab_size": 350, "train_bytes": 9000}
    summary = prepare(changed(settings, max_bytes=40_000, tokenizer=tokenizer), workers=1).summary
    assert 40_000 <= summary["bytes_read"] < 48_000
    assert 4500 < summary["tokenizer"]["bytes_used"] <= 9000


def test_byte_level_bpe(settings, corpus):
    """Trained, then read from the saved file, then with NFC, which composes an e and an accent."""
    trained = prepare(changed(settings, tokenizer=BPE), workers=2)
    assert trained.tokenizer.name == "huggingface"
    assert trained.summary["lossy_documents"] == 0
    file = trained.folder / "tokenizer" / "tokenizer.json"
    again = prepare(changed(settings, tokenizer=BPE | {"model": str(file)}), workers=1)
    assert again.train.hash == trained.train.hash
    assert again.folder != trained.folder
    nfc = corpus.parent / "nfc.json"
    nfc.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFC"}}))
    (corpus / "accent.txt").write_text("cafe\u0301 " * 40)
    composed = changed(settings, tokenizer={"name": "huggingface", "model": str(nfc)})
    for use in (check_texts, prepare):
        with pytest.raises(DataError, match=r"data\.bos"):  # the file beside it does not name one
            use(composed)
    assert prepare(changed(composed, bos=False, eos=False)).summary["lossy_documents"] == 1


def test_concurrent_preparation_waits(tmp_path):
    entered = threading.Event()

    def enter():
        with data.preparation.preparation._alone(tmp_path, Listener()):
            entered.set()

    second = threading.Thread(target=enter)
    with locked(tmp_path / ".lock") as is_ours:
        assert is_ours
        second.start()
        assert not entered.wait(0.3)
    second.join()
    assert entered.is_set()
