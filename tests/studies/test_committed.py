"""Every committed configuration of data can be prepared, every committed study planned."""

import json
from pathlib import Path
from random import Random
from string import ascii_lowercase

import numpy as np
import pytest
import yaml

from data import ByteTokenizer, DataSettings
from data.data_settings import TaskSource
from data.preparation.preparation import prepare
from data.sources import SOURCES
from data.sources.local import Stdlib
from data.task_data import generated
from data.tasks import HaystackTask
from evaluation.evaluation_settings import TaskEvaluationSettings
from evaluation.stores import haystacks
from evaluation.tasks.drawn_items import draw_text
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from studies.planned_cells import StudyPlanner
from studies.study_options import study_of
from studies.study_settings import cells_of
from tests.files import ROOT

STUDIES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*(ROOT / "configs/studies").glob("*.yaml"), *(ROOT / "configs/claims").glob("*")]
    if path.suffix == ".yaml" and "grid" in yaml.safe_load(path.read_text())
)
DATA = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "configs").rglob("*.yaml")
    if "source" in (yaml.safe_load(path.read_text()).get("data") or {})
)
FOLDERS = ("texts", "docs", "novels/train", "novels/valid", "corpora/novels/train")
FOLDERS += ("corpora/novels/long", "stdlib", "validation")


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Small texts in the places that the configurations name. What is prepared from them is kept
    for later tests."""
    root = tmp_path_factory.mktemp("clone")
    (root / "configs").symlink_to(ROOT / "configs")
    manifest = []
    rng = Random(0)
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
        for number in range(20):
            words = ["".join(rng.choices(ascii_lowercase, k=5)) for _ in range(400)]
            for suffix in (".txt", ".md", ".py"):
                (root / folder / f"{number}{suffix}").write_text(" ".join(words))
            manifest.append(json.dumps({"file": f"{number}.txt", "author": f"author {number}"}))
    (root / "corpora/novels/MANIFEST.jsonl").write_text("\n".join(manifest))
    (root / "corpora/tinystories").mkdir()
    lines = ["\n".join(rng.choices(words, k=20)) for _ in range(2000)]
    (root / "corpora/tinystories/tinystories_lowercased.txt").write_text("\n".join(lines))
    (root / "corpus").mkdir()
    records = [json.dumps({"text": " ".join(rng.choices(words, k=100))}) for _ in range(30)]
    (root / "corpus/a.jsonl").write_text("\n".join(records))
    return root


@pytest.fixture(autouse=True)
def stand_ins(texts, monkeypatch):
    """The small texts' folder is the current one; sources that need more read there."""
    monkeypatch.chdir(texts)
    monkeypatch.setattr("data.files.os.fsync", lambda handle: None)

    def local(settings, place: str) -> Stdlib:
        is_held_out = getattr(settings, "split", "") == "validation"
        source = Stdlib(settings, place)
        source.folder = texts / ("validation" if is_held_out else "stdlib")
        return source

    for name in ("stdlib", "hub"):
        monkeypatch.setitem(SOURCES, name, local)


def few_items(source):
    return source.model_copy(update={"items": 40}) if isinstance(source, TaskSource) else source


def prepare_small(data: DataSettings) -> None:
    """Prepare the data with few items and a small vocabulary."""
    if items := generated(data):
        items.items("training", 0).rows(np.arange(4), items.longest)
        return
    mixture = [
        entry.model_copy(update={"source": few_items(entry.source)}) for entry in data.mixture
    ]
    changes = {
        "source": few_items(data.source),
        "valid_source": few_items(data.valid_source),
        "mixture": type(data.mixture)(mixture),
    }
    if data.tokenizer.name != "bytes":
        changes["tokenizer"] = data.tokenizer.model_copy(update={"vocab_size": 320})
    prepared = prepare(data.model_copy(update=changes), workers=1)
    assert prepared.train.n_tokens
    assert prepared.valid.n_tokens


@pytest.mark.parametrize("path", DATA)
def test_data_can_be_prepared(path):
    prepare_small(load_settings(RunSettings, [path]).data)


@pytest.mark.parametrize("path", STUDIES)
def test_study_can_be_planned(path):
    study = study_of([path])
    planner = StudyPlanner(study, Path("study"))
    prepared = set()
    for plan in planner.plan(cells_of(study)):
        data = plan.settings.data
        if (key := data.model_dump_json()) in prepared:
            continue
        prepared.add(key)
        prepare_small(data)
        for evaluation in plan.evaluations:
            settings = evaluation.settings
            if not isinstance(settings, TaskEvaluationSettings):
                continue
            if data.is_generated:
                assert settings.ranges(data.source.bounds)
                continue
            task = settings.task or data.source.task
            length = plan.settings.train_length
            texts, _ = haystacks(task, None) if isinstance(task, HaystackTask) else (None, "")
            tokenizer = ByteTokenizer()
            drawn = draw_text(
                settings, task, tokenizer, bos=True, trained_length=length, documents=texts
            )
            assert drawn.candidates > 1
