"""SextantLM against the harness's own `hf` model on the same weights."""

import pytest
import torch

from errors import InteropError
from interop.harness.lm import SextantLM
from model import TokenPositions
from run_directory.run import Run
from tests.interop.harness.models import LENGTH, byte_run, byte_tokenizer, hf_model, instances
from tests.model.llama import as_llama

TEXT = "Once upon a time there was a little girl named Lily. She loved to play with her toys in the park. "
PAIRS = [
    ("Once upon a time", " there was"),
    ("Once upon a time ", "there was"),  # the space moves to the continuation
    ("The cat", "s are here"),  # the border may lie within a token
    ("Lily saw a big", " dog"),
    ("Lily saw a big", " cat"),
    ("Lily saw a big", " c"),
    ("", "Once upon"),
    ("", " a"),
    ("x", "\n\nThe end."),
    ("Ünïcödé ☃", " ☃☃"),
    (TEXT * 8, "the end"),  # longer than the model: truncated on the left
    (TEXT * 3, TEXT),
]


def test_loglikelihood(pair):
    run, llama, tokenizer = pair
    theirs = hf_model(llama, tokenizer, batch_size=4)
    pairs = [(context, answer) for context, answer in PAIRS if len(answer) < theirs.max_length]
    expected = theirs.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for batch in (1, 5, "auto"):
        ours = SextantLM(run, batch_size=batch)
        assert ours.max_length == theirs.max_length
        found = ours.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
        for (value, greedy), (own, own_greedy), words in zip(expected, found, pairs, strict=True):
            assert own == pytest.approx(value, rel=1e-5), words
            assert own_greedy == greedy


@pytest.mark.parametrize(("max_length", "batch"), [(None, 1), (50, 3), (17, "auto")])
def test_rolling(pair, max_length, batch):
    run, llama, tokenizer = pair
    texts = [(TEXT * 8,), ("a",), (TEXT[:60],), (TEXT * 2,)]
    theirs = hf_model(llama, tokenizer, max_length=max_length, batch_size=2)
    ours = SextantLM(run, max_length=max_length, batch_size=batch)
    requests = instances("loglikelihood_rolling", *texts)
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests, disable_tqdm=True) == pytest.approx(
        expected, rel=1e-5
    )


GENERATIONS = [
    {"max_gen_toks": 12},
    {"max_gen_toks": 20, "until": ["a", "\n"], "do_sample": False},
    {"max_gen_toks": 20, "until": "he", "temperature": 0.0},
    {"max_new_tokens": 7, "until": [], "do_sample": False, "num_beams": 1},
]


@pytest.mark.parametrize("arguments", GENERATIONS, ids=str)
def test_greedy_generation(pair, arguments):
    run, llama, tokenizer = pair
    prompts = [
        "Once upon a time",
        "Lily saw",
        TEXT * 8,
        "The cat and the dog went to the park. They",
    ]
    requests = instances("generate_until", *((prompt, arguments) for prompt in prompts))
    expected = [
        hf_model(llama, tokenizer).generate_until([one], disable_tqdm=True)[0] for one in requests
    ]
    assert any(expected)
    for batch in (1, 4):
        assert (
            SextantLM(run, batch_size=batch).generate_until(requests, disable_tqdm=True) == expected
        )


def test_extended_length_with_method(tmp_path):
    """A test-time method at a longer max_length is transformers' rope_type on the same weights."""
    run = byte_run(tmp_path / "run")
    ours = SextantLM(run, "model.position.scaling.factor=4", method="linear", max_length=4 * LENGTH)
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
    plain = SextantLM(run, max_length=4 * LENGTH).loglikelihood_rolling(requests)
    assert abs(plain[0] - ours.loglikelihood_rolling(requests)[0]) > 1
    assert ours.get_model_info()["position"]["scaling"] == {"name": "linear", "factor": 4.0}


@torch.no_grad()
def test_declared_length_is_that_of_the_request(tmp_path):
    """Under a method that follows the length, a batch does not change its rows."""
    run = byte_run(tmp_path / "run")
    pairs = [(TEXT[:n], " end") for n in (95, 30, 95, 60, 30)]
    how = {"method": "yarn", "max_length": 4 * LENGTH}
    alone = SextantLM(run, **how).loglikelihood(instances("loglikelihood", *pairs))
    many = SextantLM(run, **how, batch_size=8).loglikelihood(instances("loglikelihood", *pairs))
    assert [value for value, _ in many] == pytest.approx([value for value, _ in alone], rel=1e-6)
    long = SextantLM(run, **how).loglikelihood(instances("loglikelihood", (TEXT * 3, " end")))[0][0]
    model = Run.open(run).load(["model.position.scaling={name: yarn, factor: auto}"]).model
    ids = torch.tensor([[256, *(TEXT * 3).rstrip().encode(), *b"  end"]])
    logits = model(ids[:, :-1], TokenPositions.plain(ids.shape[1] - 1))
    log_p = logits[0, -5:].log_softmax(-1).gather(1, ids[0, -5:, None])
    assert long == pytest.approx(float(log_p.sum()), rel=1e-5)


def test_run_without_bos(tmp_path):
    """The prefix is EOS, and texts do not begin with BOS."""
    run = byte_run(tmp_path / "run", bos=False)
    llama = as_llama(Run.open(run).load().model, bos_token_id=None, eos_token_id=257)
    theirs = hf_model(llama, byte_tokenizer(bos=False))
    ours = SextantLM(run)
    assert ours.prefix_token_id == theirs.prefix_token_id == 257
    requests = instances("loglikelihood", ("", "abc"), ("abc", "def"))
    for (own, _), (value, _) in zip(
        ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True
    ):
        assert own == pytest.approx(value, rel=1e-5)
    given = SextantLM(run, prefix_token_id=10)
    expected = hf_model(llama, byte_tokenizer(bos=False), prefix_token_id=10).loglikelihood(
        requests
    )
    assert given.loglikelihood(requests)[0][0] == pytest.approx(expected[0][0], rel=1e-5)
    # Spaces belong to the continuation, so that this context is empty.
    (spaces,) = given.loglikelihood(instances("loglikelihood", ("  ", "abc")))
    (moved,) = given.loglikelihood(instances("loglikelihood", ("", "  abc")))
    assert spaces == moved
    neither = SextantLM(byte_run(tmp_path / "neither", bos=False, eos=False))
    with pytest.raises(InteropError, match="prefix_token_id"):
        neither.loglikelihood(requests)


def test_sampling_is_reproducible_and_independent_of_the_batch(tmp_path):
    run = byte_run(tmp_path / "run")
    arguments = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "max_gen_toks": 12}
    prompts = ["abc", "abc", "Lily saw a dog", "x"]
    requests = instances("generate_until", *((prompt, arguments) for prompt in prompts))
    found = SextantLM(run, batch_size=4).generate_until(requests)
    assert SextantLM(run, batch_size=1).generate_until(requests) == found
    assert found[0] != found[1]  # repeats of a request are different samples
    assert SextantLM(run, seed=1).generate_until(requests) != found
