"""Pass keys, needles, associative recall and variable tracking as harness tasks, one task per
length.

The items are those of `evaluate.py protocol=tasks`. The YAML files beside this one name it.
"""

from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data.tasks import HaystackTask
from data.tokenizers import ByteTokenizer, Tokenizer, load_folder_tokenizer, load_tokenizer
from errors import InteropError
from evaluation.stores import haystacks
from evaluation.tasks.drawn_items import draw_items
from evaluation.tasks.task_settings import TaskEvaluationSettings
from interop.runs import run_of
from run_directory.run import Run


class ItemMetadata(BaseModel):
    """What `--metadata` may set; other keys, such as those of `--model_args`, are ignored."""

    model_config = ConfigDict(extra="ignore")

    lengths: list[int] = Field([128, 256, 512, 1024], min_length=1)  # input tokens, with BOS
    items: int = Field(100, ge=1)  # per length: the same questions in longer contexts
    depths: int = Field(5, ge=1)
    haystacks: int = Field(40, ge=1)
    seed: int = 0
    task_settings: dict[str, Any] = {}  # of the task, e.g. {"hops": 2}
    tokenizer: str | None = None  # "bytes" or a run; default: that of the evaluated model
    run: str | None = None
    pretrained: str | None = None  # the folder of a model `hf`


class LengthGroup(Group):
    """The tasks of one kind of item, NAME_LENGTH for every length of the metadata."""

    def __init__(self, config: dict[str, Any]):
        name = config["task"]
        item = config["item"]
        try:
            metadata = ItemMetadata.model_validate(config["metadata"])
        except ValidationError as error:
            first = error.errors()[0]
            raise InteropError(
                f"metadata {'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from error
        super().__init__(name, metadata=config["metadata"])
        for length in metadata.lengths:
            task = {
                "task": f"{name}_{length}",
                "output_type": "multiple_choice",
                "custom_dataset": documents,
                "dataset_kwargs": {"item": item, "length": length},
                "test_split": "test",
                "doc_to_text": "prompt",
                "doc_to_choice": "choices",
                "doc_to_target": "answer",
                "target_delimiter": "",
                "process_results": process_results,
                "num_fewshot": 0,
                "metric_list": [
                    {"metric": metric, "aggregation": "mean", "higher_is_better": True}
                    for metric in ("acc", "exact_match")
                ],
                "metadata": config["metadata"],
            }
            self.add(ConfigurableTask(config=task))


def documents(item: dict[str, Any], length: int, **metadata: Any) -> dict[str, Dataset]:
    """The items of one length: at most `length` input tokens, the last token of the answer not
    counted."""
    given = ItemMetadata.model_validate(metadata)
    tokenizer, bos = tokenizer_of(given)
    room = length + 1 - bos
    shorter = 0
    while True:  # text that is encoded at once may have more tokens than its parts
        fields = {"items", "depths", "haystacks", "seed"}
        settings = TaskEvaluationSettings.model_validate(
            given.model_dump(include=fields)
            | {"task": item | given.task_settings, "lengths": [length - shorter]}
        )
        items = _draw(settings, tokenizer, bos)
        most = max(len(tokenizer.encode(item["prompt"] + item["choices"][0])) for item in items)
        if most <= room:
            return {"test": Dataset.from_list(items)}
        shorter += most - room


def _draw(
    settings: TaskEvaluationSettings, tokenizer: Tokenizer, bos: bool
) -> list[dict[str, Any]]:
    task = settings.task
    texts = None
    origin = ""
    assert task is not None and settings.lengths is not None
    if isinstance(task, HaystackTask):
        texts, origin = haystacks(task, None)
    (length,) = settings.lengths
    drawn = draw_items(
        settings, task, tokenizer, bos=bos, trained_length=length, documents=texts, origin=origin
    )
    return [
        {
            # A haystack of bytes may begin within a character.
            "prompt": tokenizer.decode(drawn_item.prompt).lstrip("\ufffd"),
            "choices": [
                tokenizer.decode(answer) for answer in (drawn_item.answer, *drawn_item.others)
            ],
            "answer": 0,
            "depth": drawn_item.depth,
            "distance": drawn_item.distance,
            "haystack": drawn.unit_names[drawn.unit[i]],
        }
        for i, drawn_item in enumerate(drawn.items[length])
    ]


def tokenizer_of(metadata: ItemMetadata) -> tuple[Tokenizer, bool]:
    """The tokenizer that counts the tokens of an item, and whether BOS is one of them."""
    if metadata.tokenizer == "bytes":
        return ByteTokenizer(), True
    if run := metadata.tokenizer or metadata.run:
        folder = run_of(run)
        return load_tokenizer(folder / "tokenizer"), Run(folder).settings.data.bos
    if metadata.pretrained and Path(metadata.pretrained).is_dir():
        tokenizer = load_folder_tokenizer(metadata.pretrained)
        return tokenizer, tokenizer.add_bos
    raise InteropError(
        "the length of an item is counted in tokens, but no tokenizer is given: pass --metadata "
        'with {"tokenizer": "bytes"} or {"tokenizer": "RUN"}'
    )


def process_results(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """acc: the right answer is more likely than every other; exact_match: greedy decoding generates
    it."""
    (right, greedy), *others = results
    return {"acc": float(right > max(score for score, _ in others)), "exact_match": float(greedy)}
