"""The lines of docs/interop.md that convert a GGUF file to a Hugging Face folder."""

import re
import runpy
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers

from interop.build import build_model
from interop.checkpoint import read_folder
from interop.imported_runs import run_of
from run_directory.run import Run
from tests.files import ROOT
from tests.interop.models import make

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def write(path: Path, theirs) -> None:
    """A Llama as llama.cpp writes it: adjacent features are rotated together."""
    config = theirs.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*BYTES, "ab", "<|endoftext|>"])
    writer.add_token_merges(["a b"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in theirs.state_dict().items():
        stem, end = name.rsplit(".", 1)
        part = stem.rsplit(".")[-1]
        if part in heads:
            weight = weight.unflatten(0, (heads[part], 2, -1)).swapaxes(1, 2).flatten(0, 2)
        writer.add_tensor(f"{names.get_name(stem)}.{end}", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_documented_lines_convert_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = make("llama", vocab_size=258, head_dim=4)
    theirs.save_pretrained("original")
    expected = build_model(read_folder("original")).model
    write(tmp_path / "model.gguf", theirs)
    text = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n([^`]*gguf_file[^`]*)```", text)
    (tmp_path / "convert.py").write_text(lines)
    runpy.run_path("convert.py")
    run = Run.open(run_of("hf:model-hf")).load()
    assert run.settings.train_length == 64
    eps = run.model.settings.norm_eps  # float32 in the file
    assert eps == pytest.approx(expected.settings.norm_eps)
    assert run.model.settings == expected.settings.model_copy(update={"norm_eps": eps})
    torch.testing.assert_close(run.model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert run.tokenizer.encode("abé") == [256, *(BYTES.index(character) for character in "Ã©")]
