"""What a run is said to take: by hand, and with the mends that are not in its settings yet."""

from types import SimpleNamespace

import pytest
import torch

from data import DataError, expected_vocabulary
from model import Transformer
from training import dry_run
from training.config import load_settings
from training.console import Console
from training.hardware import forecast
from training.memory import Layout, memory
from training.settings import RunSettings

WORDS = ["data.tokenizer.name=bytes", "train_length=64", "model.dim=64", "model.heads=2", "model.layers=3"]


@pytest.fixture
def settings() -> RunSettings:
    return load_settings(RunSettings, [*WORDS, "training.batch_size=8"])


def test_states_by_hand(settings):
    with torch.device("meta"):
        model = Transformer(settings.model, 258, 64)
    p = model.parameter_count()
    for split, layout in (
        (1, Layout(1, False, 8, half=False, mean=True)),
        (4, Layout(4, True, 2, half=False, mean=True)),
    ):
        found = memory(model, 64, layout)
        assert [found[key] for key in ("weights", "gradients", "moments", "mean")] == [
            n * p / split for n in (4, 4, 8, 4)
        ]
    wide = memory(model, 64, Layout(1, False, 8, half=False, float_bytes=8))
    assert wide["weights"] == 8 * p and wide["mean"] == 0
    narrow = memory(model, 64, Layout(1, False, 8, half=False))
    assert wide["activations"] == 2 * narrow["activations"]


def test_recomputed_blocks_take_a_third_more_time_and_devices_share_it(settings):
    with torch.device("meta"):
        model = Transformer(settings.model, 258, 64)
    layouts = [Layout(1, False, 8), Layout(1, False, 8, checkpointing=True), Layout(4, True, 2)]
    one, again, four = (forecast(model, 64, settings.plan, layout, peak=1e12) for layout in layouts)
    assert one.seconds == pytest.approx(one.tokens * one.flops_per_token / 0.45e12)
    assert again.seconds == pytest.approx(4 / 3 * one.seconds) and four.seconds == pytest.approx(
        one.seconds / 4
    )


@pytest.mark.parametrize(
    ("words", "sharded", "said", "unsaid"),
    [
        ([], False, ["micro_batch (now 4)", "activation_checkpointing", "sharding=full"], "more devices"),
        (["training.micro_batch=1"], False, ["activation_checkpointing", "sharding=full"], "micro_batch"),
        (
            ["training.parallel.activation_checkpointing=true"],
            True,
            ["or take more devices"],
            "checkpointing",
        ),
    ],
)
def test_only_what_is_not_done_yet_is_advised(settings, monkeypatch, capsys, words, sharded, said, unsaid):
    settings = load_settings(RunSettings, [*WORDS, "training.batch_size=8", *words])
    monkeypatch.setattr(dry_run, "free_memory", lambda device: 1000)
    monkeypatch.setattr(dry_run, "peak_flops", lambda device: 1e12)
    here = SimpleNamespace(world=2, sharded=sharded, device=torch.device("cpu"), main=True)
    assert dry_run.show_forecast(settings, here, Console()) == 1  # type: ignore[arg-type]
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "will not fit" in line]
    assert all(words in warning for words in said) and unsaid not in warning
    here.main = False  # the others leave the telling to the main process
    assert dry_run.show_forecast(settings, here, Console()) == 0  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


def test_the_vocabulary_is_that_of_a_given_model(settings, tmp_path, monkeypatch):
    assert expected_vocabulary(settings.data) == 258
    words = [*WORDS[1:], "data.tokenizer.name=sentencepiece", "data.tokenizer.vocab_size=777"]
    assert expected_vocabulary(load_settings(RunSettings, words).data) == 777
    given = load_settings(RunSettings, [*words, f"data.tokenizer.model={tmp_path}/some.model"]).data
    with pytest.raises(DataError, match=r"some\.model"):
        expected_vocabulary(given)
    monkeypatch.setattr("data.presence.load_sentencepiece", lambda path: SimpleNamespace(vocab_size=300))
    assert expected_vocabulary(given) == 300
