"""Sextant in Python, and the command `sextant`.

    import sextant

    run = sextant.load("runs/quickstart")                       # model, tokenizer and settings
    print(sextant.generate(run, "def main(", tokens=50)[0])
    results = sextant.evaluate(run, lengths=[256, 1024], methods=["trained", "yarn"])
    results.to_pandas()                                         # or results.rows, results.figures
    run = sextant.train("configs/tiny.yaml", "training.tokens=1M")

The command runs the script of the same name: `sextant train configs/tiny.yaml` is
`python train.py configs/tiny.yaml`.  Modules that import torch are imported at the first call, so that
`sextant train --help` is as quick as the script.
"""

import contextlib
import csv
import difflib
import io
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
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
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


@dataclass(frozen=True)
class EvaluationTable:
    """The results of one evaluation."""

    rows: list[dict[str, Any]]  # one per length and method, with the columns of results.csv
    figures: list[Path]
    text: str  # what evaluate.py prints: summary and table
    folder: Path

    def to_dicts(self) -> list[dict[str, Any]]:
        return list(self.rows)

    def to_pandas(self) -> Any:
        """A pandas.DataFrame; requires pandas."""
        return import_module("pandas").DataFrame(self.rows)


def load(run: str | Path, *overrides: str, device: str = "auto", **options: Any) -> "LoadedRun":
    """The newest checkpoint of a run directory, in evaluation mode, with `model`, `tokenizer` and `settings`.

    Args:
        run: a run directory, or `hf:NAME_OR_FOLDER` or `gguf:FILE`.
        overrides: context-extension settings such as `model.position.scaling.name=yarn`.
        options: `dtype`, `checkpoint` (a step) and `weights` ("ema" or "last").
    """
    found = import_module("model").find_device(device)
    folder = import_module("interop.runs").run_of(run)
    return import_module("run_directory.run").Run.open(folder).load(overrides, found, **options)


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
    generation = import_module("generation")
    loaded = load(run) if isinstance(run, (str, Path)) else run
    found = generation.make_samples(
        [prompts] if isinstance(prompts, str) else list(prompts),
        loaded.tokenizer,
        bos=loaded.settings.data.bos,
        count=samples,
        seed=seed,
        stops=list(stop),
    )
    how = generation.SamplingParams(repetition_penalty, temperature, top_k, top_p, min_p)
    for start in range(0, len(found), batch_size):
        batch = found[start : start + batch_size]
        for _ in generation.generate_samples(loaded.model, loaded.tokenizer, batch, tokens, how):
            pass
    return [sample.text for sample in found]


def evaluate(
    run: "LoadedRun | str | Path", *arguments: str, folder: str = "python", **settings: Any
) -> EvaluationTable:
    """Evaluate a run as evaluate.py does; finished measurements are reused.

    Args:
        arguments: settings files and overrides, such as `configs/evaluation/extension.yaml`.
        folder: name of the results directory under RUN/evaluation.
        settings: top-level settings, such as `lengths=[256, 512]`, `methods=["trained", "yarn"]`.
    """
    directory = (
        import_module("interop.runs").run_of(run) if isinstance(run, (str, Path)) else run.folder
    )
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in (settings | {"folder": folder}).items()
    ]
    results = directory / "evaluation" / folder
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        _command_line("evaluate.py", str(directory), *arguments, *overrides),
    ):
        _script("evaluate").main()
    with (results / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return EvaluationTable(rows, sorted(results.glob("*.png")), printed.getvalue(), results)


def train(*arguments: str, run_dir: str | Path | None = None) -> "LoadedRun":
    """Train as train.py does, or resume, and load the result.

    Args:
        arguments: settings files and overrides, such as `configs/tiny.yaml`, `training.tokens=1M`.
        run_dir: run directory; by default the one that train.py chooses.
    """
    resolved = import_module("interop.runs").with_imported_parent(arguments)
    if run_dir is None:
        settings, _ = import_module("run_directory.parent_run").read_run_settings(resolved)
        folder = Path(import_module("run_directory.folder_name").run_folder(settings, resolved))
    else:
        folder = Path(run_dir)
    with _command_line("train.py", *resolved, "--run-dir", str(folder)):
        status = _script("train").main()
    if status:
        raise RuntimeError(f"training stopped with status {status}; repeat the call to resume it")
    return load(folder)


@cache
def _script(name: str) -> ModuleType:
    """A script of this repository as a module, also where an installed package has its name (`evaluate`)."""
    spec = spec_from_file_location(f"sextant_{name}", ROOT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _command_line(*arguments: str) -> Iterator[None]:
    """Run a script's main with these arguments in `sys.argv`."""
    before = sys.argv
    sys.argv = list(arguments)
    try:
        yield
    finally:
        sys.argv = before


def _number(text: str) -> Any:
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    return text or None


def main() -> None:
    """The command `sextant`."""
    name = (sys.argv[1:2] or ["--help"])[0]
    arguments = sys.argv[2:]
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
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
