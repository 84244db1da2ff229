"""`score` on models of other projects, and a scheme of ours in another attention, by loops."""

import runpy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from evaluation.fixed_target_loss import by_length, score
from tests.files import ROOT
from tests.test_docs import blocks

VOCABULARY = 37
LENGTHS = [5, 9, 16]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.gru = nn.GRU(12, 20, batch_first=True)
        self.head = nn.Linear(20, VOCABULARY)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


def llama():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
    )
    model = LlamaForCausalLM(config)
    return lambda ids: model(ids).logits


@pytest.mark.parametrize("make", [llama, Recurrent])
def test_foreign_models_against_a_loop(make):
    torch.manual_seed(3)
    model = make()
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, VOCABULARY, n) for n in (40, 17, 16, 60)]
    losses = score(model, documents, LENGTHS, targets=4, batch=2)
    assert sorted(set(losses.document)) == [0, 1, 3]  # 16 tokens are too few for 16 inputs
    for row in losses.itertuples():
        ids = torch.from_numpy(documents[row.document])
        end = len(ids)
        window = ids[end - row.length - 1 : end - 1]
        assert row.target >= end - 4
        output = row.target - (end - row.length - 1) - 1
        with torch.no_grad():
            logits = model(window[None])[0, output].double()
        expected = torch.logsumexp(logits, 0) - logits[ids[row.target]]
        assert row.nll == pytest.approx(expected.item(), abs=1e-5)
    table = by_length(losses, trained_length=9)
    assert table.nll[16] == pytest.approx(losses[losses.length == 16].nll.mean())
    assert table.gain[9] == 0


def test_windows_must_fit_and_lengths_include_the_trained_one():
    losses = score(Recurrent(), [np.arange(17)], [4, 16], targets=4, ends=[(0, 17)])
    assert losses.target.tolist() == [13, 14, 15, 16] * 2
    with pytest.raises(ValueError, match="trained_length = 8"):
        by_length(losses, trained_length=8)
    with pytest.raises(ValueError, match="document 0 ends at 16"):
        score(Recurrent(), [np.arange(20)], [16], targets=4, ends=[(0, 16)])
    with pytest.raises(ValueError, match="no document"):
        score(Recurrent(), [np.arange(16)], [16], targets=4)
    with pytest.raises(ValueError, match="targets = 4"):
        score(Recurrent(), [np.arange(20)], [3, 16], targets=4)


def test_documented_attention_has_the_biases_of_alibi(tmp_path):
    (block,) = [
        block
        for block in blocks((ROOT / "docs" / "getting_started.md").read_text(encoding="utf-8"))
        if "alibi_slopes" in block
    ]
    file = tmp_path / "documented.py"
    file.write_text(block, encoding="utf-8")
    names = runpy.run_path(str(file))
    q, k, v = torch.randn(3, 2, 4, 7, 5, dtype=torch.float64)
    out = names["attention"](q, k, v)
    for h in range(4):
        slope = 2.0 ** (-2 * (h + 1))  # Press et al. 2021, four heads: 1/4, 1/16, 1/64, 1/256
        for i in range(7):
            logits = [q[1, h, i] @ k[1, h, j] / 5**0.5 - slope * (i - j) for j in range(i + 1)]
            weights = torch.softmax(torch.stack(logits), 0)
            assert out[1, h, i].allclose(weights @ v[1, h, : i + 1])
