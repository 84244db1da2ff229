"""Time and memory of one training step whose windows are shared by several processes on this machine.

    python scripts/checks/context_step.py configs/tiny.yaml train_length=65536 training.batch_size=1
    python scripts/checks/context_step.py configs/tiny.yaml train_length=4096 training.batch_size=1 --rounds 5

Every round measures each number of processes once, one after the other, with the same number of threads in
all. Each measurement starts its processes, warms up on windows of 256 tokens and trains on one batch of
random tokens. Time is that of the slowest process; memory is the largest increase of a process's peak
resident memory over the warm-up.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from errors import TrainingError
from evaluation.reports.results_table import markdown_table
from model import TokenPositions
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from settings.script import Parser, run_main
from train import train_step
from training.distributed.parallel import Parallel
from training.micro_batches import MicroBatch
from training.optim.optimizer import make_optimizer
from training.optim.step_guard import StepGuard
from training.run.checks import check_processes, make_model
from training.run.hardware import peak_memory, prepare_cpu

VOCABULARY = 4096
WARM = 256


def main() -> int:
    assert __doc__
    parser = Parser(__doc__)
    parser.add_argument("overrides", nargs="+", metavar="CONFIG.yaml | key=value")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="(1 2 4)")
    parser.add_argument("--threads", type=int, default=4, help="of all processes together (4)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="measurements of each number of processes (1)"
    )
    parser.add_argument(
        "--worker", help="file that a process writes its measurement to; used by the script"
    )
    options = parser.parse_args()
    if options.worker:
        return measure(options.overrides, Path(options.worker))
    if wrong := [n for n in options.processes if options.threads % n]:
        raise TrainingError(
            f"--threads {options.threads} is not a multiple of {wrong[0]} processes"
        )
    found: dict[int, list[dict]] = {n: [] for n in options.processes}
    for _ in range(options.rounds):
        for n, measurements in found.items():
            measurements.append(start(options.overrides, n, options.threads // n))
    rows = [
        [
            f"{n} × {options.threads // n}",
            f"{median(one['seconds'] for one in measurements):.1f}",
            f"{median(one['cpu_seconds'] for one in measurements):.0f}",
            f"{median(one['memory'] for one in measurements) / 2**20:,.0f}",
            f"{measurements[0]['loss']:.6f}",
        ]
        for n, measurements in found.items()
    ]
    print(
        markdown_table(
            ["processes × threads", "s", "CPU s in all", "MiB per process", "loss"], rows
        )
    )
    return 0


def start(overrides: list[str], processes: int, threads: int) -> dict:
    """Measure in new processes.

    Raises TrainingError if they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measurement.json"
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
        command = [
            sys.executable,
            *launch,
            __file__,
            *overrides,
            f"training.parallel.context={processes}",
        ]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run([*command, "--worker", str(file)], env=environment, check=False)
        if done.returncode:
            raise TrainingError(
                f"the measurement of {processes} processes failed; its output is above"
            )
        return json.loads(file.read_text(encoding="utf-8"))


def measure(overrides: list[str], file: Path) -> int:
    """Train one step, in one of the processes."""
    settings = load_settings(RunSettings, overrides)
    t = settings.training
    length = settings.train_length
    prepare_cpu(int(os.environ["OMP_NUM_THREADS"]))
    parallel = Parallel(t)
    check_processes(settings, parallel.world)
    model = make_model(settings, VOCABULARY).initialize(settings.seed).train()
    wrapped = parallel.wrap(model)
    optimizer = make_optimizer(model, t.optimizer)
    guard = StepGuard(t.on_nonfinite, t.on_spike, parallel.device)

    def step(length: int) -> float:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(VOCABULARY, (t.batch_size, length + 1), generator=generator)
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        if parallel.shard is not None:
            inputs = parallel.shard.select(inputs)
            targets = parallel.shard.select(targets)
        parts = [MicroBatch(inputs, targets, TokenPositions.plain(length), parallel.shard)]
        args = wrapped, parallel, optimizer, guard, parts, t.batch_size * length
        return train_step(*args, grad_clip=t.grad_clip).read().loss

    step(WARM)
    before = peak_memory(parallel.device)
    parallel.wait()
    began = time.perf_counter()
    cpu = time.process_time()
    loss = step(length)
    cpu = time.process_time() - cpu
    seconds = time.perf_counter() - began
    found = parallel.gather((seconds, cpu, peak_memory(parallel.device) - before))
    if parallel.main:
        slowest, spent, memory = zip(*found, strict=True)
        result = {
            "seconds": max(slowest),
            "cpu_seconds": sum(spent),
            "memory": max(memory),
            "loss": loss,
        }
        file.write_text(json.dumps(result), encoding="utf-8")
    parallel.end()
    return 0


if __name__ == "__main__":
    run_main(main)
