"""llama.cpp loads the exports and computes the same: logits, greedy text and ids of text."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import ByteTokenizer, Tokenizer
from data.preparation.tokenizer_training import train_byte_level_bpe
from data.tokenizers import HuggingFaceTokenizer
from data.tokenizers.settings import HuggingFaceSettings
from errors import InteropError
from interop import build_model
from interop.export.parity import MULTIPLES
from interop.gguf import read_gguf, write_gguf
from interop.gguf.export import export_gguf
from interop.gguf.llama_cpp_process import is_installed, run_jobs
from interop.gguf.pretokenizers import PRE_TOKENIZERS
from interop.gguf.writing.plan import make_plan
from model import ModelSettings, Transformer
from scripts.docs import support_matrix
from tests.interop.export.measured import record, trained
from tests.interop.gguf.files import write_model
from tests.interop.gguf.models import (
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
from tests.interop.models import make

pytestmark = pytest.mark.skipif(not is_installed(), reason="llama-cpp-python is not installed")
ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# together beyond the trained length
PROMPT = list(b"The evaluation of long texts")
NEW = 60
QUICK = ("partial_ntk", "windows_and_nope")
in_turn = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCHEMES],
)


def text_of(rows: int) -> torch.Tensor:
    """(rows, TRAINED + 1) bytes of a document of this repository."""
    data = torch.tensor(list(TEXT.encode()))
    starts = torch.randint(
        len(data) - TRAINED - 1, (rows,), generator=torch.Generator().manual_seed(4)
    )
    return torch.stack([data[start : start + TRAINED + 1] for start in starts])


def error_of(found: np.ndarray, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float(np.abs(found - expected.numpy()).max() / expected.abs().max())


def check(name: str, model: Transformer, found: dict, prompt: list[int]) -> float:
    """Logits of the prompt, and greedy text token by token: each is our most likely one after those before
    it, up to ties within rounding. Returns the largest error."""
    greedy = found["greedy"].tolist()
    expected = logits(model, prompt + greedy)
    error = error_of(found["logits"], expected[: len(prompt)])
    assert error < 1e-4, (name, error)
    if greedy:
        steps = expected[len(prompt) - 1 : -1]
        chosen = steps.gather(1, torch.tensor(greedy)[:, None])[:, 0]
        assert (steps.max(-1).values - chosen <= 1e-4 * steps.abs().max()).all(), name
        assert float((steps.argmax(-1) == torch.tensor(greedy)).float().mean()) > 0.95, name
    return error


@in_turn
def test_random_weights(name, tmp_path):
    """Weights for which each part of the model matters: logits and greedy text past the trained length."""
    model = random_transformer(SCHEMES[name][2])
    write_gguf(model, ByteTokenizer(), tmp_path / "m.gguf")
    job = {"file": str(tmp_path / "m.gguf"), "ids": PROMPT, "new": NEW, "texts": ["x"]}
    (found,) = run_jobs([job])
    check(name, model, found, PROMPT)
    assert len(set(found["greedy"].tolist())) > 1
    assert found["first"].tolist() == [256]  # BOS, as in our runs


@pytest.mark.slow
@pytest.mark.parametrize("row", support_matrix.ROWS)
def test_every_row_of_the_support_matrix_after_20_steps(row, tmp_path):
    """Every row that llama.cpp computes; the greedy text may be one letter."""
    settings = support_matrix.ROWS[row]
    try:
        make_plan(Transformer(ModelSettings.model_validate(SIZES | settings), VOCABULARY, TRAINED))
    except InteropError as reason:
        pytest.skip(str(reason))
    model = trained(settings, VOCABULARY, TRAINED, text_of(8))
    plan = write_gguf(model, ByteTokenizer(), tmp_path / "m.gguf")
    (found,) = run_jobs([{"file": str(tmp_path / "m.gguf"), "ids": PROMPT, "new": NEW}])
    record("gguf", {row: (settings, plan.architecture, check(row, model, found, PROMPT))})


@pytest.mark.slow
@pytest.mark.parametrize("multiple", MULTIPLES)
@pytest.mark.parametrize("change", ["theta", "attention factor", "permutation"])
def test_differing_exports_are_not_written(change, multiple, tmp_path, monkeypatch):
    yarn = {"name": "yarn", "factor": 4.0}
    position = {"name": "rope", "layout": "interleaved", "scaling": yarn}
    model = random_transformer({"position": position})
    run = SimpleNamespace(
        model=model,
        tokenizer=ByteTokenizer(),
        folder=tmp_path,
        step=1,
        checkpoint_hash="0",
        settings=SimpleNamespace(data=SimpleNamespace(bos=True)),
    )
    export_gguf(run, tmp_path / "same.gguf", multiples=[multiple])
    amplitude = 1.01 * (0.1 * math.log(4) + 1)
    others = {
        "theta": position | {"theta": 10_010.0},
        "attention factor": position | {"scaling": yarn | {"attention_factor": amplitude}},
        "permutation": position | {"layout": "half"},
    }
    other = random_transformer({"position": others[change]})
    monkeypatch.setattr(
        "interop.gguf.export.write_gguf", lambda _, *rest, **more: write_gguf(other, *rest, **more)
    )
    with pytest.raises(InteropError, match=f"was not written: at {multiple * TRAINED:,} tokens"):
        export_gguf(run, tmp_path / "differing.gguf", multiples=[multiple])


IMPORTED = (
    "llama",
    "llama-llama3",
    "llama-yarn",
    "smollm3",
    "qwen3",
    "phi3",
    "granite_swa",
    "ministral3",
)


@pytest.mark.slow
def test_files_of_other_models(tmp_path):
    """llama.cpp's own reading of files that we import, on the same ids."""
    jobs = []
    expected = []
    ids = np.random.default_rng(2).integers(0, 53, 60).tolist()
    for name in IMPORTED:
        architecture, model_type, config, about, extra, permuted = CASES[name]
        theirs = make(model_type, **config)
        heads = (
            (theirs.config.num_attention_heads, theirs.config.num_key_value_heads)
            if permuted
            else None
        )
        keys = {"model": "no_vocab"}
        path = write_model(
            tmp_path / f"{name}.gguf",
            architecture,
            theirs,
            about,
            heads=heads,
            extra=extra,
            tokenizer=keys,
        )
        jobs.append({"file": str(path), "ids": ids})
        expected.append(logits(build_model(read_gguf(path)).model, ids))
    for name, found, ours in zip(IMPORTED, run_jobs(jobs), expected, strict=True):
        assert error_of(found["logits"], ours) < 1e-4, name


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
    cases = tokenizer_cases()
    jobs = []
    for number, tokenizer in enumerate(cases.values()):
        settings = ModelSettings.model_validate(SIZES)
        model = Transformer(settings, tokenizer.vocab_size + 3, TRAINED).initialize(0)
        write_gguf(model, tokenizer, tmp_path / f"{number}.gguf")
        jobs.append({"file": str(tmp_path / f"{number}.gguf"), "texts": TEXTS})
    for (name, tokenizer), found in zip(cases.items(), run_jobs(jobs), strict=True):
        assert found["texts"] == [tokenizer.encode(text) for text in TEXTS], name
        prefix = tokenizer.prefix.decode()
        assert [text.removeprefix(prefix) for text in found["decoded"]] == TEXTS, name
        assert found["first"].tolist() == [tokenizer.bos_id], name


def test_files_that_llama_cpp_does_not_load(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InteropError, match=r"m\.gguf"):
        run_jobs([{"file": str(tmp_path / "m.gguf"), "texts": ["x"]}])
