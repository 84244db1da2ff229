"""bfloat16, compiled blocks and FSDP2 on one GPU, with and without activation checkpointing."""

from __future__ import annotations

import statistics
import sys

import pytest
import torch

from run_directory.metrics_file import read_metrics
from tests.processes import free_port
from tests.training.conftest import run

WORDS = [  # small enough for any GPU, large enough that what blocks keep is most of the memory
    *("train_length=512", "model.dim=512", "model.layers=8", "model.heads=8", "model.kv_heads=4"),
    *("training.batch_size=32", "training.tokens=655360", "training.precision=bfloat16"),
    *(
        "training.log_interval=5",
        "training.validation.interval=null",
        "training.checkpoint.interval=null",
    ),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
def test_bfloat16_compiled_sharded_training_on_one_gpu(overrides, tmp_path):
    cases = {
        "whole": ["training.parallel.sharding=none"],
        "sharded": ["training.parallel.sharding=full"],
        "recomputed": ["training.parallel={sharding: full, activation_checkpointing: true}"],
    }
    losses = {}
    memory = {}
    speed = {}
    for name, more in cases.items():
        folder = tmp_path / name
        done = run(
            *(*overrides, *WORDS, *more, "training.compile=true", "--run-dir", str(folder)),
            cwd=tmp_path,
            prefix=[sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1"],
            MASTER_PORT=str(free_port()),
        )
        assert done.returncode == 0, done.stderr
        steps = read_metrics(folder / "metrics.jsonl", "train")
        losses[name] = [line["loss"] for line in steps]
        rates = [line["tokens_per_second"] for line in steps if "tokens_per_second" in line]
        speed[name] = statistics.median(rates[2:])  # the first intervals compile
        memory[name] = read_metrics(folder / "metrics.jsonl", "end")[-1]["peak_memory_bytes"]
        print(f"{name}: {memory[name] / 2**20:,.0f} MiB, {speed[name]:,.0f} tokens/s")
    assert losses["whole"][-1] < losses["whole"][0] - 0.5
    for name in ("sharded", "recomputed"):
        assert max(abs(a - b) for a, b in zip(losses[name], losses["whole"], strict=True)) < 0.05
    assert memory["recomputed"] < 0.8 * memory["sharded"]
