"""Token stores: round trips, and damage reported by file."""

import json

import numpy as np
import pytest

from data import DataError, TokenStore
from tests.data.stores import write_store

U2 = np.dtype("<u2")
DOCUMENTS = [[1, 2, 3], [65535], [4, 0, 4, 4, 4], [9, 8]]


def test_round_trip(tmp_path):
    store = write_store(tmp_path, DOCUMENTS, [2, 0, 1, 1], U2)
    assert [store.document(i).tolist() for i in range(4)] == DOCUMENTS
    assert store.lengths.tolist() == [3, 1, 5, 2]
    assert store.lengths.dtype == np.int64
    assert store.bytes.tolist() == [0, 3, 6, 9]
    assert store.names == ["d0", "d1", "d2", "d3"]
    assert store.clusters == [None, "A", None, "A"]
    assert (store.n_documents, store.n_tokens, store.dtype) == (4, 11, np.uint16)
    assert store.has_bos
    assert not store.has_eos
    with pytest.raises(ValueError, match="read-only"):
        store.document(0)[0] = 7
    largest = max(map(max, DOCUMENTS))
    store.verify(largest + 1)
    with pytest.raises(
        DataError, match=f"has the id {largest}, but the tokenizer has {largest} ids"
    ):
        store.verify(largest)
    # It seeds the draw of evaluation targets, so another format would change published numbers.
    assert store.hash == "22cf1e18907e6daab7cc048734b474a8266c95965eb65d5f603c2f3ed43cb45a"


@pytest.mark.parametrize("name", ["00001.tokens", "00000.documents.npy", "00001.names.json"])
def test_corruption_is_named(tmp_path, name):
    store = write_store(tmp_path, DOCUMENTS, [2, 2])
    path = tmp_path / name
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    fix = f"delete {tmp_path}"
    with pytest.raises(DataError, match=rf"{name} .*{len(good)}.*{fix}"):
        TokenStore(tmp_path)
    path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])  # same size, one bit
    with pytest.raises(DataError, match=rf"{name} .*hash.*{fix}"):
        store.verify()
    path.unlink()
    with pytest.raises(DataError, match=name):
        TokenStore(tmp_path)
    path.write_bytes(good)
    TokenStore(tmp_path).verify()


def test_corrupted_manifest(tmp_path):
    write_store(tmp_path, DOCUMENTS, [4])
    path = tmp_path / "manifest.json"
    good = path.read_bytes()
    edited = json.dumps(json.loads(good) | {"has_bos": False}).encode()
    for content in (good[:100], edited):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"manifest\.json"):
            TokenStore(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"scripts/prepare\.py"):
        TokenStore(tmp_path)
