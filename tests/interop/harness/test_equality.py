"""SextantLM against the harness's own `hf` model on the same weights."""

import lm_eval
import pytest
import torch
from accelerate.state import AcceleratorState
from lm_eval.api.task import ConfigurableTask

from data.files import write_json
from errors import InteropError, ModelError, TrainingError
from interop.harness import SextantLM
from model import TokenPositions
from run_directory.run import Run
from tests.interop.harness.models import LENGTH, byte_tokenizer, hf_model, instances, run_at
from tests.model.llama import as_llama
from tests.processes import together

TEXT = "Once upon a time there was a little girl named Lily. She loved to play with her toys in the park. "
PAIRS = [
    ("Once upon a time", " there was"),
    ("Once upon a time ", "there was"),  # the space moves to the continuation
    ("The cat", "s are here"),  # the border may lie within a token
    ("Lily saw a big", " dog"),
    ("Lily saw a big", " c"),
    ("", "Once upon"),
    ("Ünïcödé ☃", " ☃☃"),
    (TEXT * 8, "the end"),  # longer than the model: truncated on the left
]
GREEDY = {"max_gen_toks": 20, "until": ["a", "\n"], "do_sample": False}
PROMPTS = ["Once upon a time", "Lily saw", TEXT * 8]


@pytest.mark.parametrize(
    ("batch", "bos"),
    [
        (1, True),
        (5, True),
        (5, False),
    ],
)
def test_requests_of_every_kind(batch, bos, tmp_path):
    """Without BOS the prefix is EOS, and texts do not begin with BOS."""
    run = run_at(tmp_path / "run", bos=bos)
    controls = {"bos_token_id": 256 if bos else None, "eos_token_id": 257}
    llama = as_llama(Run.open(run).load().model, **controls)
    ours = SextantLM(str(run), batch_size=batch)
    theirs = hf_model(llama, byte_tokenizer(bos), batch_size=batch)
    assert ours.max_length == theirs.max_length
    assert ours.prefix_token_id == theirs.prefix_token_id == (256 if bos else 257)
    for kind, arguments in (
        ("loglikelihood", PAIRS),
        ("loglikelihood_rolling", [(TEXT * 8,), ("a",), (TEXT[:60],)]),
        ("generate_until", [(prompt, GREEDY) for prompt in PROMPTS]),
    ):
        found, expected = (
            getattr(lm, kind)(instances(kind, *arguments), disable_tqdm=True)
            for lm in (ours, theirs)
        )
        if kind != "generate_until":
            expected = [pytest.approx(value, rel=1e-5) for value in expected]
        assert found == expected


def test_extended_length_with_method(tmp_path):
    """A test-time method at a longer max_length is transformers' rope_type on the same weights."""
    run = str(run_at(tmp_path / "run"))
    factor = {"model.position.scaling.factor": 4}
    ours = SextantLM(run, method="linear", max_length=4 * LENGTH, **factor)
    llama = as_llama(
        Run.open(run).load().model,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        bos_token_id=256,
        eos_token_id=257,
    )
    theirs = hf_model(llama, byte_tokenizer(), max_length=4 * LENGTH)
    requests = instances("loglikelihood_rolling", (TEXT * 5,))
    assert ours.loglikelihood_rolling(requests) == pytest.approx(
        theirs.loglikelihood_rolling(requests), rel=1e-5
    )
    assert ours.get_model_info()["position"]["scaling"] == {"name": "linear", "factor": 4.0}


@torch.no_grad()
def test_declared_length_is_that_of_the_request(tmp_path):
    """Under a method that follows the length, a batch does not change its rows."""
    run = str(run_at(tmp_path / "run"))
    many = SextantLM(run, method="yarn", max_length=4 * LENGTH, batch_size=8)
    pairs = [(TEXT[:30], " end"), (TEXT * 3, " end")]
    values = [value for value, _ in many.loglikelihood(instances("loglikelihood", *pairs))]
    model = Run.open(run).load(["model.position.scaling={name: yarn, factor: auto}"]).model
    for (context, answer), value in zip(pairs, values, strict=True):
        ids = torch.tensor([[256, *(context + answer).encode()]])
        count = len(context + answer) - len(context.rstrip())
        logits = model(ids[:, :-1], TokenPositions.plain(ids.shape[1] - 1))
        log_p = logits[0, -count:].log_softmax(-1).gather(1, ids[0, -count:, None])
        assert value == pytest.approx(float(log_p.sum()), rel=1e-5)


def test_two_processes_equal_one(tmp_path):
    run = str(run_at(tmp_path / "run"))
    rows = [{"q": TEXT[:n], "a": [" end", " dog"]} for n in range(20, 27)]
    write_json(tmp_path / "rows.json", rows)

    def evaluated() -> tuple:
        AcceleratorState._reset_state(reset_partial_state=True)  # of the process before the fork
        task = ConfigurableTask(
            config={
                "task": "choice",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
                "output_type": "multiple_choice",
                "test_split": "test",
                "doc_to_text": "{{q}}",
                "doc_to_choice": "a",
                "doc_to_target": 0,
            }
        )
        lm = SextantLM(run, batch_size=2)
        found = lm_eval.simple_evaluate(lm, tasks=[task], bootstrap_iters=0)
        return lm.rank, lm.world_size, found and found["results"]["choice"]["acc,none"]

    rank, world, accuracy = evaluated()
    assert (rank, world) == (0, 1)
    assert together(2, evaluated) == [(0, 2, accuracy), (1, 2, None)]


def test_refused_arguments(tmp_path):
    run = str(run_at(tmp_path / "run"))
    learned = str(run_at(tmp_path / "learned", position={"name": "learned"}))
    for where, arguments, error, named in (
        (run, {"pretrained": "gpt2"}, InteropError, "pretrained"),
        (run, {"method": "truncate"}, InteropError, "max_length"),
        (run, {"model.position": "{name: alibi}"}, ModelError, "alibi"),
        (learned, {"max_length": LENGTH + 1}, InteropError, "max_length"),
        ("no-run", {}, TrainingError, "no-run"),
    ):
        with pytest.raises(error, match=named):
            SextantLM(where, **arguments)
    assert SextantLM(learned, method="extend_clip", max_length=200).max_length == 200


def test_arguments_as_the_harness_passes_them(tmp_path):
    run = run_at(tmp_path / "run")
    lm = SextantLM.create_from_arg_obj(
        {"run": str(run), "model.position.scaling": "{name: yarn, factor: 2}", "max_length": 128},
        {"batch_size": "3", "max_batch_size": None, "device": "cuda:0"},
    )
    assert (lm.batch_size, lm.max_length, lm.device.type) == (3, 128, "cpu")
    assert lm.run.model.settings.position.scaling.factor == 2
