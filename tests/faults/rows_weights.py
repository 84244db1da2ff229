"""Runs that do not fit in memory, unusable checkpoints, truncated files."""

from collections.abc import Callable
from pathlib import Path

from data.preparation.preparation import prepare
from run_directory.checkpoints import save_weights
from run_directory.console import Console
from run_directory.position_overrides import make_model
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from tests.faults.fault import Fault, Result, call


def evaluated_with(value: float) -> Callable[[Path, list[str]], Result]:
    """Evaluation of a run whose weights are all of this value."""

    def fault(folder: Path, overrides: list[str]) -> Result:
        settings = load_settings(RunSettings, overrides)
        prepared = prepare(settings.data, Console(quiet=True))
        about = {"data": str(prepared.folder), "data_hash": prepared.hash}
        Run.create(folder / "run", settings, prepared.tokenizer, ["train.py"], about)
        model = make_model(settings, prepared.tokenizer.vocab_size)
        for weight in model.parameters():
            weight.data.fill_(value)
        save_weights(folder / "run", 3, model)
        return call("evaluate.py", "run", "targets=8", "lengths=[24,48]", cwd=folder)

    return fault


FAULTS = [
    Fault(
        "weights under which no loss is finite",
        evaluated_with(1e18),
        names=("step 3", "at any length", "another checkpoint"),
    ),
    Fault(
        "a step that memory cannot hold",
        lambda folder, overrides: call(
            "train.py",
            *overrides,
            "training.batch_size=1000000000",
            "training.tokens=100B",
            cwd=folder,
        ),
        names=("training.batch_size (now 1000000000)", "GiB", "--force"),
    ),
]
