import pytest

from errors import EvaluationError
from evaluation.comparable import comparable

ONE = {
    "protocol": "fixed-targets",
    "tokenizer_hash": "t" * 64,
    "corpus_hash": "c" * 64,
    "bos": "as-trained",
    "targets_hash": "h" * 64,
    "checkpoint_hash": "model",
}


@pytest.mark.parametrize("key", [key for key in ONE if key != "checkpoint_hash"])
def test_differences_name_both_runs(key):
    other = ONE | {key: "x" * 64}
    with pytest.raises(
        EvaluationError, match=rf"^rope and fox cannot be compared: {key} differs \(.*xxxx"
    ):
        comparable({"rope": ONE, "alibi": ONE, "fox": other})


def test_root_cause_is_reported_and_missing_values_differ():
    changed = dict.fromkeys(("targets_hash", "tokenizer_hash", "corpus_hash"), "other")
    with pytest.raises(EvaluationError, match="tokenizer_hash differs"):
        comparable({"a": ONE, "b": ONE | changed})
    old = {key: value for key, value in ONE.items() if key != "targets_hash"}
    with pytest.raises(EvaluationError, match="missing"):
        comparable({"a": old, "b": old})
