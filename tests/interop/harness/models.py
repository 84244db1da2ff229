"""The same weights as a Sextant run and as the harness's `hf` model, and its requests."""

from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.byte_runs import byte_run

LENGTH = 96


def run_at(folder: Path, position: dict | None = None, bos: bool = True) -> Path:
    return byte_run(folder, position or {"name": "rope"}, LENGTH, bos=bos)


def byte_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """The tokenizer of `byte_run` as one of transformers."""
    letters = bytes_to_unicode()
    made = Tokenizer(models.BPE(vocab={letters[i]: i for i in range(256)}, merges=[]))
    made.add_special_tokens(["<s>", "</s>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    special = {"bos_token": "<s>", "eos_token": "</s>"} if bos else {"eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def hf_model(llama, tokenizer, **arguments) -> HFLM:
    return HFLM(pretrained=llama, tokenizer=tokenizer, **arguments)


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]
