"""Preparation: equal shards with interruptions and any number of workers; errors."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import data.preparation.encoding
import data.preparation.prepare
from data import (
    DataError,
    DataSettings,
    HuggingFaceTokenizer,
    PreparedData,
    TokenStore,
    open_prepared,
    prepare,
    prepared_folder,
)
from data.files import locked
from tests.corpora import STORIES, needs_stories

HOUSE = Path(__file__).parents[2]
_WHOLE: list[tuple] = []


class Listener:
    """A console that records its output."""

    def __init__(self):
        self.lines: list[str] = []
        self.tables: list[list] = []

    def info(self, text):
        self.lines.append(text)

    warn = info

    def bar(self, label, total, unit="it"):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def advance(self, n=1):
        pass

    def table(self, title, columns, rows):
        self.tables.append(rows)


def changed(settings: DataSettings, **values) -> DataSettings:
    return DataSettings.model_validate({**settings.model_dump(), **values})


def facts(prepared: PreparedData) -> tuple:
    """All that must be equal between two preparations of the same text, wherever it lies."""
    prepared.train.verify()
    prepared.valid.verify()
    summary = {key: value for key, value in prepared.summary.items() if key != "label"}
    files = sorted(str(path.relative_to(prepared.folder)) for path in prepared.folder.rglob("*"))
    return prepared.train.hash, prepared.valid.hash, prepared.tokenizer.hash, summary, files


@pytest.fixture
def whole(settings) -> tuple:
    """What an uninterrupted preparation by one worker gives; made once."""
    if not _WHOLE:
        root = str(Path(settings.root).parent / "whole")
        _WHOLE.append(facts(prepare(changed(settings, root=root), workers=1)))
    return _WHOLE[0]


def test_prepared_text_round_trips(settings, corpus):
    console = Listener()
    prepared = prepare(settings, console, workers=1)
    tokenizer = prepared.tokenizer
    seen = {}
    for store in (prepared.train, prepared.valid):
        assert len(store.manifest["shards"]) > 2  # else resuming would not be tested below
        for i, name in enumerate(store.names):
            ids = store.document(i).astype(np.int64)
            text = (corpus / name).read_bytes()
            assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
            assert tokenizer.decode(ids.tolist()).encode() == text
            assert tokenizer.token_bytes[ids].sum() == len(text) == store.bytes[i]
            seen[name] = store
        assert store.manifest["tokenizer"] == tokenizer.hash
    assert len(seen) == 37 and prepared.valid.n_documents == round(0.2 * 37)
    assert prepared.summary["train"]["tokens"] == prepared.train.n_tokens
    assert (
        prepared.summary["valid"]["share_at_least"]["512"] == (prepared.valid.lengths >= 512).mean()
    )
    assert prepared.summary["lossy_documents"] == 0
    assert prepared.train.bytes.sum() == prepared.summary["train"]["bytes"]
    assert console.tables and any("near-duplicates" in line for line in console.lines)
    assert not (prepared.folder / "work").exists()
    prepared.train.verify()


def test_second_call_is_a_no_op(settings, monkeypatch):
    first = prepare(settings, workers=1)
    before = {p: p.stat().st_mtime_ns for p in first.folder.rglob("*")}
    monkeypatch.setattr("data.preparation.prepare._Preparation", None)
    second = prepare(settings, workers=1)
    assert second.train.hash == first.train.hash and second.summary == first.summary
    assert {p: p.stat().st_mtime_ns for p in first.folder.rglob("*")} == before


def test_result_is_independent_of_workers(settings, whole):
    assert facts(prepare(settings, workers=3)) == whole


class Stop(Exception):
    pass


def stop_after(monkeypatch, target: str, calls: int) -> list:
    """Make the function `target` fail at its call number `calls`; the list of calls made."""
    module, name = target.rsplit(".", 1)
    real = getattr(sys.modules[module], name)
    made = []

    def counted(*args, **more):
        made.append(args)
        if len(made) > calls:
            raise Stop
        return real(*args, **more)

    monkeypatch.setattr(target, counted)
    return made


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        pytest.param("data.preparation.encoding.write_shard", 0, marks=pytest.mark.slow),
        ("data.preparation.encoding.write_shard", 5),
        pytest.param("data.preparation.encoding.write_json", 3, marks=pytest.mark.slow),
        ("data.preparation.spool.write_json", 0),
        pytest.param("data.preparation.spool.atomic", 3, marks=pytest.mark.slow),
        ("data.preparation.prepare.train_tokenizer", 0),
        pytest.param("data.preparation.prepare.write_json", 1, marks=pytest.mark.slow),
        ("data.preparation.prepare.write_manifest", 1),
        ("data.preparation.prepare.split_summary", 0),
    ],
)
def test_interrupted_preparation_gives_same_result(settings, whole, monkeypatch, target, calls):
    with monkeypatch.context() as patch:
        stop_after(patch, target, calls)
        with pytest.raises(Stop):
            prepare(settings, workers=1)
    with pytest.raises(DataError, match="no finished preparation"):
        open_prepared(prepared_folder(settings))
    assert facts(prepare(settings, workers=1)) == whole


def test_finished_shards_are_reused(settings, monkeypatch):
    with monkeypatch.context() as patch:
        made = stop_after(patch, "data.preparation.encoding.write_json", 4)
        with pytest.raises(Stop):
            prepare(settings, workers=1)
    again = []
    real = data.preparation.encoding.ChunkEncoder.run
    monkeypatch.setattr(
        data.preparation.encoding.ChunkEncoder,
        "run",
        lambda encoder, chunk: again.append(chunk) or real(encoder, chunk),
    )
    console = Listener()
    prepare(settings, console, workers=1)
    assert len(made) == 5 and ("text", 3) not in again and again[0] == ("text", 4)
    assert any(line.startswith("4 of ") for line in console.lines)


def test_killed_preparation_resumes(settings, whole):
    """SIGKILL to a process with two workers, as soon as the first shard is done."""
    code = (
        f"import sys; sys.path.insert(0, {str(HOUSE)!r})\nfrom data import DataSettings, prepare\n"
    )
    code += f"prepare(DataSettings.model_validate({settings.model_dump()!r}), workers=2)"
    process = subprocess.Popen([sys.executable, "-c", code])
    done = prepared_folder(settings) / "work" / "done"
    while not list(done.glob("text-*.json")) and process.poll() is None:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert facts(prepare(settings, workers=1)) == whole


def test_settings_determine_directory(settings, corpus):
    folders = {prepared_folder(settings)}
    for values in (
        {"valid_seed": 1},
        {"eos": False},
        {"tokenizer": {"name": "bytes"}},
        {"max_bytes": 9},
    ):
        folders.add(prepared_folder(changed(settings, **values)))
    assert len(folders) == 5
    assert (
        prepared_folder(changed(settings, packing="intra_document")) in folders
    )  # same shards, other batches
    (corpus / "new.txt").write_text("more")
    assert prepared_folder(settings) not in folders


def test_split_depends_on_seed_and_name(settings, corpus):
    first = set(prepare(settings, workers=1).valid.names)
    other = set(prepare(changed(settings, valid_seed=1), workers=1).valid.names)
    assert first != other and len(first) == len(other) == 7
    (corpus / "aaa.txt").write_text("one more document in front of all the others\n" * 4)
    grown = set(prepare(settings, workers=1).valid.names)
    assert len(grown ^ first) <= 2


@pytest.mark.parametrize(
    ("files", "fraction", "held", "suggested"),
    [
        (20, 0.05, 6, None),  # 1 by the fraction alone
        (17, 0.05, 1, 0.36),  # holding out 6 would take more than a third
        (37, 0.05, 6, None),
        (37, 0.2, 7, None),  # enough by the fraction
        (5, 0.05, 1, None),
        (37, 1, 37, None),
        (37, 0, 0, None),
    ],
)
def test_minimum_validation_size(settings, corpus, files, fraction, held, suggested):
    for path in sorted(corpus.rglob("*.txt"))[files:]:
        path.unlink()
    console = Listener()
    more = {"tokenizer": {"name": "bytes"}, "duplicate_threshold": 2, "valid_fraction": fraction}
    assert prepare(changed(settings, **more), console, workers=1).valid.n_documents == held
    lines = [line for line in console.lines if "held out" in line]
    assert len(lines) == (0 < held < 20)
    for line in lines:
        assert ("no confidence intervals" in line) == (held < 6) and ("fewer than 20" in line) == (
            held >= 6
        )
        assert (f"data.valid_fraction={suggested}" in line) == (suggested is not None)
    again = Listener()
    prepare(changed(settings, **more), again)
    assert [line for line in again.lines if "held out" in line] == lines


def test_few_validation_clusters_warn(settings, tmp_path):
    records = [
        {"text": f"words of {i} " * 9, "by": "AB"[i % 2] if i % 7 else None} for i in range(200)
    ]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    source = {"name": "files", "path": str(file), "cluster_key": "by"}
    more = {"tokenizer": {"name": "bytes"}, "duplicate_threshold": 2, "source": source}
    console = Listener()
    prepared = prepare(changed(settings, **more, valid_fraction=0.1), console, workers=1)
    alone = prepared.valid.clusters.count(None)
    units = 2 + alone
    assert alone and prepared.summary["valid"]["units"] == units < 20 == prepared.valid.n_documents
    assert any(line.startswith(f"{units} clusters held out") for line in console.lines)


def test_separate_validation_text(settings, tmp_path):
    (tmp_path / "held").mkdir()
    for i in range(3):
        (tmp_path / "held" / f"{i}.txt").write_text(
            f"held out text number {i} about positions\n" * (i + 2)
        )
    held = {"name": "files", "path": str(tmp_path / "held")}
    prepared = prepare(changed(settings, valid_source=held), workers=1)
    assert prepared.valid.names == ["0.txt", "1.txt", "2.txt"] and prepared.train.n_documents == 37
    prepared.train.verify()
    prepared.valid.verify()


def test_near_duplicates_of_validation_text_are_excluded(settings, corpus, tmp_path):
    held = tmp_path / "held"
    held.mkdir()
    rng = random.Random(1)
    unseen = " ".join("".join(rng.choices("klmnop", k=5)) for _ in range(600))
    (held / "v.txt").write_text(unseen)
    (corpus / "copy.txt").write_text(unseen.upper().replace(" ", "\n"))
    (corpus / "part.txt").write_text(" ".join(unseen.split()[100:400]))
    source = {"name": "files", "path": str(held)}
    prepared = prepare(changed(settings, valid_source=source), workers=1)
    figures = prepared.summary["near_duplicates"]
    assert (
        not {"copy.txt", "part.txt"} & set(prepared.train.names)
        and prepared.train.n_documents == 37
    )
    assert figures["documents"] == 2 and figures["shingles_remaining"] == 0
    size = sum(path.stat().st_size for path in corpus.rglob("*.txt"))
    copied = sum((corpus / name).stat().st_size for name in ("copy.txt", "part.txt"))
    assert figures["share_of_bytes"] == pytest.approx(copied / size)
    off = prepare(changed(settings, valid_source=source, duplicate_threshold=2), workers=1)
    assert off.train.n_documents == 39 and off.summary["near_duplicates"]["documents"] is None


def test_all_or_nothing_in_validation(settings):
    everything = prepare(
        changed(settings, valid_fraction=1, tokenizer={"name": "bytes"}), workers=1
    )
    assert (everything.train.n_documents, everything.valid.n_documents) == (0, 37)
    nothing = prepare(changed(settings, valid_fraction=0), workers=1)
    assert (nothing.train.n_documents, nothing.valid.n_documents) == (37, 0)
    with pytest.raises(DataError, match="no training text to train a tokenizer"):
        prepare(changed(settings, valid_fraction=1), workers=1)


def test_invalid_files_are_counted(settings, corpus):
    (corpus / "empty.txt").write_text("")
    (corpus / "empty2.txt").write_text("\n")
    (corpus / "binary.txt").write_bytes(b"\0\1")
    (corpus / "latin.txt").write_bytes(b"caf\xe9")
    console = Listener()
    prepared = prepare(settings, console, workers=1)
    assert prepared.summary["passed_over"] == {"empty": 2, "binary": 1, "not UTF-8": 1}
    assert "skipped 2 documents: empty (such as empty.txt)" in console.lines


def test_empty_corpus_raises(settings, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "bad" / "b.txt").write_text("")
    source = {"name": "files", "path": str(tmp_path / "bad")}
    with pytest.raises(
        DataError, match=r"/bad has no usable text: 1 not UTF-8 \(such as a.txt\); 1 empty"
    ) as found:
        prepare(changed(settings, source=source), workers=1)
    assert "text_key" not in str(found.value)  # a folder of text has no keys
    (tmp_path / "bad" / "b.txt").write_text("one usable text\n" * 30)
    with pytest.raises(DataError, match="a single document"):
        prepare(changed(settings, source=source), workers=1)


def test_vocabulary_too_large(settings):
    with pytest.raises(DataError, match=r"vocab_size=30000 is too large.* at most \d+"):
        prepare(
            changed(settings, tokenizer={"name": "sentencepiece", "vocab_size": 30000}), workers=1
        )
    assert prepare(settings, workers=1).tokenizer.vocab_size == 400


def test_max_bytes_and_tokenizer_sample(settings):
    prepared = prepare(changed(settings, max_bytes=20_000), workers=1)
    total = prepared.train.bytes.sum() + prepared.valid.bytes.sum()
    assert 20_000 <= total < 20_000 + 8_000
    tokenizer = {"name": "sentencepiece", "vocab_size": 350, "train_bytes": 9000}
    sampled = prepare(changed(settings, tokenizer=tokenizer), workers=1).summary
    used = sampled["tokenizer"]["bytes_used"]
    assert 4500 < used <= 9000
    assert sampled["tokenizer"]["unused_share"] == pytest.approx(
        1 - used / sampled["train"]["bytes"]
    )


def test_byte_level_bpe(settings, tmp_path):
    """Trained, and then read from the saved file; other texts of a mixture have the same tokenizer."""
    trained = prepare(
        changed(settings, tokenizer={"name": "huggingface", "vocab_size": 300}), workers=2
    )
    tokenizer = trained.tokenizer
    assert isinstance(tokenizer, HuggingFaceTokenizer) and trained.summary["lossy_documents"] == 0
    assert trained.summary["tokenizer"]["bytes_used"] > 0
    document = trained.train.document(0)
    assert (document[0], document[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.token_bytes[document].sum() == trained.train.bytes[0]
    file = {"name": "huggingface", "model": str(trained.folder / "tokenizer" / "tokenizer.json")}
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "a.txt").write_text("another text " * 30)
    source = {"name": "files", "path": str(extra)}
    mixed = prepare(
        changed(settings, tokenizer=file, mixture=[{"share": 0.25, "source": source}]), workers=1
    )
    assert {text.tokenizer.hash for text in mixed.texts} == {tokenizer.hash} and len(
        mixed.texts
    ) == 2
    assert mixed.train.hash == trained.train.hash


def test_lossy_documents_are_counted(settings, tmp_path, capsys):
    """NFC composes an e and an accent in one document."""
    trained = prepare(
        changed(settings, tokenizer={"name": "huggingface", "vocab_size": 300}), workers=1
    )
    spec = json.loads((trained.folder / "tokenizer" / "tokenizer.json").read_text())
    file = tmp_path / "nfc" / "tokenizer.json"
    file.parent.mkdir()
    file.write_text(json.dumps(spec | {"normalizer": {"type": "NFC"}}))
    (tmp_path / "corpus" / "accent.txt").write_text("cafe\u0301 " * 40)
    tokenizer = {"name": "huggingface", "model": str(file)}
    found = prepare(changed(settings, tokenizer=tokenizer, bos=False, eos=False), workers=1)
    assert found.summary["lossy_documents"] == 1
    assert found.summary["tokenizer"]["normalization"] == "NFC"


@needs_stories
def test_existing_model_and_missing_symbols(settings, tmp_path):
    foreign = {"name": "sentencepiece", "model": str(STORIES / "tok512.model")}
    prepared = prepare(changed(settings, tokenizer=foreign), workers=1)
    assert prepared.tokenizer.vocab_size == 512 and prepared.train.n_documents > 25
    with pytest.raises(DataError, match="does not exist"):
        prepare(changed(settings, tokenizer={**foreign, "model": str(tmp_path / "no.model")}))


def test_corruption_after_preparation(settings):
    folder = prepare(settings, workers=1).folder
    shard = next((folder / "valid").glob("*.tokens"))
    good = shard.read_bytes()
    shard.write_bytes(good[:-2])
    with pytest.raises(DataError, match=rf"{shard.name} is damaged.* delete {folder} and prepare"):
        prepare(settings, workers=1)
    shard.write_bytes(good)
    (folder / "tokenizer" / "tokenizer.model").unlink()
    with pytest.raises(DataError, match=r"tokenizer.model is missing"):
        open_prepared(folder)


def test_full_disk_in_worker_raises(settings, monkeypatch):
    """A worker's error comes back as the error it was: here the train folder cannot be made."""
    folder = prepared_folder(settings)
    folder.mkdir(parents=True)
    (folder / "train").write_text("a file where a folder must be")
    with pytest.raises(OSError, match="train"):
        prepare(settings, workers=2)


