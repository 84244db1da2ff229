"""Sextant in Python, and the command `sextant`.

    import sextant

    run = sextant.load("runs/quickstart")                       # model, tokenizer and settings
    print(sextant.generate(run, "def main(", tokens=50)[0])
    results = sextant.evaluate(run, lengths=[256, 1024], methods=["trained", "yarn"])
    results.to_pandas()                                         # or results.rows, results.figures
    run = sextant.train("configs/tiny.yaml", "training.tokens=1M")

The command starts the script of the same name: `sextant train configs/tiny.yaml` is
`python train.py configs/tiny.yaml`.  Functions import torch at their first call.
"""

import contextlib
import csv
import difflib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from run_directory.run import LoadedRun

__all__ = ["EvaluationTable", "evaluate", "generate", "load", "train"]

ROOT = Path(__file__).resolve().parent
SCRIPTS = {
    "train": ("train.py", "train a model, or resume training"),
    "generate": ("generate.py", "generate text with a trained model"),
    "evaluate": ("evaluate.py", "evaluate runs at and beyond their trained length"),
    "study": ("study.py", "train and evaluate a grid of models, and write a report"),
    "runs": ("scripts/runs.py", "list runs with their settings, losses and status"),
}
NOT_A_CLONE = (
    "Sextant runs from a clone of its repository: clone it and run `pip install -e .` there"
)


@dataclass(frozen=True)
class EvaluationTable:
    """The results of one evaluation."""

    rows: list[dict[str, Any]]  # one row per number, with the columns of results.csv
    figures: list[Path]
    text: str  # summary and tables, in Markdown
    folder: Path

    def to_pandas(self) -> Any:
        """A pandas.DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)


def load(run: str | Path, *overrides: str, device: str = "auto", **options: Any) -> "LoadedRun":
    """The newest checkpoint of a run directory, in evaluation mode, with `model`, `tokenizer` and
    `settings`.

    Args:
        run: a run directory, or `hf:NAME_OR_FOLDER`.
        overrides: context-extension settings such as `model.position.scaling.name=yarn`.
        options: `dtype`, `checkpoint` (a step) and `weights` ("ema" or "last").
    """
    _require_clone()
    from interop.imported_runs import run_of
    from model.devices import find_device
    from run_directory.run import Run

    return Run.open(run_of(run)).load(overrides, find_device(device), **options)


def generate(
    run: "LoadedRun | str | Path",
    prompts: str | Sequence[str] = "",
    *,
    tokens: int = 200,
    samples: int = 1,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    batch_size: int = 8,
) -> list[str]:
    """Continuations of each prompt, without the prompt; `samples` of the first prompt come first.

    `temperature` = 0 is greedy.  The text of a sample depends on its prompt and seed only.
    """
    _require_clone()
    from data.task_data import generated
    from generation.samples import generate_samples, make_samples
    from generation.sampling import SamplingParams

    loaded = load(run) if isinstance(run, (str, Path)) else run
    pending = make_samples(
        [prompts] if isinstance(prompts, str) else list(prompts),
        loaded.tokenizer,
        bos=loaded.settings.data.bos,
        count=samples,
        seed=seed,
        stops=list(stop),
    )
    sampling = SamplingParams(
        repetition_penalty,
        temperature,
        top_k,
        top_p,
        min_p,
    )
    for _ in generate_samples(
        loaded.model,
        loaded.tokenizer,
        pending,
        tokens,
        sampling,
        items=generated(loaded.settings.data),
        batch_size=batch_size,
    ):
        pass
    return [sample.text for sample in pending]


def evaluate(
    run: "LoadedRun | str | Path", *arguments: str, folder: str = "python", **settings: Any
) -> EvaluationTable:
    """Evaluate the newest checkpoint of a run like evaluate.py; finished measurements are reused.

    Raises EvaluationError for a run that was loaded otherwise, such as with overrides.

    Args:
        arguments: settings files and overrides, such as `configs/evaluation/extension.yaml`.
        folder: name of the results directory under RUN/evaluation.
        settings: top-level settings, such as `lengths=[256, 512]`, `methods=["trained", "yarn"]`.
    """
    _require_clone()
    from errors import EvaluationError
    from evaluation.evaluate_runs import run_evaluation
    from evaluation.evaluation_settings import settings_class
    from interop.imported_runs import run_of
    from model.devices import prepare_cpu
    from run_directory.checkpoints import find_checkpoint
    from run_directory.run import Run
    from run_directory.training_schedule import last_trained
    from settings.load import load_settings

    prepare_cpu(None)

    if isinstance(run, (str, Path)):
        directory = run_of(run)
    else:
        directory = run.folder
        trained, _ = last_trained(Run.open(directory).settings, run.step)
        newest = find_checkpoint(directory, only=())
        is_newest = newest is not None and newest.hash == run.checkpoint_hash
        if not is_newest or run.settings != trained:
            raise EvaluationError(
                f"{directory} was loaded with overrides, other weights or an earlier checkpoint, "
                "but its newest checkpoint would be evaluated as trained: pass the folder instead, "
                "and set methods={LABEL: [OVERRIDE]} or weights"
            )
    given = settings | {"folder": folder}
    overrides = [*arguments, *(f"{key}={json.dumps(value)}" for key, value in given.items())]
    command = shlex.join(["sextant.evaluate", str(directory), *overrides])
    loaded = load_settings(settings_class(overrides), overrides)
    output = run_evaluation([directory], loaded, command)
    assert output is not None
    with (output.folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
    text = (output.folder / "report.md").read_text(encoding="utf-8")
    figures = [file for file in output.files if file.suffix == ".png"]
    return EvaluationTable(rows, figures, text, output.folder)


def train(*arguments: str, run_dir: str | Path | None = None) -> "LoadedRun":
    """Train like train.py, or resume, and load the result.

    Args:
        arguments: settings files and overrides, such as `configs/tiny.yaml`, `training.tokens=1M`.
        run_dir: run directory; default: chosen by train.py.
    """
    _require_clone()
    options = [] if run_dir is None else ["--run-dir", str(run_dir)]
    status, folder = _train_script().run_training([*arguments, *options])
    if status:
        raise RuntimeError(f"training stopped with status {status}; repeat the call to resume it")
    return load(folder)


@cache
def _train_script() -> ModuleType:
    """Import train.py by its path: a program that imports `sextant` may have its own train.py."""
    spec = spec_from_file_location("sextant_train", ROOT / "train.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _require_clone() -> None:
    """Raise ImportError if Sextant was installed from a wheel, without scripts and configs."""
    if not (ROOT / "train.py").is_file():
        raise ImportError(NOT_A_CLONE)


def _number(text: str) -> Any:
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    return text or None


def main() -> None:
    """The command `sextant`."""
    name = (sys.argv[1:2] or ["--help"])[0]
    if name in ("-h", "--help"):
        print("usage: sextant COMMAND [ARGUMENTS]\n")
        for command, (_, text) in SCRIPTS.items():
            print(f"  {command:<10}{text}")
        print("\nsextant COMMAND --help prints the settings and options of a command.")
        return
    if name not in SCRIPTS:
        close = difflib.get_close_matches(name, SCRIPTS, n=1)
        guess = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(SCRIPTS)}"
        sys.exit(f"error: sextant {name}: no such command{guess}")
    script = ROOT / SCRIPTS[name][0]
    if not script.is_file():
        sys.exit(f"error: {NOT_A_CLONE}")
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[2:]])


if __name__ == "__main__":
    main()
