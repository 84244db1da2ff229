"""Our tasks in the harness, and several processes."""

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from data.tasks.closed import RecallTask
from data.tokenizers import ByteTokenizer
from errors import InteropError
from evaluation.tasks.drawn_items import draw_items
from evaluation.tasks.task_scoring import TaskScorer, read_items
from evaluation.tasks.task_settings import TaskEvaluationSettings
from interop.harness import TASKS
from interop.harness.lm import SextantLM
from run_directory.run import Run
from tests.interop.harness.models import byte_pair, hf_model
from tests.processes import together

OURS = ["sextant_passkey", "sextant_needle", "sextant_recall", "sextant_variables"]


@pytest.fixture(scope="module")
def bytes_pair(tmp_path_factory):
    return byte_pair(tmp_path_factory.mktemp("tasks"))


def manager(**metadata) -> TaskManager:
    return TaskManager(include_path=[str(TASKS)], include_defaults=False, metadata=metadata)


def evaluated(lm, tasks, given: TaskManager) -> dict:
    """Every number of an evaluation, per task and per sample."""
    found = lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=given, bootstrap_iters=0)
    if found is None:
        return {}
    samples = {
        name: {one["doc_id"]: {metric: one[metric] for metric in one["metrics"]} for one in rows}
        for name, rows in found["samples"].items()
    }
    return {"results": found["results"], "samples": samples}


@pytest.mark.parametrize("length", [128, 300])
def test_items_fill_their_length(length):
    loaded = manager(lengths=[length], items=10, tokenizer="bytes").load(["sextant"])
    assert set(loaded["tasks"]) == {f"{name}_{length}" for name in OURS}
    assert set(loaded["groups"]) == {"sextant", *OURS}
    for name, task in loaded["tasks"].items():
        documents = list(task.test_docs())
        assert len(documents) == 10 and len({one["prompt"] for one in documents}) == 10
        for one in documents:
            # with BOS, without the last
            inputs = 1 + len((one["prompt"] + one["choices"][0]).encode()) - 1
            assert inputs == length or ("recall" in name and length - 12 < inputs <= length)
            assert (
                task.doc_to_text(one) == one["prompt"] and task.doc_to_choice(one) == one["choices"]
            )
            hidden = [choice for choice in one["choices"] if choice.strip(" .\n") in one["prompt"]]
            assert one["choices"][0] in hidden and len(set(one["choices"])) == len(one["choices"])
    again = manager(lengths=[length], items=10, tokenizer="bytes").load(["sextant_needle"])["tasks"]
    (name,) = again
    assert list(again[name].test_docs()) == list(loaded["tasks"][name].test_docs())


def test_accuracy_equals_evaluate(bytes_pair):
    """The same items, likelihoods and greedy answers as `evaluate.py protocol=tasks`."""
    run, *_ = bytes_pair
    settings = TaskEvaluationSettings(task=RecallTask(), lengths=[128], items=12, seed=3)
    drawn = draw_items(
        settings, RecallTask(), ByteTokenizer(), bos=True, trained_length=128, documents=None
    )
    expected = read_items(
        TaskScorer(Run.open(run).load().model), drawn.items[128], 128, bos=256, batch=4
    )
    found = evaluated(
        SextantLM(run, max_length=128, batch_size=4),
        ["sextant_recall"],
        manager(lengths=[128], items=12, seed=3, run=str(run)),
    )["samples"]["sextant_recall_128"]
    assert [found[i]["acc"] for i in range(12)] == expected.right.tolist()
    assert [found[i]["exact_match"] for i in range(12)] == expected.exact.tolist()
    assert 0 < expected.right.mean() < 1


def test_task_settings_and_metadata_errors():
    hops = manager(lengths=[200], items=3, tokenizer="bytes", task_settings={"hops": 3})
    (task,) = hops.load(["sextant_variables"])["tasks"].values()
    assert all(one["prompt"].count(" = ") >= 2 * 4 for one in task.test_docs())
    with pytest.raises(InteropError, match="tokenizer"):
        manager(lengths=[128]).load(["sextant_recall"])
    with pytest.raises(InteropError, match="lengths"):
        manager(lengths="many", tokenizer="bytes").load(["sextant_recall"])


def close(found: dict, expected: dict) -> None:
    assert found["samples"].keys() == expected["samples"].keys()
    for name, rows in expected["samples"].items():
        for index, metrics in rows.items():
            for metric, value in metrics.items():
                assert found["samples"][name][index][metric] == pytest.approx(value, rel=1e-5), (
                    name,
                    metric,
                )
        for metric, value in expected["results"][name].items():
            if isinstance(value, str):
                continue
            assert found["results"][name][metric] == pytest.approx(value, rel=1e-5, nan_ok=True), (
                name,
                metric,
            )


def test_whole_evaluations_equal_hf(bytes_pair):
    run, llama, tokenizer = bytes_pair
    items = {"lengths": [160], "items": 3, "tokenizer": "bytes"}
    expected = evaluated(hf_model(llama, tokenizer, max_length=160), ["sextant"], manager(**items))
    ours = SextantLM(run, max_length=160, batch_size=4)
    close(evaluated(ours, ["sextant"], manager(**items)), expected)


def test_two_processes_equal_one(bytes_pair):
    run, *_ = bytes_pair
    items = {"lengths": [128], "items": 5, "tokenizer": "bytes"}

    def both() -> dict:
        lm = SextantLM(run, batch_size=2, max_length=128)
        found = evaluated(lm, ["sextant_recall", "sextant_needle"], manager(**items))
        return {"ranks": (lm.rank, lm.world_size)} | found

    alone = both()
    (first, second) = together(2, both)
    assert not isinstance(first, Exception) and not isinstance(second, Exception), (first, second)
    assert (alone["ranks"], first["ranks"], second["ranks"]) == ((0, 1), (0, 2), (1, 2))
    assert second.keys() == {"ranks"}  # only the first process has results
    close(first, alone)
