"""A trained checkpoint, imported: llama2.c's own greedy text, token by token.

Skipped if the shared corpora are not beside the repository; SEXTANT_CORPORA names another folder.
"""

import json

import pytest

from data.tokenizers import load_tokenizer_file
from errors import DataError, InteropError
from generation.decoding import Generation
from generation.sampling import SamplingParams
from generation.text_stream import TextStream
from interop.build import build_model
from interop.checkpoint import read_folder
from interop.imported_runs import write_run
from tests.corpora import STORIES, needs_stories
from tests.sentencepiece_models import sentencepiece_model

pytestmark = needs_stories


@pytest.fixture(scope="module")
def reference() -> dict:
    return json.loads((STORIES / "reference.json").read_text(encoding="utf-8"))


def test_greedy_generation_matches_reference(reference):
    model = build_model(read_folder(STORIES / "hf")).model
    tokenizer = load_tokenizer_file(STORIES / "tok512.model")
    expected = reference["greedy_ids_bos_plus_200"]
    stream = TextStream(tokenizer, begins=True)
    ids = [tokenizer.bos_id]
    text = ""
    for (new,) in Generation(
        model, [ids], 200, SamplingParams(temperature=0), eos_ids=tokenizer.eos_ids
    ):
        ids.append(new)
        text += stream.push(new)
        assert ids == expected[: len(ids)]
    assert len(ids) == 201
    assert text + stream.end() == reference["greedy_text"] == tokenizer.decode(expected)


def test_mismatched_tokenizer_is_rejected(tmp_path):
    file = tmp_path / "other.model"
    many = "".join(map(chr, range(0x4E00, 0x4F40)))
    file.write_bytes(sentencepiece_model([many] * 9, 700))
    with pytest.raises(InteropError, match=r"other.model is not the tokenizer .* vocab_size 512"):
        write_run(read_folder(STORIES / "hf"), tmp_path / "run", file)
    assert not (tmp_path / "run").exists()
    file.write_bytes(b"no model")
    with pytest.raises(DataError, match=r"other.model is not a sentencepiece model"):
        write_run(read_folder(STORIES / "hf"), tmp_path / "run", file)
