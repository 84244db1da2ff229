"""The same weights as a Sextant run and as the harness's `hf` model, and its requests."""

from __future__ import annotations

from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from data.data_settings import DataSettings
from data.tokenizers import ByteTokenizer
from model import ModelSettings, Transformer
from run_directory.checkpoints import save_weights
from run_directory.run import Run
from run_directory.run_settings import RunSettings

LENGTH = 96


def byte_run(
    folder: Path, position: dict | None = None, bos: bool = True, eos: bool = True
) -> Path:
    """A run over bytes with random weights, large enough for attention to matter."""
    shape = ModelSettings(
        dim=24, layers=2, heads=6, kv_heads=2, ffn_dim=40, position=position or {"name": "rope"}
    )
    settings = RunSettings(
        train_length=LENGTH,
        model=shape,
        data=DataSettings(tokenizer={"name": "bytes"}, bos=bos, eos=eos),
        training={"validation": {"targets": 8}},
    )
    model = Transformer(shape, 258, LENGTH).initialize(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(20 if name == "head.weight" else 2)
    Run.create(folder, settings, ByteTokenizer(), ["test"])
    save_weights(folder, 0, model)
    return folder


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
