import pytest

from evaluation import EvaluationError, comparable

ONE = {
    "protocol": "fixed-targets",
    "tokenizer_hash": "t" * 64,
    "corpus_hash": "c" * 64,
    "bos": "as-trained",
    "targets_hash": "h" * 64,
    "checkpoint_hash": "model",
}


def test_runs_on_the_same_targets_may_be_compared():
    comparable(
        {"rope": ONE, "alibi": ONE | {"checkpoint_hash": "another", "lengths": [1]}, "none": dict(ONE)}
    )
    comparable({})


@pytest.mark.parametrize("key", [key for key in ONE if key != "checkpoint_hash"])
def test_what_differs_is_named_with_the_two_that_differ(key):
    other = ONE | {key: "x" * 64}
    with pytest.raises(EvaluationError, match=rf"^rope and fox cannot be compared: {key} differs \(.*xxxx"):
        comparable({"rope": ONE, "alibi": ONE, "fox": other})


def test_the_cause_is_named_before_its_effects_and_what_is_not_stated_is_no_agreement():
    changed = dict.fromkeys(("targets_hash", "tokenizer_hash", "corpus_hash"), "other")
    with pytest.raises(EvaluationError, match="tokenizer_hash differs"):
        comparable({"a": ONE, "b": ONE | changed})
    old = {key: value for key, value in ONE.items() if key != "targets_hash"}
    with pytest.raises(EvaluationError, match="missing"):
        comparable({"a": old, "b": old})
