"""Loads tokenizers from saved folders, single files and Hugging Face folders."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from data.files import damage_reported, read_json
from data.tokenizers.huggingface import HuggingFaceTokenizer
from data.tokenizers.sentencepiece import SentencePieceTokenizer
from data.tokenizers.tokenizer_base import CARD, ByteTokenizer, SymbolTokenizer, Tokenizer
from data.tokenizers.tokenizer_settings import (
    HuggingFaceSettings,
    SentencePieceSettings,
    TokenizerSettings,
)
from errors import DataError

_READERS = {kind.file: kind for kind in (HuggingFaceTokenizer, SentencePieceTokenizer)}
_KINDS = {kind.name: kind for kind in _READERS.values()}


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer saved in `folder`. Raises DataError if it is missing or was modified."""
    folder = Path(folder)
    path = folder / CARD
    if not path.is_file():
        raise DataError(f"{folder} has no {CARD}; prepare the data again")
    with damage_reported(path, "delete its folder and prepare the data again"):
        card = read_json(path)
        name = card.pop("name")
        expected = card.pop("hash")
        tokenizer: Tokenizer = ByteTokenizer()
        if name == SymbolTokenizer.name:
            tokenizer = SymbolTokenizer(card["symbols"])
        elif name != ByteTokenizer.name:
            path = folder / _KINDS[name].file
            if not path.is_file():
                raise DataError(f"{path} is missing; prepare the data again")
            tokenizer = _KINDS[name](path.read_bytes(), str(path), **card)
    if tokenizer.hash != expected:
        raise DataError(f"{path} does not match its recorded hash; prepare the data again")
    return tokenizer


def given_tokenizer(settings: TokenizerSettings) -> Tokenizer | None:
    """The tokenizer that the settings name; None if it has yet to be trained. Raises DataError."""
    if isinstance(settings, SentencePieceSettings | HuggingFaceSettings):
        if settings.model is None:
            return None
        return load_tokenizer_file(settings.model, settings.name)
    return ByteTokenizer()


def saved_settings(folder: Path) -> TokenizerSettings:
    """Settings that load the tokenizer saved in `folder`."""
    tokenizer = load_tokenizer(folder)
    settings = {"name": tokenizer.name}
    if tokenizer.name in _KINDS:
        settings["model"] = str(folder / tokenizer.file)
    return TypeAdapter(TokenizerSettings).validate_python(settings)


def load_tokenizer_file(path: Path | str, name: str | None = None) -> Tokenizer:
    """Load a sentencepiece model or a tokenizer.json, with the control symbols that the files
    beside it name.

    Args:
        name: name of the tokenizer settings; files of another kind are rejected.

    Raises:
        DataError: the file is missing, damaged, of another kind or not supported.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(
            f"tokenizer model {path} does not exist; set data.tokenizer.model to an existing file"
        )
    content = path.read_bytes()
    kind = HuggingFaceTokenizer if _is_json(content) else SentencePieceTokenizer
    if name not in (None, kind.name):
        raise DataError(f"{path} requires data.tokenizer.name={kind.name}, not {name}")
    if (path.parent / CARD).is_file() and path.name in _READERS:
        return load_tokenizer(path.parent)
    return _external(path, content)


def load_folder_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder: tokenizer.json, or else tokenizer.model.

    BOS and EOS are those of tokenizer_config.json, or else of special_tokens_map.json, config.json
    or generation_config.json. `add_bos` is the folder's `add_bos_token`, or else what the
    post-processor of tokenizer.json does. `eos_ids` includes the `eos_token_id` of
    generation_config.json, or else of config.json.

    Raises:
        DataError: the folder has neither file, or one is damaged or not supported.
    """
    folder = Path(folder)
    for name in _READERS:
        if (folder / name).is_file():
            return _external(folder / name, (folder / name).read_bytes())
    raise DataError(
        f"{folder} has no tokenizer: neither {' nor '.join(_READERS)}; add the file to the folder"
    )


def _is_json(content: bytes) -> bool:
    return content.lstrip().startswith(b"{")


def _external(path: Path, content: bytes) -> Tokenizer:
    """A tokenizer with the control symbols that the files beside it name. A null in a tokenizer's
    file means that there is no such symbol."""
    tokenizer_config, symbols, config, generation_config = (
        _read_if_present(path.parent / f"{name}.json")
        for name in ("tokenizer_config", "special_tokens_map", "config", "generation_config")
    )
    add_bos = tokenizer_config.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = None
    ends = config | generation_config
    eos_ids = _ids(ends.get("eos_token_id"))
    if not _is_json(content):
        return SentencePieceTokenizer(content, str(path), eos_ids=eos_ids, add_bos=add_bos)
    controls: dict[str, Any] = {}
    for key in ("bos", "eos", "pad"):
        named = symbols | tokenizer_config
        token = named.get(f"{key}_token")
        controls[f"{key}_id"] = token.get("content") if isinstance(token, dict) else token
        if f"{key}_token" not in named:
            ids = _ids(config.get(f"{key}_token_id"))
            ids += _ids(generation_config.get(f"{key}_token_id"))
            controls[f"{key}_id"] = ids[0] if ids else None
    return HuggingFaceTokenizer(content, str(path), eos_ids=eos_ids, add_bos=add_bos, **controls)


def _read_if_present(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with damage_reported(path, "restore it"):
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError
    return content


def _ids(value: Any) -> list[int]:
    """An id, or several, of a Hugging Face config."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int)]
