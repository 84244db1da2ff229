"""Tasks in text as training text."""

import re

import pytest

from data import DataError, DataSettings
from data.data_settings import TaskSource
from data.preparation.preparation import prepare
from data.sources import open_source
from data.tasks import is_for


@pytest.fixture(autouse=True)
def _short_filler(monkeypatch):
    monkeypatch.setattr("data.sources.synthetic.LENGTH", 1000)


IN_FILLER = {"name": "passkey", "haystack": {"name": "filler"}}


def items(start: int = 0, **settings) -> list:
    return list(open_source(TaskSource(**settings)).documents(start))


def sizes(**settings) -> list[int]:
    return [len(document.text.encode()) for document in items(**settings)]


def test_items_have_requested_length():
    base = {"task": IN_FILLER, "items": 12, "length": (100, 180)}
    documents = items(**base)
    assert len({document.name for document in documents}) == len(documents) == 12
    assert 100 <= min(sizes(**base)) < max(sizes(**base)) <= 180
    for start in (0, 5, 12, 13):
        assert items(start, **base) == documents[start:]
    assert set(sizes(**base | {"length": 128})) == {128}
    assert not {d.text for d in items(**base, seed=1)} & {d.text for d in documents}
    first, other = (open_source(TaskSource(**base, seed=seed)).fingerprint() for seed in (0, 1))
    assert first != other
    with pytest.raises(DataError, match="20 tokens"):
        items(**base | {"length": 20})


def test_multibyte_characters_are_not_split(tmp_path):
    names = [name for name in (f"{i}.txt" for i in range(40)) if is_for(name, "training")]
    for name in names:
        (tmp_path / name).write_text("Es regnete über die Höhen, süß und öde. " * 20)
    haystack = {"name": "files", "path": str(tmp_path)}
    base = {"task": {"name": "needle", "haystack": haystack}, "items": 40, "length": 160}
    assert not any("\ufffd" in document.text for document in items(**base))
    assert set(sizes(**base)) <= {157, 158, 159, 160}
    for name in names:
        (tmp_path / name).write_text("too short")
    with pytest.raises(DataError, match="160 tokens"):
        items(**base)


def test_items_are_mixed_with_text_and_are_no_duplicates(settings):
    """In one haystack, alone and in a mixture, whose share is one of training tokens."""
    source = {"name": "task", "task": IN_FILLER, "items": 60, "length": 400}
    alone = DataSettings(
        source=source, tokenizer={"name": "bytes"}, valid_fraction=0.5, root=settings.root
    )
    prepared = prepare(alone, workers=1)
    assert prepared.train.n_documents == prepared.valid.n_documents == 30
    text = prepared.tokenizer.decode(prepared.train.document(0).tolist())
    assert "Key " in text
    assert "The grass is green." in text
    mixture = [{"share": 0.25, "source": source}]
    mixed = DataSettings.model_validate(settings.model_dump() | {"mixture": mixture})
    (other,) = prepare(mixed, workers=1).others
    assert other.train.n_documents == 60


def test_held_out_text_is_no_haystack(settings, corpus):
    """Of an item in a mixture, in the corpus of which a fifth is held out."""
    task = {"name": "passkey", "keys": 1, "haystack": {"name": "files", "path": str(corpus)}}
    source = {"name": "task", "task": task, "items": 60, "length": 200}
    asked = settings.model_dump() | {"tokenizer": {"name": "bytes"}}
    asked["mixture"] = [{"share": 0.25, "source": source}]

    def haystacks(**changes):
        prepared = prepare(DataSettings.model_validate(asked | changes), workers=1)
        stores = (prepared.train, prepared.valid, prepared.others[0].train)
        train, valid, items = (
            [
                prepared.tokenizer.decode(store.document(i).tolist())
                for i in range(store.n_documents)
            ]
            for store in stores
        )
        assert len(items) == 60
        read = [max(re.split(r"\nKey .*\n?", item), key=len) for item in items]
        return [sum(any(s in text for text in texts) for s in read) for texts in (train, valid)]

    in_train, in_valid = haystacks(duplicate_threshold=2)
    assert in_train + in_valid >= 60
    assert in_valid > 0
    assert haystacks() == [60, 0]


def test_training_on_the_items_of_validation_is_refused(settings):
    source = {"name": "task", "task": IN_FILLER, "items": 20, "length": 400}
    asked = settings.model_dump() | {"source": source, "valid_source": source | {"items": 5}}
    with pytest.raises(DataError, match=r"data\.source\.seed"):
        prepare(DataSettings.model_validate(asked), workers=1)
    asked["valid_source"]["seed"] = 1
    for length, seed, place in ((400, 1, "mixture"), (300, 1, "mixture"), (400, 0, None)):
        asked["mixture"] = [{"share": 0.5, "source": source | {"length": length, "seed": seed}}]
        mixed = DataSettings.model_validate(asked)
        if place is None:
            prepare(mixed, workers=1)
        else:
            with pytest.raises(DataError, match=r"data\.mixture\.0\.source\.seed"):
                prepare(mixed, workers=1)
