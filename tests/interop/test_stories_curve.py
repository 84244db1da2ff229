"""The loss of stories260K by length against transformers, window by window, past its trained
length."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from data import DataSettings, open_prepared, prepare
from evaluation.evaluated_model import EvaluatedRun
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.kinds import LossEvaluation
from evaluation.ranks import EvaluationRanks
from interop import read_folder
from interop.runs import write_run
from run_directory.console import Console
from tests.corpora import CORPORA, STORIES, needs_stories
from tests.interop.exact import with_exact_arithmetic

pytestmark = needs_stories

TEXT = CORPORA / "tinystories" / "tinystories_lowercased.txt"


def prepared(folder, characters):
    """TinyStories as two documents of many stories, of which one is held out; its folder."""
    (folder / "texts").mkdir()
    text = TEXT.read_text(encoding="utf-8")
    for i in range(2):
        part = text[i * characters : (i + 1) * characters]
        (folder / "texts" / f"{i}.txt").write_text(part, encoding="utf-8")
    settings = DataSettings(
        source={"name": "files", "path": str(folder / "texts")},
        tokenizer={"name": "sentencepiece", "model": str(STORIES / "tok512.model")},
        valid_fraction=0.5,
    )
    return prepare(settings, Console(quiet=True)).folder


@torch.no_grad()
def losses(model, ids, length, longest) -> np.ndarray:
    """NLL of every target of windows of `length` inputs side by side, one forward pass each."""
    found = []
    for start in range(0, (len(ids) - 1) // longest * longest, length):
        window = torch.from_numpy(ids[start : start + length + 1].astype(np.int64))
        logits = model(window[None, :-1]).logits[0].double()
        found.append(-logits.log_softmax(-1).gather(1, window[1:, None])[:, 0])
    return torch.cat(found).numpy()


@pytest.mark.parametrize(
    "lengths",
    [[128, 512, 1024], pytest.param([128, 256, 512, 1024, 2048, 4096], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_non_overlapping_curve(tmp_path, monkeypatch, lengths):
    monkeypatch.chdir(tmp_path)  # text is prepared below the current directory
    longest = max(lengths)
    console = Console(quiet=True)
    store = prepared(tmp_path, characters=5 * longest)
    write_run(read_folder(STORIES / "hf"), tmp_path / "run", STORIES / "tok512.model")
    held_out = open_prepared(store).valid
    ids = held_out.document(0)
    for dtype in ("float32", "float64"):
        settings = EvaluationSettings(
            protocol="non-overlapping",
            methods=["trained"],
            lengths=lengths,
            store=str(store),
            dtype=dtype,
            contamination={"check": False},
        )
        runs = [EvaluatedRun.open(tmp_path / "run", "run", torch.device("cpu"), console, dtype)]
        result = LossEvaluation(settings, runs, EvaluationRanks(), console).session(runs[0]).run()
        theirs = LlamaForCausalLM.from_pretrained(
            STORIES / "hf", dtype=getattr(torch, dtype)
        ).eval()
        if dtype == "float64":
            with_exact_arithmetic(theirs)
        curve = {}
        for length in lengths:
            found = result.nll["trained", length]
            expected = losses(theirs, ids, length, longest)
            assert len(found) == len(expected) >= 2 * longest
            # In float32 the error of transformers' angles grows with the position.
            allowed = 1e-9 if dtype == "float64" else 1e-6 * length
            np.testing.assert_allclose(found, expected, rtol=0, atol=allowed)
            curve[length] = found.mean()
            assert curve[length] == pytest.approx(expected.mean(), abs=1e-5)
        assert curve[512] < min(curve[128], curve[longest])  # it was trained at 512 tokens
