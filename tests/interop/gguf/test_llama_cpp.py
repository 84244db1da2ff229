"""llama.cpp loads the exports and computes the same: logits, greedy text and ids of text.

llama-cpp-python is no dependency, since it is compiled when it is installed: `pip install llama-cpp-python`.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data import ByteTokenizer, Tokenizer
from data.preparation.tokenizer_training import train_byte_level_bpe
from data.tokenizers import HuggingFaceTokenizer
from data.tokenizers.settings import HuggingFaceSettings
from interop import build_model
from interop.gguf import read_gguf, write_gguf
from interop.gguf.pretokenizers import PRE_TOKENIZERS
from model import ModelSettings, TokenPositions, Transformer
from tests.interop.gguf.files import random_model, write_model
from tests.interop.gguf.models import (
    ORIGINAL,
    SCHEMES,
    SIZES,
    TRAINED,
    VOCABULARY,
    logits,
    random_transformer,
)
from tests.interop.gguf.test_reading import CASES
from tests.interop.gguf.test_tokenizers import (
    CORPUS,
    STYLES,
    TEXTS,
    gpt2_keys,
    trained_bpe,
    trained_sentencepiece,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROMPT, NEW = list(b"The evaluation of long texts"), 60  # together beyond the trained length
QUICK = ("learned_rope", "partial", "windows_and_nope", "alibi")
in_turn = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCHEMES]
)


def llama_cpp(tmp_path: Path, jobs: list[dict]) -> dict[str, np.ndarray]:
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script, out = Path(__file__).with_name("llama_cpp_runner.py"), tmp_path / "out.npz"
    command = [sys.executable, str(script), str(tmp_path / "jobs.json"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out, allow_pickle=False) as found:
        return dict(found)


def trained(settings: dict) -> Transformer:
    """20 steps on the bytes of a document of this repository."""
    model = Transformer(ModelSettings.model_validate(SIZES | settings), VOCABULARY, TRAINED, ORIGINAL)
    model.initialize(0)
    data = torch.tensor(list(TEXT.encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(4)
    for _ in range(20):
        starts = torch.randint(len(data) - TRAINED - 1, (8,), generator=generator)
        windows = torch.stack([data[start : start + TRAINED + 1] for start in starts])
        positions = TokenPositions.plain(TRAINED)
        model(windows[:, :-1], positions, windows[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def check(name: str, found: dict[str, np.ndarray], expected: torch.Tensor, number: int = 0) -> None:
    error = np.abs(found[f"logits{number}"] - expected.numpy()).max() / float(expected.abs().max())
    assert error < 1e-4, (name, error)


@in_turn
def test_trained_run(name, tmp_path):
    """Logits past the trained length, and greedy text token by token."""
    model = trained(SCHEMES[name][2])
    write_gguf(model, ByteTokenizer(), tmp_path / "m.gguf")
    job = {"file": str(tmp_path / "m.gguf"), "ids": PROMPT, "new": NEW, "texts": ["x"]}
    found = llama_cpp(tmp_path, [job])
    greedy = found["greedy0"].tolist()
    expected = logits(model, PROMPT + greedy)
    check(name, found, expected[: len(PROMPT)])
    # Token by token: each is our most likely one after those before it, up to ties within rounding.
    steps = expected[len(PROMPT) - 1 : -1]
    chosen = steps.gather(1, torch.tensor(greedy)[:, None])[:, 0]
    assert (steps.max(-1).values - chosen <= 1e-4 * steps.abs().max()).all()
    assert float((steps.argmax(-1) == torch.tensor(greedy)).float().mean()) > 0.95
    assert len(set(greedy)) > 1
    assert found["first0"].tolist() == [256]  # BOS, as in our runs


@in_turn
def test_random_weights(name, tmp_path):
    """Weights for which each part of the model matters."""
    model = random_transformer(SCHEMES[name][2])
    write_gguf(model, ByteTokenizer(), tmp_path / "m.gguf")
    ids = np.random.default_rng(2).integers(0, 256, 100).tolist()
    found = llama_cpp(tmp_path, [{"file": str(tmp_path / "m.gguf"), "ids": ids}])
    check(name, found, logits(model, ids))


IMPORTED = ("llama", "llama-llama3", "llama-yarn", "smollm3", "qwen3", "phi3", "granite_swa", "ministral3")


@pytest.mark.slow
def test_files_of_other_models(tmp_path):
    """llama.cpp's own reading of files that we import, on the same ids."""
    jobs, expected = [], []
    ids = np.random.default_rng(2).integers(0, 53, 60).tolist()
    for name in IMPORTED:
        architecture, model_type, config, about, extra, permuted = CASES[name]
        theirs = random_model(model_type, **config)
        heads = (theirs.config.num_attention_heads, theirs.config.num_key_value_heads) if permuted else None
        keys = {"model": "no_vocab"}
        path = write_model(
            tmp_path / f"{name}.gguf", architecture, theirs, about, heads=heads, extra=extra, tokenizer=keys
        )
        jobs.append({"file": str(path), "ids": ids})
        expected.append(logits(build_model(read_gguf(path)).model, ids))
    found = llama_cpp(tmp_path, jobs)
    for number, name in enumerate(IMPORTED):
        check(name, found, expected[number], number)


def tokenizer_cases() -> dict[str, Tokenizer]:
    """Our own kinds of tokenizers, and one for each pre-tokenizer."""
    cases: dict[str, Tokenizer] = {"bytes": ByteTokenizer()}
    for prefix in (False, True):
        cases[f"sentencepiece {prefix}"] = trained_sentencepiece(add_dummy_prefix=prefix)
    cases["own sentencepiece"] = trained_sentencepiece(user_defined_symbols=["\n", "\t"])
    for style in ("llama3", "gpt2"):
        for digits in (True, False):
            settings = HuggingFaceSettings(vocab_size=450, pre_tokenizer=style, split_digits=digits)
            cases[f"own {style} {digits}"] = train_byte_level_bpe(settings, iter(CORPUS)).tokenizer
    for name, (pre_tokenizer, ignore_merges, _) in STYLES.items():
        if not PRE_TOKENIZERS[name].exact:
            continue
        tokenizer = trained_bpe(pre_tokenizer, ignore_merges=ignore_merges)
        assert gpt2_keys(tokenizer, name)["merges"]
        cases[name] = HuggingFaceTokenizer(
            tokenizer.to_str().encode(), bos_id="<|a|>", eos_id="<|b|>", add_bos=True
        )
    return cases


def test_tokenizers(tmp_path):
    """llama.cpp's ids of text are ours, and decode to the text."""
    cases, jobs = tokenizer_cases(), []
    for number, tokenizer in enumerate(cases.values()):
        settings = ModelSettings.model_validate(SIZES)
        model = Transformer(settings, tokenizer.vocab_size + 3, TRAINED).initialize(0)
        write_gguf(model, tokenizer, tmp_path / f"{number}.gguf")
        jobs.append({"file": str(tmp_path / f"{number}.gguf"), "texts": TEXTS})
    found = llama_cpp(tmp_path, jobs)
    for number, (name, tokenizer) in enumerate(cases.items()):
        for i, text in enumerate(TEXTS):
            assert found[f"text{number}-{i}"].tolist() == tokenizer.encode(text), (name, text)
            back = found[f"back{number}-{i}"].tobytes().decode()
            assert back.removeprefix(tokenizer.prefix.decode()) == text, name
        assert found[f"first{number}"].tolist() == [tokenizer.bos_id], name
