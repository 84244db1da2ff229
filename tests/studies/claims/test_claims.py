"""Claims end to end: what is rejected, frozen, shared and decided."""

import re
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from errors import ConfigError, StudyError
from settings.load import load_settings
from studies.claims.atlas import write_atlas
from studies.claims.claim_run import Claim, commit_of
from studies.claims.claim_settings import ClaimSettings
from studies.claims.claim_verdicts import MeasuredValues, read_verdict
from studies.claims.command import load_claims
from tests.files import ROOT, table
from tests.studies.claims.recomputed import verdict
from tests.studies.forks import call

REFUSED = table("studies/claims/refused.yaml")
COMMITTED = sorted((ROOT / "docs/results/claims").glob("*/results.csv"))
CLAIM = """
statement: Twice the length is worse.
question: breaks
source: {{paper: "arXiv:0", title: A title, authors: "Nobody, 2026", place: Table 1}}
published: worse
deviations: tiny
base: [{base}]
grid:
  scheme:
    rope: [{configs}/position/rope.yaml]
    none: [{configs}/position/none.yaml]
  seed: [10, 11, 12]
evaluations:
  loss: {{overrides: ["lengths=[24,48]", targets=8, spans_per_document=2, device=cpu]}}
primary:
  change: {{value: {{scheme: rope, length: 48, from: 24}}, expect: positive, delta: 0.5}}
  arms:
    value: {{minus: [{{scheme: rope, length: 24}}, {{scheme: none, length: 24}}]}}
    expect: no difference
    delta: 9
learned: [{{value: {{length: 24}}, at_most: 9}}]
"""


@pytest.fixture(scope="module")
def cells(write_study, tmp_path_factory) -> Path:
    """The run directories of the claim, which all tests share."""
    folder = tmp_path_factory.mktemp("claims")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        assert call(monkeypatch, write_study(CLAIM), "--jobs", 2) == 0
    return folder / "runs/claims/cells"


