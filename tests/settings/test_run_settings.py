"""The settings of a run: which of them identify it, and the shipped files."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from errors import ConfigError
from evaluation.evaluation_settings import settings_class
from run_directory.run_settings import RunSettings
from settings.load import apply_overrides, dropped_settings, identity, load_settings
from studies.study_options import study_of
from tests.files import ROOT

CONFIGS = ROOT / "configs"
FILES = [file for file in sorted(CONFIGS.rglob("*.yaml")) if file.parent.name != "accelerate"]


def missing(file: Path) -> list[str]:
    """Overrides that give what a file leaves open: the parent of an extension run, the tokens of a
    schedule."""
    of_folder = {"extension": ["parent.run=x"], "wsd": ["training.tokens=100B"]}
    return of_folder.get(file.parent.name, [])


def is_of_a_run(file: Path) -> bool:
    """Whether a file has settings of train.py, not of a study, an evaluation or a method."""
    text = file.read_text()
    is_evaluation = file.relative_to(CONFIGS).parts[0] in ("evaluation", "tasks")
    is_training = not is_evaluation or "train_length:" in text or "data:" in text
    return is_training and "grid:" not in text and file.name != "methods.yaml"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_shipped_files_are_valid(file):
    if is_of_a_run(file):
        load_settings(RunSettings, [str(file), *missing(file)])
    elif "grid:" in file.read_text():
        if file.parent.name != "base":  # what claims have in common
            study_of([str(file)])
    elif file.name != "methods.yaml":
        load_settings(settings_class([str(file)]), [str(file)])


def test_settings_dropped_by_a_later_choice_are_reported(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("training:\n  optimizer:\n    lr: 0.001\n    weight_decay: 0.1\n")

    def warnings(*overrides: str) -> list[str]:
        arguments = [str(file), *overrides]
        return dropped_settings(load_settings(RunSettings, arguments), arguments)

    (warning,) = warnings("training.optimizer.name=muon")  # weight_decay is the same
    assert warning.startswith(f"{file}:3: training.optimizer.lr = 0.001")
    for others in (
        ["training.optimizer.name=muon", "training.optimizer.lr=0.004"],
        ["training.optimizer={name: muon, lr: 4e-3}"],
        ["training.optimizer.lr=0.004"],
        ["model.position.name=alibi"],
    ):
        assert warnings(*others) == []


def written(file: Path) -> dict[tuple, object]:
    """The values in a settings file and those it extends, as text, by path."""
    tree = yaml.load(file.read_text(), Loader=yaml.BaseLoader)
    parents = tree.pop("extends", [])
    values = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        values |= written(file.parent / parent)
    groups = [((), tree)]
    for path, group in groups:
        for key, value in group.items():
            if isinstance(value, dict):
                groups.append(((*path, key), value))
            else:
                values[*path, key] = value
    return values


def is_honored(text: object, value: object, derived: object) -> bool:
    """Whether a setting has the value that a file wrote; null stands for the derived one."""
    if isinstance(text, dict):
        return all(is_honored(text[key], value[key], None) for key in text)
    if isinstance(text, list):
        return all(is_honored(*pair, None) for pair in zip(text, value, strict=True))
    if text in ("null", "", "~"):
        return value == derived
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text.lower() == str(value).lower()
    powers = {"k": 1e3, "M": 1e6, "B": 1e9}
    return float(text.rstrip("kMB")) * powers.get(text[-1], 1) == value


def dropped(files: list[Path], settings: RunSettings) -> set[str]:
    """The settings that the last file to write them does not decide, of those that exist."""
    final = settings.model_dump(mode="json")
    m = settings.model
    derived = {"kv_heads": m.heads, "head_dim": m.dim // m.heads}
    lost = set()
    for path, text in {path: v for file in files for path, v in written(file).items()}.items():
        group = final
        for key in path[:-1]:
            group = group.get(key) if isinstance(group, dict) else None
        has_it = isinstance(group, dict) and path[-1] in group
        if has_it and not is_honored(text, group[path[-1]], derived.get(path[-1])):
            lost.add(".".join(path))
    return lost


@pytest.mark.parametrize("base", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_no_shipped_file_gives_a_false_warning(base):
    """Before or after a base configuration, warnings name exactly the settings that are lost."""
    loaded = set()
    for file in filter(is_of_a_run, FILES):
        for files in ([base, file], [file, base]):
            arguments = [*map(str, files), *missing(file)]
            try:
                settings = load_settings(RunSettings, arguments)
            except ConfigError:
                continue  # some do not fit some bases: a stage of tokens=2M, or 3 heads
            loaded.add(file)
            warnings = dropped_settings(settings, arguments)
            reported = {warning.split(": ")[1].split(" = ")[0] for warning in warnings}
            assert reported == dropped(files, settings) - {"training.tokens"}, arguments
    assert len(loaded) > 90


def test_steps_follow_from_the_token_budget():
    overrides = ["train_length=30", "training.batch_size=7", "training.tokens=2099"]
    s = load_settings(RunSettings, [*overrides, "training.validation.targets=8"])
    assert (s.tokens_after(1), s.steps, s.trained_tokens) == (210, 9, 1890)


def test_identity_depends_on_settings_that_affect_weights():
    s = RunSettings()
    shaping = [
        "training.tokens=3M", "training.lr_schedule.warmup=0.1", "training.batch_size=16", "seed=1",
        "training.precision=float64", "model.position.theta=5e5", "data.packing=intra_document",
        "training.ema={}", "model.mlp_bias=true",
    ]  # fmt: skip
    free = [
        "training.log_interval=1", "training.checkpoint.interval=3", "training.wandb.mode=offline",
        "training.samples.prompts=[x]", "training.micro_batch_size=4",
    ]  # fmt: skip
    changed = {word: apply_overrides(s, [word]) for word in [*shaping, *free]}
    assert s not in changed.values()
    assert {word for word in changed if identity(changed[word]) == identity(s)} == set(free)
    # Directories of earlier runs are named by it.
    tiny = load_settings(RunSettings, [str(CONFIGS / "tiny.yaml")])
    assert (identity(s), identity(tiny)) == ("57c6b4618a", "c3713eca9f")


def test_settings_of_data_training_and_evaluation_import_without_torch():
    modules = "data.data_settings, run_directory.training_settings, evaluation.evaluation_settings"
    code = f"import sys, {modules}\nassert not {{'torch', 'matplotlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=CONFIGS.parent, check=True, timeout=60)
