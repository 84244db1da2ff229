"""Token stores: round trips, and damage reported by file."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data import DataError, TokenStore
from data.store import EncodedDocument, token_dtype, write_manifest, write_shard


def write(folder, documents: list[list[int]], groups: list[int], kind: str = "<u2") -> TokenStore:
    """documents cut into shards of the sizes `groups`."""
    entries = []
    i = 0
    dtype = np.dtype(kind)
    for shard, size in enumerate(groups):
        part = range(i, i + size)
        encoded = (
            EncodedDocument(f"d{k}", "A" if k % 2 else None, np.array(documents[k]), 3 * k, k + 5)
            for k in part
        )
        entry = write_shard(folder, f"{shard:05d}", dtype, encoded)
        assert (entry is None) == (size == 0)
        entries += [entry] if entry else []
        i += size
    write_manifest(
        folder,
        dtype,
        entries,
        tokenizer="abc",
        has_bos=True,
        has_eos=False,
        source={"path": str(folder)},
    )
    return TokenStore(folder)


DOCUMENTS = [[1, 2, 3], [65535], [4, 0, 4, 4, 4], [9, 8]]


def test_round_trip(tmp_path):
    store = write(tmp_path, DOCUMENTS, [2, 0, 1, 1])
    assert [store.document(i).tolist() for i in range(4)] == DOCUMENTS
    assert store.lengths.tolist() == [3, 1, 5, 2] and store.lengths.dtype == np.int64
    assert store.bytes.tolist() == [0, 3, 6, 9] and store.numbers.tolist() == [5, 6, 7, 8]
    assert store.names == ["d0", "d1", "d2", "d3"] and store.clusters == [None, "A", None, "A"]
    assert (store.n_documents, store.n_tokens, store.dtype) == (4, 11, np.uint16)
    assert store.has_bos and not store.has_eos
    for i in (-1, 4):
        with pytest.raises(IndexError):
            store.document(i)
    with pytest.raises(ValueError, match="read-only"):
        store.document(0)[0] = 7
    store.verify()


@hypothesis_settings(max_examples=12, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9), min_size=1, max_size=8),
    st.data(),
)
def test_documents_in_any_shard_layout(tmp_path_factory, documents, data):
    cut = data.draw(st.integers(0, len(documents)))
    store = write(tmp_path_factory.mktemp("s"), documents, [cut, len(documents) - cut], "<u4")
    assert [store.document(i).tolist() for i in range(store.n_documents)] == documents


def test_ids_use_smallest_dtype():
    assert token_dtype(65536) == np.uint16 and token_dtype(65537) == np.uint32


def test_empty_store(tmp_path):
    store = write(tmp_path, [], [0])
    assert (store.n_documents, store.n_tokens, store.names) == (0, 0, [])
    store.verify()


def test_hash_of_stored_tokens_is_stable(tmp_path):
    # It seeds the draw of evaluation targets, so a changed file format would change published numbers.
    golden = "22cf1e18907e6daab7cc048734b474a8266c95965eb65d5f603c2f3ed43cb45a"
    assert write(tmp_path, DOCUMENTS, [2, 0, 1, 1]).hash == golden


def test_hash_depends_on_content(tmp_path):
    first = write(tmp_path / "a", DOCUMENTS, [2, 2])
    assert write(tmp_path / "b", DOCUMENTS, [2, 2]).hash == first.hash
    changed = [*DOCUMENTS[:3], [9, 7]]
    assert write(tmp_path / "c", changed, [2, 2]).hash != first.hash


@pytest.mark.parametrize("name", ["00001.tokens", "00000.documents.npy", "00001.names.json"])
def test_corruption_is_named(tmp_path, name):
    store = write(tmp_path, DOCUMENTS, [2, 2])
    path = tmp_path / name
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    fix = f"delete {tmp_path} and prepare the data again"
    with pytest.raises(DataError, match=rf"{name} is damaged.*{len(good)}.*{fix}"):
        TokenStore(tmp_path)
    with pytest.raises(DataError, match=name):
        store.verify()
    path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])  # same size, one bit
    with pytest.raises(DataError, match=rf"{name} does not match its recorded hash.*{fix}"):
        store.verify()
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        TokenStore(tmp_path)
    path.write_bytes(good)
    TokenStore(tmp_path).verify()


def test_corrupted_manifest(tmp_path):
    write(tmp_path, DOCUMENTS, [4])
    path = tmp_path / "manifest.json"
    good = path.read_bytes()
    path.write_bytes(good[:100])
    with pytest.raises(DataError, match=r"manifest.json is damaged"):
        TokenStore(tmp_path)
    edited = json.loads(good)
    edited["has_bos"] = False
    path.write_text(json.dumps(edited))
    with pytest.raises(DataError, match=r"manifest.json does not match its recorded hash"):
        TokenStore(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"has no prepared data; run scripts/prepare\.py"):
        TokenStore(tmp_path)
