"""Tasks as a source of training text, alone and mixed with documents."""

from itertools import pairwise

import pytest

from data import ByteTokenizer, DataError, DataSettings, prepare
from data.data_settings import TaskSource
from data.sources import GENERATED, open_source
from data.tasks import is_for
from data.tasks.recall import RecallTask

IN_FILLER = {"name": "passkey", "haystack": {"name": "filler"}}


def items(settings: TaskSource, start: int = 0) -> list:
    return list(open_source(settings).documents(start))


def sizes(settings: TaskSource) -> list[int]:
    return [len(document.text.encode()) for document in items(settings)]


def test_items_have_requested_length():
    settings = TaskSource(task=IN_FILLER, items=12, length=(100, 180))
    documents = items(settings)
    assert len({document.name for document in documents}) == len(documents) == 12
    assert all(document.name.startswith(GENERATED) for document in documents)
    assert 100 <= min(sizes(settings)) < max(sizes(settings)) <= 180
    for start in (0, 5, 12, 13):
        assert items(settings, start) == documents[start:]
    assert set(sizes(settings.model_copy(update={"length": 128}))) == {128}
    other = settings.model_copy(update={"seed": 1})
    assert not {document.text for document in items(other)} & {d.text for d in documents}
    prints = [open_source(one).fingerprint() for one in (settings, other, settings)]
    assert len(set(prints)) == 2


def test_multibyte_characters_are_not_split(tmp_path):
    names = [name for name in (f"{i}.txt" for i in range(40)) if is_for(name, "training")]
    for name in names:
        (tmp_path / name).write_text("Es regnete über die Höhen, süß und öde. " * 20)
    haystack = {"name": "files", "path": str(tmp_path)}
    settings = TaskSource(task={"name": "needle", "haystack": haystack}, items=40, length=160)
    assert not any("\ufffd" in document.text for document in items(settings))
    assert set(sizes(settings)) <= {157, 158, 159, 160}
    for name in names[1:]:
        (tmp_path / name).unlink()
    (tmp_path / names[0]).write_text("too short")
    with pytest.raises(DataError, match="160 tokens"):
        items(settings)


def test_mixture_has_requested_proportion(corpus, tmp_path):
    text = {"name": "files", "path": str(corpus)}
    task = {"name": "recall", "queries": 3}
    source = TaskSource(task=task, text=text, share=0.25, length=120)
    documents = items(source)
    is_item = [document.name.startswith(GENERATED) for document in documents]
    total = sum(sizes(source))
    of_items = sum(n for n, made in zip(sizes(source), is_item, strict=True) if made)
    assert total * 0.25 <= of_items < total * 0.25 + 130
    of_text = [document for document, made in zip(documents, is_item, strict=True) if not made]
    assert of_text == list(open_source(source.text).documents())
    assert sum(a != b for a, b in pairwise(is_item)) > 10  # interleaved, not in blocks
    assert items(source, 9) == documents[9:]
    root = str(tmp_path / "prepared")
    tokenizer = {"name": "bytes"}
    settings = DataSettings(source=source, tokenizer=tokenizer, valid_fraction=0.2, root=root)
    summary = prepare(settings, workers=1).summary
    assert summary["label"].startswith("corpus-recall-")
    # none is taken for a copy of another
    assert summary["train"]["items"] + summary["valid"]["items"] == sum(is_item)


def test_items_in_same_haystack_are_not_duplicates(tmp_path):
    source = TaskSource(task=IN_FILLER, items=60, length=400)
    root = str(tmp_path / "prepared")
    tokenizer = {"name": "bytes"}
    settings = DataSettings(source=source, tokenizer=tokenizer, valid_fraction=0.5, root=root)
    prepared = prepare(settings, workers=1)
    assert prepared.train.n_documents == prepared.valid.n_documents == 30
    text = ByteTokenizer().decode(prepared.train.document(0).tolist())
    assert "Key " in text and "The grass is green." in text


def test_invalid_settings_are_rejected():
    for keys in ({"length": (80, 20)}, {"items": 5, "text": {"name": "stdlib"}}):
        with pytest.raises(ValueError, match=next(iter(keys))):
            TaskSource(**keys)
    with pytest.raises(ValueError, match="choices"):
        RecallTask(choices=65)
    with pytest.raises(DataError, match="20 tokens"):
        items(TaskSource(length=20, items=3, task=IN_FILLER))
