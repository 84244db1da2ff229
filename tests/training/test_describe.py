"""The help text names every setting and fits the terminal."""

import pytest
from pydantic import BaseModel, Field

from tests.training.toy import Root
from training.describe import asked, describe, help_text
from training.errors import ConfigError
from training.schema import leaves
from training.settings import RunSettings


@pytest.mark.parametrize("width", [60, 100])
def test_every_setting_is_described_within_the_width(width):
    text = describe(Root, width)
    own = [name for name in leaves(Root) if ".kinds." not in name and not name.endswith(".name")]
    for name in own:
        assert name in text
    names = {word for line in text.splitlines() for word in line.split()}
    assert max(len(line) for line in text.splitlines()) <= max(width, 2 + max(map(len, names)))


def test_a_choice_shows_its_own_settings_below_it():
    text = " ".join(describe(Root, 100).split())
    assert "model.position.name=rope Rotations (Su et al. 2021)" in text
    assert text.index("name=rope") < text.index("model.position.theta base of the") < text.index("name=alibi")
    assert "base of the frequencies (number, greater than 0, default 10000)" in text
    assert "stretch (number or auto, at least 1, default auto)" in text
    assert "model.position.kinds.KEY.name=... as under model.position: rope, alibi" in text
    assert "training.every* cadence (whole number, at least 1, default 10)" in text


def test_the_real_settings_are_described():
    text = describe(RunSettings, 100)
    assert "training.schedule.name=wsd" in text and "model.position.scaling.name=yarn" in text
    for name in leaves(RunSettings):
        # Sources inside a source are like the run's own, and are not spelled out again.
        if not {"kinds", "haystack", "text"} & set(name.split(".")[:-1]) and not name.endswith(".name"):
            assert name in text
    assert "data.source.task.haystack.name=... as under data.source: " in " ".join(text.split())


def test_marks_are_explained_where_there_are_any():
    class Plain(BaseModel):
        width: int = Field(3, description="a product a*b")

    assert "when a run is resumed" in describe(RunSettings)
    assert "when a run is resumed" not in describe(Plain)


def test_one_branch_is_what_the_whole_says_of_it_and_nothing_else():
    whole = " ".join(describe(RunSettings, 100).split())
    alone = describe(RunSettings, 100, "training.checkpoint")
    names = [line.split()[0] for line in alone.splitlines() if line.strip().startswith("training.")]
    assert [name.rstrip("*") for name in names] == [
        name for name in leaves(RunSettings) if f"{name}.".startswith("training.checkpoint.")
    ]
    assert "steps between checkpoints" in alone and "when a run is resumed" in alone
    assert " ".join(describe(RunSettings, 100, "training.ema.decay").split()) in whole
    # Shared by many schemes, said once.
    assert describe(RunSettings, 100, "model.position.window").count("model.position.window") == 1
    alibi = describe(RunSettings, 100, "model.position.name=alibi")
    assert alibi.startswith("model.position.name=alibi  A penalty linear") and "position.slopes" in alibi
    assert "theta" not in alibi and describe(RunSettings, 100, "model.nothing") == ""


def test_the_branches_of_a_command_line():
    words = ["configs/tiny.yaml", "training.checkpoint", "seed=3", "runs/x", "model.position.name=rope"]
    assert asked(words, RunSettings) == ["training.checkpoint", "model.position.name=rope"]
    assert asked(["model", "training.optimizer.name"], RunSettings) == ["model", "training.optimizer"]
    for word, said in (
        ("training.chekpoint", "no such setting; did you mean training.checkpoint?"),
        ("model.position.name=alib", "no such choice; known: none,.* alibi,"),
    ):
        with pytest.raises(ConfigError, match=f"--help {word}: {said}"):
            asked([word], RunSettings)
    told = help_text(RunSettings, ["seed"], "USAGE", "seed")
    assert told.startswith("seed ") and "USAGE" not in told
    told = help_text(RunSettings, [], "USAGE", "seed")
    assert told.startswith("USAGE") and "training.checkpoint.every" in told
    assert told.endswith("--help seed prints that setting and those inside it alone.")
