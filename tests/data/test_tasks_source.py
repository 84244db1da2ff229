"""Tasks as a source of training text, alone and mixed with documents."""

from itertools import pairwise

import pytest

from data import ByteTokenizer, DataError, DataSettings, prepare
from data.data_settings import TaskSource
from data.sources import GENERATED, open_source
from data.sources.filler import Filler
from data.tasks import is_for
from data.tasks.closed import RecallTask
from data.text_settings import FillerSource

IN_FILLER = {"name": "passkey", "haystack": {"name": "filler"}}


def test_items_have_requested_length(tmp_path):
    settings = TaskSource(
        task={"name": "passkey", "haystack": {"name": "filler"}}, items=12, length=(100, 180)
    )
    source = open_source(settings)
    got = list(source.documents())
    assert (
        len(got) == 12
        and len({d.name for d in got}) == 12
        and all(d.name.startswith(GENERATED) for d in got)
    )
    sizes = [len(d.text.encode()) for d in got]
    assert min(sizes) >= 100 and max(sizes) <= 180 and len(set(sizes)) > 6
    for start in (0, 5, 12, 13):
        assert list(open_source(settings).documents(start)) == got[start:]
    fixed = open_source(settings.model_copy(update={"length": 128}))
    assert {len(d.text.encode()) for d in fixed.documents()} == {128}
    padded = [d.text for d in open_source(settings.model_copy(update={"pad": True})).documents()]
    assert [text.rstrip("\n") for text in padded] == [d.text.rstrip("\n") for d in got]
    assert {len(text.encode()) for text in padded} == {180}
    prints = {source.fingerprint(), fixed.fingerprint(), open_source(settings).fingerprint()}
    assert len(prints) == 2
    other = open_source(settings.model_copy(update={"seed": 1}))
    assert not {d.text for d in other.documents()} & {d.text for d in got}


def test_multibyte_characters_are_not_split(tmp_path):
    (tmp_path / "a").mkdir()
    names = [name for name in (f"{i}.txt" for i in range(40)) if is_for(name, "training")]
    for name in names:
        (tmp_path / "a" / name).write_text("Es regnete über die Höhen, süß und öde. " * 20)
    haystack = {"name": "files", "path": str(tmp_path / "a")}
    settings = TaskSource(task={"name": "needle", "haystack": haystack}, items=40, length=160)
    texts = [d.text for d in open_source(settings).documents()]
    assert all("\ufffd" not in text and 157 <= len(text.encode()) <= 160 for text in texts)
    for name in names:
        (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / names[0]).write_text("too short")
    with pytest.raises(DataError, match=r"none of the 1 documents of .* has 160 tokens"):
        list(open_source(settings).documents())


def test_mixture_has_requested_proportion(corpus, tmp_path):
    text = {"name": "files", "path": str(corpus)}
    task = {"name": "recall", "queries": 3}
    source = {"name": "task", "task": task, "text": text, "share": 0.25, "length": 120}
    documents = list(open_source(TaskSource(**source)).documents())
    of_items = sum(len(d.text.encode()) for d in documents if d.name.startswith(GENERATED))
    total = sum(len(d.text.encode()) for d in documents)
    assert total * 0.25 <= of_items < total * 0.25 + 130
    assert [d for d in documents if not d.name.startswith(GENERATED)] == list(
        open_source(TaskSource(**source).text).documents()
    )
    kinds = [d.name.startswith(GENERATED) for d in documents]
    assert sum(a != b for a, b in pairwise(kinds)) > 10  # interleaved, not in blocks
    assert list(open_source(TaskSource(**source)).documents(9)) == documents[9:]
    settings = DataSettings(
        source=source,
        tokenizer={"name": "bytes"},
        valid_fraction=0.2,
        root=str(tmp_path / "prepared"),
    )
    prepared = prepare(settings, workers=1)
    items = [split["items"] for split in (prepared.summary["train"], prepared.summary["valid"])]
    assert sum(items) == sum(kinds)  # none is taken for a copy of another
    assert "files" not in prepared.folder.name and prepared.folder.name.startswith("corpus-recall-")


def test_items_in_same_haystack_are_not_duplicates(tmp_path):
    source = {
        "name": "task",
        "items": 60,
        "length": 400,
        "task": {"name": "passkey", "haystack": {"name": "filler"}},
    }
    settings = DataSettings(
        source=source,
        tokenizer={"name": "bytes"},
        valid_fraction=0.5,
        root=str(tmp_path / "prepared"),
    )
    prepared = prepare(settings, workers=1)
    assert prepared.train.n_documents == prepared.valid.n_documents == 30
    assert prepared.summary["train"]["items"] == 30
    text = ByteTokenizer().decode(prepared.train.document(0).tolist())
    assert "Key " in text and "The grass is green." in text


def test_filler_sentences_are_shared():
    documents = [next(iter(Filler(FillerSource(), "data.source").documents(k))) for k in (0, 1)]
    assert documents[0].text != documents[1].text and documents[0].name != documents[1].name
    assert {s.strip() for s in documents[0].text.split(".")} == {
        "", "The grass is green", "The sky is blue", "The sun is yellow", "Here we go", "There and back again"
    }  # fmt: skip


def test_at_most_one_hundred_haystacks_are_read():
    haystacks = open_source(TaskSource(task=IN_FILLER, length=120))._haystacks(ByteTokenizer())
    assert haystacks is not None and len(haystacks) == 100


def test_invalid_settings_are_rejected():
    with pytest.raises(ValueError, match="minimum, maximum"):
        TaskSource(length=(80, 20))
    with pytest.raises(ValueError, match="items and text exclude each other"):
        TaskSource(items=5, text={"name": "stdlib"})
    with pytest.raises(ValueError, match="choices"):
        RecallTask(choices=65)
    short = TaskSource(length=20, items=3, task=IN_FILLER)
    with pytest.raises(DataError, match="20 tokens is too short for the task passkey"):
        list(open_source(short).documents())