@pytest.fixture
def claims(cells, write_study, tmp_path, monkeypatch):
    """Run claims in a folder that has their cells only, and is no repository. Models of three
    updates pass for trained."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(cells, "runs/claims/cells")
    monkeypatch.setattr("evaluation.statistics.loss_verdicts.UNDERTRAINED", -9)

    def run(text: str, *options: object) -> tuple[int, Path]:
        file = write_study(text)
        return call(monkeypatch, file, *options), file

    return run


def test_a_claim_is_run_frozen_and_decided(claims, tmp_path, capsys):
    status, file = claims(CLAIM)
    folder = Path("runs/claims/tiny")
    assert status == 0
    word, found = verdict(file, folder / "results.csv")
    assert f"tiny: {word}." in capsys.readouterr().out
    settings = load_settings(ClaimSettings, [str(file)])
    ours = read_verdict(settings, folder / "results.csv")
    assert ours.word == word == "refuted"
    assert ours.learned == {"rope": 3, "none": 3}
    for name, (estimate, low, high) in found.items():
        assert (ours.comparisons[name].estimate, *ours.ends[name]) == pytest.approx(
            (estimate, low, high)
        )
    assert min(comparison.error for comparison in ours.comparisons.values()) > 0
    before = (folder / "results.csv").read_bytes()
    assert claims(CLAIM)[0] == 0
    assert (folder / "results.csv").read_bytes() == before
    # A word about the claim may change, a number may not.
    assert claims(CLAIM.replace("tiny", "very tiny"))[0] == 0
    for old, new in (("delta: 9", "delta: 8"), ("[10, 11, 12]", "[10, 11, 12, 13]")):
        with pytest.raises(StudyError, match="changed after its first result"):
            claims(CLAIM.replace(old, new))
    with pytest.raises(StudyError, match="changed after"):
        claims(CLAIM.replace("targets=8", "targets=6"))


def test_the_atlas_shows_published_results(claims):
    _, file = claims(CLAIM)
    claim = Claim(file, load_settings(ClaimSettings, [str(file)]))
    left = Claim(file.with_name("left.yaml"), claim.settings)  # written and not run
    published = [each.publish(Path("docs/results/claims")) for each in (claim, left)]
    pages = write_atlas(published, Path("docs"))
    markdown, page = (path.read_text() for path in pages)
    for text in (markdown, page):
        assert "2 claims: 0 reproduced, 1 refuted, 0 inconclusive, 1 not run." in text
        assert "left.yaml" in text.split("Written and not run")[-1]
        assert "(δ ±9)" in text
    assert "](results/claims/tiny/figure.svg)" in markdown
    assert Path("docs/results/claims/tiny/figure.svg").is_file()
    for fact in ("scheme**: none, rope", "task**: text", "verdict**: refuted"):  # of the filters
        assert f"- **{fact}" in markdown
        assert f"<li><strong>{fact.replace('**', '</strong>')}" in page
    shutil.rmtree("runs")
    assert claim.status == "refuted"
    assert claim.is_decided


def run_directories() -> list[Path]:
    return sorted(path for path in Path("runs/claims/cells").iterdir() if path.is_dir())


def test_claims_share_their_runs(claims):
    runs = run_directories()
    other = CLAIM.replace("delta: 9", "delta: 8").replace("targets=8", "targets=4")
    assert claims(other)[0] == 0
    assert run_directories() == runs
    assert len(runs) == 6


def test_a_pilot_has_other_seeds_and_bounds_the_effect(claims, capsys):
    status, _ = claims(CLAIM, "--pilot", 3)
    assert status == 0
    output = capsys.readouterr().out
    assert "change: mean " in output
    assert "3 seeds can show" in output
    assert not Path("runs/claims/tiny").exists()


@pytest.mark.parametrize(("at_most", "undertrained"), [(1, -9), (9, 0.5)])
def test_runs_that_have_not_learned_are_inconclusive(claims, at_most, undertrained, monkeypatch):
    """By the condition of the claim, or because they are hardly better than a unigram model."""
    monkeypatch.setattr("evaluation.statistics.loss_verdicts.UNDERTRAINED", undertrained)
    _, file = claims(CLAIM.replace("at_most: 9", f"at_most: {at_most}"))
    folder = Path("runs/claims/tiny")
    settings = load_settings(ClaimSettings, [str(file)])
    ours = read_verdict(settings, folder / "results.csv")
    assert ours.word == verdict(file, folder / "results.csv")[0] == "inconclusive (not learned)"
    assert ours.learned == {"rope": 0, "none": 0}
    assert ours.p == 1


def test_the_error_of_a_value_counts_targets(write_study):
    """Against the jackknife over documents of unequal size, target by target."""
    claim = load_settings(ClaimSettings, [str(write_study(CLAIM))])
    rng = np.random.default_rng(0)
    units = [rng.normal(3 + j, 1, (2, 4 * j)) for j in (1, 3, 9)]  # at 24 and at 48
    rows = [
        {"method": "trained", "length": length, "nll": np.concatenate(units, axis=1)[k].mean()}
        | {"unit_nll": [own[k].mean() for own in units]}
        for k, length in enumerate((24, 48))
    ]
    loss = {"cells": rows, "units": {"targets": [own.shape[1] for own in units]}}
    axes = {"scheme": "rope", "seed": "10"}
    cell = {"axes": axes, "training": {"train_length": 24}, "evaluations": {"loss": loss}}
    values = MeasuredValues(claim, [cell])
    tree = claim.comparisons["change"].value
    kept = [np.concatenate(units[:j] + units[j + 1 :], axis=1).mean(axis=1) for j in range(3)]
    changes = np.array([after - before for before, after in kept])
    error = np.sqrt(2 / 3 * ((changes - changes.mean()) ** 2).sum())
    change = rows[1]["nll"] - rows[0]["nll"]
    assert values.comparison(tree, "10") == pytest.approx((change, error))


@pytest.mark.parametrize(
    ("old", "new", "phrase"),
    REFUSED["settings"],
)
def test_invalid_claims_are_rejected(write_study, old, new, phrase):
    assert old in CLAIM
    with pytest.raises(ConfigError, match=phrase):
        load_settings(ClaimSettings, [str(write_study(CLAIM.replace(old, new)))])


@pytest.mark.parametrize(
    ("old", "new", "phrase"),
    REFUSED["values"],
)
def test_values_that_nothing_measures_are_rejected(claims, old, new, phrase):
    with pytest.raises(StudyError, match=phrase):
        claims(CLAIM.replace(old, new, 1))
    assert not Path("runs/claims/tiny").exists()


def test_a_file_with_uncommitted_changes_cannot_be_frozen(tmp_path):
    (tmp_path / "a.yaml").write_text("")
    assert commit_of(tmp_path / "a.yaml") == ""
    copy = ROOT / "configs/claims" / "uncommitted.tmp"
    if (ROOT / ".git").exists():
        copy.write_text("")
        try:
            with pytest.raises(StudyError, match="not committed"):
                commit_of(copy)
        finally:
            copy.unlink()


@pytest.mark.parametrize("results", COMMITTED, ids=lambda file: file.parent.name)
def test_committed_verdicts_follow_from_their_results(results, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = ROOT / "configs/claims" / f"{results.parent.name}.yaml"
    claim = Claim(file, load_settings(ClaimSettings, [str(file)]), ROOT / "docs/results/claims")
    assert claim.record["hash"] == claim.hash
    ours = claim.verdict()
    word, found = verdict(file, results)
    assert ours.word == word
    for name, numbers in found.items():
        expected = (ours.comparisons[name].estimate, *ours.ends[name])
        assert numbers == pytest.approx(expected)


@pytest.mark.skipif(not COMMITTED, reason="no claim has results yet")
def test_the_committed_atlas_is_current(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("claims", "reading"):
        shutil.copytree(ROOT / "docs/results" / name, tmp_path / "results" / name)
    claims = [
        Claim(claim.file, claim.settings, tmp_path / "results/claims") for claim in load_claims()
    ]
    pinned = (ROOT / "constraints.txt").read_text()
    same_figures = all(f"{name}=={version(name)}\n" in pinned for name in ("matplotlib", "numpy"))
    figure = re.compile(rb"(?<=;base64,)[\w+/=]+")
    for page in write_atlas(claims, tmp_path):
        ours = page.read_bytes()
        committed = (ROOT / "docs" / page.name).read_bytes()
        if not same_figures:  # other versions name their clip paths otherwise
            ours = figure.sub(b"", ours)
            committed = figure.sub(b"", committed)
        assert ours == committed
