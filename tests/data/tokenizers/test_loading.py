"""Tokenizers of Hugging Face folders, with the control symbols that AutoTokenizer finds; saved
tokenizers."""

import json

import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer

from data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    load_folder_tokenizer,
    load_tokenizer,
)
from data.preparation.tokenizer_training import train_tokenizer
from data.tokenizers import load_tokenizer_file, saved_settings
from data.tokenizers.tokenizer_settings import (
    BytesSettings,
    HuggingFaceSettings,
)

TEXT = "the cat sat on the mat, and the dog sat on the log; " * 9
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
TURN = "<|turn|>"


@pytest.fixture(scope="module")
def plain() -> tokenizers.Tokenizer:
    """Ids 0 to 269 with BOS 0 and EOS 1, then the end of a turn, without a post-processor."""
    made = train_tokenizer(HuggingFaceSettings(vocab_size=270), [TEXT])
    assert isinstance(made, HuggingFaceTokenizer)
    spec = json.loads(made.content) | {"post_processor": None}
    found = tokenizers.Tokenizer.from_str(json.dumps(spec))
    found.add_special_tokens([TURN])
    return found


def write_folder(folder, library: tokenizers.Tokenizer, **files) -> None:
    """`files` are the contents of JSON files; tokenizer_config.json has what AutoTokenizer
    needs."""
    library.save(str(folder / "tokenizer.json"))
    files["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast"} | files.get(
        "tokenizer_config", {}
    )
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("has_template", [False, True])
@pytest.mark.parametrize(
    ("config", "bos", "eos"),
    [
        ({"bos_token": BOS, "eos_token": EOS}, 0, 1),
        ({"bos_token": {"content": BOS, "__type": "AddedToken"}, "eos_token": TURN}, 0, 270),
        ({"bos_token": None, "eos_token": EOS}, None, 1),
        ({"bos_token": EOS, "eos_token": EOS}, 1, 1),
    ],
)
def test_folder_has_the_symbols_of_auto_tokenizer(plain, tmp_path, config, bos, eos, has_template):
    library = tokenizers.Tokenizer.from_str(plain.to_str())
    if has_template and bos is not None:
        symbol = library.id_to_token(bos)
        library.post_processor = processors.TemplateProcessing(
            single=f"{symbol} $A", special_tokens=[(symbol, bos)]
        )
    write_folder(tmp_path, library, tokenizer_config=config)
    ours = load_folder_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (bos, eos)
    begin = [ours.bos_id] if ours.add_bos else []
    assert begin + ours.encode("the cat") == theirs.encode("the cat")
    assert ours.add_bos == (has_template and bos is not None)
    assert ours.vocab_size == len(theirs) == 271
    for add_bos in (False, True):  # the setting precedes the template
        write_folder(tmp_path, library, tokenizer_config=config | {"add_bos_token": add_bos})
        assert load_folder_tokenizer(tmp_path).add_bos == (add_bos and bos is not None)


@pytest.mark.parametrize(
    ("files", "bos", "eos", "eos_ids"),
    [
        ({"special_tokens_map": {"bos_token": BOS, "eos_token": {"content": EOS}}}, 0, 1, (1,)),
        ({"config": {"bos_token_id": 0, "eos_token_id": [270, 1]}}, 0, 270, (1, 270)),
        ({"generation_config": {"bos_token_id": 0, "eos_token_id": 1}}, 0, 1, (1,)),
        (
            {
                "tokenizer_config": {"eos_token": EOS},
                "config": {"bos_token_id": 0, "eos_token_id": 5},
                "generation_config": {"eos_token_id": [270, 1, 999]},
            },
            0,
            1,
            (1, 270),
        ),
        ({"tokenizer_config": {"bos_token": None}, "config": {"bos_token_id": 7}}, None, None, ()),
        ({}, None, None, ()),
    ],
)
def test_symbols_come_from_the_most_specific_file(plain, tmp_path, files, bos, eos, eos_ids):
    """An id that the tokenizer lacks (999) is padding of the embedding."""
    write_folder(tmp_path, plain, **files)
    ours = load_folder_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_id, ours.eos_ids) == (bos, eos, eos_ids)
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.bos_id, again.eos_id, again.eos_ids, again.hash) == (bos, eos, eos_ids, ours.hash)
    file = load_tokenizer_file(tmp_path / "saved" / "tokenizer.json", "huggingface")
    assert (file.eos_ids, file.hash) == (eos_ids, ours.hash)


def test_unusable_folders(plain, tmp_path):
    with pytest.raises(DataError, match=r"tokenizer.json nor tokenizer.model"):
        load_folder_tokenizer(tmp_path)
    write_folder(tmp_path, plain, tokenizer_config={"eos_token": "<none>"})
    with pytest.raises(DataError, match="<none>"):
        load_folder_tokenizer(tmp_path)
    for damaged in ("[]", "{", '"text"'):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(DataError, match=r"tokenizer_config.json is damaged"):
            load_folder_tokenizer(tmp_path)


def test_damaged_card(tmp_path):
    ByteTokenizer().save(tmp_path)
    assert load_tokenizer(tmp_path).hash == ByteTokenizer.hash
    assert saved_settings(tmp_path) == BytesSettings()
    card = tmp_path / "tokenizer_info.json"
    good = json.loads(card.read_text())
    unknown = json.dumps(good | {"name": "x"})
    partial = [json.dumps({key: good[key]}) for key in ("name", "hash")]
    for content in ["", "[]", unknown, *partial]:
        card.write_text(content)
        with pytest.raises(DataError, match=r"tokenizer_info\.json"):
            load_tokenizer(tmp_path)
