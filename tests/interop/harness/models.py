"""The same weights as a Sextant run and as the harness's `hf` model, and its requests."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaForCausalLM, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from data.data_settings import DataSettings
from data.tokenizers import ByteTokenizer
from interop.runs import find_source, import_source
from model import ModelSettings, Transformer
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from run_directory.weights import save_weights
from tests.corpora import STORIES
from tests.model.llama import as_llama

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


def byte_pair(folder: Path) -> tuple[Path, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A run over bytes and its `hf` counterpart."""
    run = byte_run(folder / "run")
    llama = as_llama(Run.open(run).load().model, bos_token_id=256, eos_token_id=257)
    return run, llama, byte_tokenizer()


def stories_pair(folder: Path) -> tuple[Path, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """stories260K, imported as a run and loaded by transformers."""
    shutil.copytree(STORIES / "hf", folder / "hf", copy_function=shutil.copyfile)
    (folder / "hf").chmod(0o755)
    shutil.copyfile(STORIES / "tok512.model", folder / "hf" / "tokenizer.model")
    run = folder / "run"
    import_source(find_source(f"hf:{folder / 'hf'}"), run)
    tokenizer = LlamaTokenizer.from_pretrained(folder / "hf", add_bos_token=True)
    # transformers 5 inserts no space before a text that begins with one; sentencepiece does.
    tokenizer.backend_tokenizer.pre_tokenizer = None
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return run, LlamaForCausalLM.from_pretrained(STORIES / "hf").eval(), tokenizer


def hf_model(llama, tokenizer, **arguments) -> HFLM:
    return HFLM(pretrained=llama, tokenizer=tokenizer, **arguments)


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]
