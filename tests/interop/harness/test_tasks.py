"""Our tasks in the harness, tasks of local files, and several processes."""

import json

import lm_eval
import pytest
import yaml
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


def manager(*folders, **metadata) -> TaskManager:
    return TaskManager(
        include_path=list(folders or [TASKS]), include_defaults=False, metadata=metadata
    )


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


LOCAL = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 10, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def local_tasks(tmp_path_factory):
    """A folder of harness tasks over a local JSON file."""
    folder = tmp_path_factory.mktemp("local")
    documents = folder / "docs.jsonl"
    rows = [
        {
            "question": f"What is {n} plus {n}?",
            "choices": [str(2 * n), "a cat", f"{n} dogs"],
            "label": n % 3,
            "text": f"The number {n} is here, and so is Lily. " * (n + 1),
        }
        for n in range(7)
    ]
    documents.write_text("\n".join(map(json.dumps, rows)))
    source = {"data_files": str(documents), "cache_dir": str(folder / "cache")}
    common = {"dataset_path": "json", "dataset_kwargs": source, "test_split": "train"}
    for name, task in LOCAL.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **task}))
    return folder


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


def test_whole_evaluations_equal_hf(bytes_pair, local_tasks):
    run, llama, tokenizer = bytes_pair
    expected = evaluated(hf_model(llama, tokenizer, batch_size=3), [*LOCAL], manager(local_tasks))
    close(evaluated(SextantLM(run, batch_size=3), [*LOCAL], manager(local_tasks)), expected)
    items = {"lengths": [160], "items": 3, "tokenizer": "bytes"}
    expected = evaluated(hf_model(llama, tokenizer, max_length=160), ["sextant"], manager(**items))
    close(
        evaluated(SextantLM(run, max_length=160, batch_size=4), ["sextant"], manager(**items)),
        expected,
    )


def test_two_processes_equal_one(bytes_pair, local_tasks):
    run, *_ = bytes_pair
    items = {"lengths": [128], "items": 5, "tokenizer": "bytes"}

    def both() -> dict:
        lm = SextantLM(run, batch_size=2, max_length=128)
        given = manager(local_tasks, TASKS, **items)
        return {"ranks": (lm.rank, lm.world_size)} | evaluated(
            lm, [*LOCAL, "sextant_recall"], given
        )

    alone = both()
    (first, second) = together(2, both)
    assert not isinstance(first, Exception) and not isinstance(second, Exception), (first, second)
    assert (alone["ranks"], first["ranks"], second["ranks"]) == ((0, 1), (0, 2), (1, 2))
    assert second.keys() == {"ranks"}  # only the first process has results
    close(first, alone)
