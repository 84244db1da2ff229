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
from tests.files import table

TEXT = "the cat sat on the mat, and the dog sat on the log; " * 9
SYMBOLS = table("data/tokenizers/symbols.yaml")


@pytest.fixture(scope="module")
def plain() -> tokenizers.Tokenizer:
    """Ids 0 to 269 with BOS 0 and EOS 1, then the end of a turn, without a post-processor."""
    made = train_tokenizer(HuggingFaceSettings(vocab_size=270), [TEXT])
    assert isinstance(made, HuggingFaceTokenizer)
    spec = json.loads(made.content) | {"post_processor": None}
    found = tokenizers.Tokenizer.from_str(json.dumps(spec))
    found.add_special_tokens(["<|turn|>"])
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
@pytest.mark.parametrize(("config", "bos", "eos"), SYMBOLS["config"])
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


@pytest.mark.parametrize(("files", "bos", "eos", "eos_ids"), SYMBOLS["files"])
def test_symbols_come_from_the_most_specific_file(plain, tmp_path, files, bos, eos, eos_ids):
    write_folder(tmp_path, plain, **files)
    ours = load_folder_tokenizer(tmp_path)
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    file = load_tokenizer_file(tmp_path / "saved" / "tokenizer.json", "huggingface")
    for each in (ours, again, file):
        assert (each.bos_id, each.eos_id, list(each.eos_ids)) == (bos, eos, eos_ids)
        assert each.hash == ours.hash


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
