"""A trained checkpoint, imported: the logits of transformers and llama2.c's own greedy text, token
by token.

Skipped if the shared corpora are not beside the repository; SEXTANT_CORPORA names another folder.
"""

import io
import json

import pytest
import sentencepiece
import torch
from transformers import LlamaForCausalLM

from data.tokenizers import load_tokenizer_file
from errors import DataError
from generation.decoding import Generation
from generation.sampling import SamplingParams
from generation.text_stream import TextStream
from interop import InteropError, build_model, read_folder
from interop.runs import write_run
from model import TokenPositions
from tests.corpora import STORIES, needs_stories
from tests.interop.models import double_precision, in_double

pytestmark = needs_stories


@pytest.fixture(scope="module")
def reference() -> dict:
    return json.loads((STORIES / "reference.json").read_text(encoding="utf-8"))


@torch.no_grad()
def test_logits_in_float64(reference):
    ids = torch.tensor([reference["greedy_ids_bos_plus_200"]])
    theirs = LlamaForCausalLM.from_pretrained(STORIES / "hf").eval()
    ours = build_model(read_folder(STORIES / "hf")).model
    with double_precision():
        expected = in_double(theirs)(ids).logits
        found = ours.double()(ids, TokenPositions.plain(ids.shape[1]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


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
    other = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some other words", "entirely"] * 9),
        model_writer=other,
        vocab_size=20,
        model_type="char",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    file = tmp_path / "other.model"
    file.write_bytes(other.getvalue())
    with pytest.raises(InteropError, match=r"other.model is not the tokenizer .* vocab_size 512"):
        write_run(read_folder(STORIES / "hf"), tmp_path / "run", file)
    assert not (tmp_path / "run").exists()
    file.write_bytes(b"no model")
    with pytest.raises(DataError, match=r"other.model is not a sentencepiece model"):
        write_run(read_folder(STORIES / "hf"), tmp_path / "run", file)
