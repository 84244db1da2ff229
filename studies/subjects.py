"""Open trained runs for evaluation: the checkpoint, and the text it is evaluated on."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch

from data.data_settings import TaskSource
from errors import EvaluationError, TrainingError
from evaluation.diagnostics.settings import DiagnosticSettings
from evaluation.ranks import this_process
from evaluation.run import EvaluatedModel, EvaluatedRun
from evaluation.scoring.methods import new_sinks
from evaluation.settings import EvaluationSettings, MeasurementSettings
from evaluation.stores import EvaluationStores
from model import ModelError, Transformer, legal_overrides
from run_directory.console import Console
from run_directory.exposure import exposure_of
from run_directory.position_overrides import longest_input, override, why, widens
from run_directory.run import LoadedRun, Run
from run_directory.run_settings import RunSettings
from studies.results.training_curves import names_of


def open_runs(
    folders: Sequence[Path], settings: MeasurementSettings, console: Console
) -> list[EvaluatedRun]:
    """Load the checkpoints and tokenizers of run directories for one evaluation."""
    return [
        _open_run(folder, name, settings, console)
        for folder, name in zip(folders, names_of(folders), strict=True)
    ]


def _open_run(
    folder: Path, name: str, settings: MeasurementSettings, console: Console
) -> EvaluatedRun:
    trained = Run.open(folder).load(console=console, weights=settings.weights)
    if trained.changed:
        console.info(trained.changed)
    root = trained.settings
    source = trained.settings.data.source
    model = subject_of(trained, settings.device, console)
    return EvaluatedRun(
        folder=folder,
        name=name,
        model=model,
        tokenizer=trained.tokenizer,
        data=Run(folder).manifest.get("data"),
        task=source.task if isinstance(source, TaskSource) else None,
        bos=root.data.bos,
        changed=trained.changed,
        open_stores=lambda settings, others: open_stores(
            settings, folder, trained.tokenizer, others
        ),
        position_settings=partial(offered, root, begins=model.bos_first),
        exposure=partial(exposure_of, Run(folder), trained.step),
    )


def subject_of(trained: LoadedRun, device: str, console: Console) -> EvaluatedModel:
    """The checkpoint of a run for evaluation on `device` (auto: a GPU if available)."""
    root = trained.settings
    place = this_process().device(device)

    @cache
    def settings_of(method_overrides: tuple[str, ...]) -> RunSettings:
        return override(root, method_overrides)

    def resolve(method_overrides) -> dict:
        return settings_of(tuple(method_overrides)).model.position.model_dump(mode="json")

    def load_method(method_overrides, dtype: str) -> Transformer:
        loaded = Run.open(trained.folder).load(
            method_overrides,
            device=place,
            dtype=getattr(torch, dtype),
            checkpoint=trained.step,
            weights=trained.weights,
            console=console,
        )
        return loaded.model

    return EvaluatedModel(
        name=str(trained.folder),
        checkpoint_hash=trained.checkpoint_hash,
        step=trained.step,
        trained_length=root.train_length,
        original_length=root.original_length or root.train_length,
        resolve=resolve,
        load=load_method,
        longest=lambda method_overrides: longest_input(settings_of(tuple(method_overrides))),
        legal=legal_overrides(root.model),
        bos_first=bos_first(root, Run(trained.folder).manifest),
    )


def bos_first(root: RunSettings, manifest: dict) -> str:
    """Why the model expects BOS as the first token, or '' if it was trained without.

    With data.packing=concat a window begins anywhere, so its first token is arbitrary.
    """
    if not root.data.bos:
        return ""
    if manifest.get("data") is None:
        return "This model was imported and is assumed to be trained with BOS first"
    if root.data.packing == "intra_document":
        return "This model was trained with BOS first (data.bos=true, data.packing=intra_document)"
    return ""


def open_stores(
    settings: EvaluationSettings | DiagnosticSettings,
    run: Path,
    tokenizer,
    others: Sequence[Path] = (),
) -> EvaluationStores:
    """The evaluation data of a run, and all training data of the run, its parents and the runs `others`."""
    about = Run(run).manifest
    manifests = [about, *(Run(other).manifest for other in others)]
    folder = settings.store or about.get("data")
    if folder is None:
        raise EvaluationError(f"{run} does not name its training data; set store=DIR")
    trained = [one for each in manifests for one in (each, *each.get("lineage", []))]
    earlier = [parent.get("data") for parent in trained[1:]]
    earlier += [folder for one in trained for folder in one.get("mixture", ())]
    return EvaluationStores.open(folder, settings.split, tokenizer, about.get("data"), earlier)


def offered(root: RunSettings, method_overrides, bos: str, begins: str) -> dict:
    """Position settings under a built-in method; raises the reason if --matrix does not offer it."""
    try:
        settings = override(root, method_overrides)
    except (ModelError, TrainingError) as error:
        raise EvaluationError(why(error)) from error
    if widens(root, settings):
        raise EvaluationError("the model was trained with a narrower window")
    scheme = settings.model.position.model_dump(mode="json")
    if (
        begins
        and bos != "every-window"
        and new_sinks(scheme, root.model.position.model_dump(mode="json"))
    ):
        raise EvaluationError(f"sinks need bos=every-window. {begins}")
    return scheme
