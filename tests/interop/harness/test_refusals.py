"""Arguments that do not fit the run or the harness are refused before any compute."""

import pytest

from errors import InteropError, ModelError, TrainingError
from interop.harness.lm import SextantLM
from run_directory.run import Run
from tests.interop.harness.models import LENGTH, byte_run, instances


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return byte_run(tmp_path_factory.mktemp("refused") / "run")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pretrained": "gpt2"}, "pretrained"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": "long"}, "max_length"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"dtype": "int8"}, "dtype"),
        ({"prefix_token_id": 258}, "prefix_token_id"),
        ({"method": "truncate", "max_length": 2 * LENGTH}, "truncate"),
    ],
)
def test_model_arguments(run, arguments, named):
    with pytest.raises(InteropError, match=named):
        SextantLM(run, **arguments)


def test_errors_of_the_run_are_kept(run, tmp_path):
    with pytest.raises(TrainingError, match="no-run"):
        SextantLM(tmp_path / "no-run")
    with pytest.raises(ModelError, match="alibi"):
        SextantLM(run, **{"model.position": "{name: alibi}"})
    with pytest.raises(InteropError, match=r"sextant\.load"):
        SextantLM(Run.open(run).load(), method="yarn")


def test_learned_table_limits_max_length(tmp_path):
    run = byte_run(tmp_path / "run", position={"name": "learned"})
    assert SextantLM(run).max_length == LENGTH
    with pytest.raises(InteropError, match="max_length=97"):
        SextantLM(run, max_length=LENGTH + 1)
    assert SextantLM(run, method="extend_clip", max_length=200).max_length == 200


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_gen_toks": LENGTH}, "max_gen_toks"),
        ({"max_gen_toks": 4, "num_beams": 3}, "num_beams"),
        ({"max_gen_toks": 4, "typical_p": 0.3}, "typical_p"),
        ({"max_gen_toks": 4, "do_sample": True}, "temperature"),
        ({"max_gen_toks": 4, "do_sample": True, "temperature": 1, "top_p": 2}, "top_p"),
    ],
)
def test_generation_arguments(run, arguments, named):
    with pytest.raises((InteropError, ModelError), match=named):
        SextantLM(run).generate_until(instances("generate_until", ("abc", arguments)))


@pytest.mark.parametrize("answer", ["", "x" * (LENGTH + 1)])
def test_continuations_that_cannot_be_scored(run, answer):
    with pytest.raises(InteropError, match="continuation"):
        SextantLM(run).loglikelihood(instances("loglikelihood", ("abc", answer)))


def test_arguments_as_the_harness_passes_them(run):
    """Text and numbers from `--model_args`, and a device that is not there."""
    lm = SextantLM.create_from_arg_obj(
        {"run": str(run), "model.position.scaling": "{name: yarn, factor: 2}", "max_length": 128},
        {"batch_size": "3", "max_batch_size": None, "device": "cuda:0"},
    )
    assert (lm.batch_size, lm.max_length, lm.device.type) == (3, 128, "cpu")
    assert lm.model.settings.position.scaling.factor == 2
    assert SextantLM.create_from_arg_string(f"run={run},model.position.window=5").overrides == [
        "model.position.window=5"
    ]