def test_long_chinese_text(settings, tmp_path):
    rng = random.Random(2)
    common = "天下大势分久必合合久必分周末七国争"
    folder = tmp_path / "chinese"
    folder.mkdir()
    for i in range(4):
        text = "".join(rng.choice(common) for _ in range(900)) + "罕㐀𠮷\u2581\t\n"
        (folder / f"{i}.txt").write_text(text)
    source = {"name": "files", "path": str(folder)}
    prepared = prepare(changed(settings, source=source, valid_fraction=0.25), workers=1)
    assert prepared.summary["lossy_documents"] == 0
    store = prepared.train
    text = (folder / store.names[0]).read_text()
    assert prepared.tokenizer.decode(store.document(0).tolist()) == text
    assert TokenStore(store.folder).hash == store.hash


def test_incomplete_files_of_killed_processes_are_removed(settings):
    folder = prepared_folder(settings)
    (folder / "train").mkdir(parents=True)
    (folder / "train" / ".00000.tokens.77.tmp").write_text("half")
    assert prepare(settings, workers=1).folder == folder
    assert not list(folder.rglob("*.tmp"))


def test_concurrent_preparation_waits(tmp_path):
    entered = threading.Event()

    def enter():
        with data.preparation.prepare._alone(tmp_path, Listener()):
            entered.set()

    second = threading.Thread(target=enter)
    with open(tmp_path / ".lock", "w") as first:
        assert locked(first)
        second.start()
        assert not entered.wait(0.3)
    second.join()
    assert entered.is_set()
