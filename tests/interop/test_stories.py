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
from model import TokenPositions, Transformer
from tests.corpora import STORIES, needs_stories
from tests.interop.exact import with_exact_arithmetic

pytestmark = needs_stories


@pytest.fixture(scope="module")
def reference() -> dict:
    return json.loads((STORIES / "reference.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def imported() -> Transformer:
    return build_model(read_folder(STORIES / "hf")).model


def logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), TokenPositions.plain(len(ids)))[0]


def test_reference_config_and_prompt(reference, imported):
    ours = imported.settings
    message = reference["config"]
    found = (ours.dim, ours.ffn_dim, ours.layers, ours.heads, ours.kv_heads, imported.vocab_size)
    keys = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")
    assert found == tuple(message[key] for key in keys)
    assert (imported.train_length, ours.position.theta) == (
        message["max_seq_len"],
        message["rope_theta"],
    )
    assert (ours.norm_eps, ours.tie_embeddings) == (message["norm_eps"], message["tied"])
    tokenizer = load_tokenizer_file(STORIES / "tok512.model")
    assert [tokenizer.bos_id, *tokenizer.encode("Once upon a time")] == reference["prompt_ids"]


def test_logits_in_float64(reference):
    ids = reference["greedy_ids_bos_plus_200"]
    theirs = LlamaForCausalLM.from_pretrained(STORIES / "hf", dtype=torch.float64).eval()
    with torch.no_grad():
        rounded = theirs(torch.tensor([ids])).logits[0]
        exact = with_exact_arithmetic(theirs)(torch.tensor([ids])).logits[0]
    assert (exact - rounded).abs().max() < 1e-4
    ours = build_model(read_folder(STORIES / "hf")).model.double()
    torch.testing.assert_close(logits(ours, ids), exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        (torch.float32, True),
        (torch.float64, False),
        pytest.param(torch.float32, False, marks=pytest.mark.slow),
        pytest.param(torch.float64, True, marks=pytest.mark.slow),
    ],
)
def test_greedy_generation_matches_reference(reference, cache, dtype):
    model = build_model(read_folder(STORIES / "hf")).model.to(dtype)
    tokenizer = load_tokenizer_file(STORIES / "tok512.model")
    expected = reference["greedy_ids_bos_plus_200"]
    stream = TextStream(tokenizer, begins=True)
    ids = [tokenizer.bos_id]
    text = ""
    for (new,) in Generation(
        model, [ids], 200, SamplingParams(temperature=0), eos_ids=tokenizer.eos_ids, cache=cache
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
