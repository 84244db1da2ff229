"""Forecasts of memory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from errors import EvaluationError
from evaluation.scoring import batch_size
from evaluation.scoring.batch_size import blocks_at_once, choose_batch
from model import ModelSettings, Transformer
from model.devices import free_memory
from tests.files import ROOT
from tests.model.zoo import CASES, TRAIN, V, settings_of


def zoo_model(case):
    return Transformer(settings_of(CASES[case]), V, TRAIN).initialize(3)


KERNELS = {
    "plain": ["rope", "none", "alibi", "t5", "sandwich", "xpos", "rope-window"],
    "masked": ["fire", "fox", "pope", "rope-dual-chunk"],
    "views": ["rope-sinks", "none-ssmax"],
    "weighed": ["cope", "dape", "path", "shaw", "stick_breaking", "transformer_xl"],
}


def test_forecast_accounts_for_materialized_scores():
    blocks = []
    for cases in KERNELS.values():
        (count,) = {blocks_at_once(zoo_model(case)) for case in cases}
        blocks.append(count)
    assert blocks[0] == 0
    assert blocks == sorted(set(blocks))


@pytest.mark.parametrize("case", ["rope", "alibi"])
def test_cache_of_every_row_is_counted(case):
    """The cache exists with several chunks only; it is the difference to one chunk that grows with
    rows."""
    model = zoo_model(case)
    length, chunk = 64, 8

    def cache(batch):
        needed = batch_size.memory_needed(model, length, 1, batch, chunk)
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(type(model), "cached_numbers", lambda self, tokens: 0)
        without = batch_size.memory_needed(model, length, 1, batch, chunk)
        monkeypatch.undo()
        return needed - without

    expected = 4 * model.cached_numbers(length) * batch_size.SLACK
    for batch in (1, 3):
        assert cache(batch) == pytest.approx(batch * expected, abs=2)


def test_keys_of_a_pass_of_all_sharing_processes_are_counted(monkeypatch):
    model = zoo_model("rope")

    def needed(numbers):
        monkeypatch.setattr(
            batch_size, "gathered_numbers", lambda _, length, chunk: numbers * chunk
        )
        return batch_size.memory_needed(model, 96, 1, batch=3, chunk=8, context=4)

    tokens = 4 * 8  # each process reads chunks of 8
    assert needed(1000) - needed(0) == pytest.approx(
        batch_size.SLACK * 3 * 1000 * tokens * 4, abs=2
    )


def test_oversized_length_error_suggests_longest():
    for scheme, gib in (("rope", 0.2), ("fire", 0.5)):
        settings = ModelSettings(
            dim=192,
            layers=4,
            heads=6,
            kv_heads=2,
            position={"name": scheme},
        )
        model = Transformer(settings, 64, 256)

        def batch(length, model=model, budget=int(gib * 2**30)):
            return choose_batch(model, length, 64, chunk=1024, budget=budget)

        with pytest.raises(EvaluationError, match="length 131072 needs about") as refused:
            batch(131_072)
        longest = int(re.findall(r"length (\d+) would fit", str(refused.value))[0])
        assert 1024 < longest < 131_072
        assert batch(longest) == 1
        with pytest.raises(EvaluationError):
            batch(longest + 1)


MEMORY = """
import sys
import numpy as np
import torch
from evaluation.scoring.batch_size import memory_needed
from evaluation.scoring.text_loss import ModelScorer
from model import Transformer
from model.devices import prepare_cpu
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from training.hardware import peak_memory

prepare_cpu(1)
length = int(sys.argv[2])
settings = load_settings(RunSettings, ["configs/tiny.yaml", f"model.position.name={sys.argv[1]}"])
model = Transformer(settings.model, 4096, 256).initialize(0).eval()
tokens = np.random.default_rng(0).integers(3, 4096, (1, length + 1))
scorer = ModelScorer(model, chunk=4096)
scorer(tokens[:, :513], 64)
before = peak_memory(torch.device("cpu"))
scorer(tokens, 64)
used = peak_memory(torch.device("cpu")) - before
print(used, memory_needed(model, length, 64, 1, 4096, 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["rope", "t5", "fire", "fox", "cope", "shaw", "stick_breaking"])
@pytest.mark.parametrize("length", [6000, 12_000])
def test_memory_forecast_is_a_tight_upper_bound(scheme, length):
    # What is resident differs from run to run, as the allocator finds room: the largest of three is
    # used.
    command = [sys.executable, "-c", MEMORY, scheme, str(length)]
    most = 0.0
    for _ in range(3):
        run = subprocess.run(command, capture_output=True, cwd=ROOT, check=True)
        used, forecast = map(float, run.stdout.split())
        most = max(most, used)
    # One figure stands for every scheme of a kernel, so that the leanest need a third of it.
    assert most <= forecast <= 4 * most


def test_free_memory_respects_container_limit(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2000 kB\n",
        "/sys/fs/cgroup/memory.max": "max",
        "/sys/fs/cgroup/memory.current": "500",
    }
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files[str(path)])
    assert free_memory(torch.device("cpu")) == 2000 * 1024
    files["/sys/fs/cgroup/memory.max"] = "1500"
    assert free_memory(torch.device("cpu")) == 1000
