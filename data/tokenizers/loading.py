"""Tokenizers from files: those that were saved here, and those of Hugging Face folders."""

from pathlib import Path
from typing import Any

from data.files import damage_reported, read_json
from data.tokenizers.base import CARD, ByteTokenizer, Tokenizer
from data.tokenizers.huggingface import HuggingFaceTokenizer
from data.tokenizers.sentencepiece import SentencePieceTokenizer
from data.tokenizers.tokenizer_settings import (
    BytesSettings,
    HuggingFaceSettings,
    SentencePieceSettings,
    TokenizerSettings,
)
from errors import DataError

_READERS = {kind.file: kind for kind in (HuggingFaceTokenizer, SentencePieceTokenizer)}


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer saved in `folder`. Raises DataError if it is missing or was modified."""
    card = _card(Path(folder))
    name = card.pop("name")
    expected = card.pop("hash")
    if name == ByteTokenizer.name:
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        kind = next(kind for kind in _READERS.values() if kind.name == name)
        path = Path(folder) / kind.file
        tokenizer = kind(_content(path), str(path), **card)
    if tokenizer.hash != expected:
        raise DataError(
            f"{Path(folder) / tokenizer.file} does not match its recorded hash; prepare the data again"
        )
    return tokenizer


def _card(folder: Path) -> dict[str, Any]:
    """What is saved about a tokenizer beside its own file."""
    path = folder / CARD
    known = [ByteTokenizer.name, *(kind.name for kind in _READERS.values())]
    if not path.is_file():
        older = folder / "tokenizer.json"
        if older.is_file():
            raise DataError(
                f"{folder} was saved by an earlier version of Sextant (it has no {CARD}): delete the folder "
                "that contains it and prepare the data again, or repeat the run"
            )
        raise DataError(f"{folder} has no {CARD}; prepare the data again")
    with damage_reported(path, "delete its folder and prepare the data again"):
        card = read_json(path)
        if card["name"] not in known:
            raise DataError(
                f"{path}: unknown tokenizer {card['name']!r}; known are {', '.join(known)}"
            )
        for key in ("hash", "eos_ids", "add_bos"):
            card[key]
    return card


def saved_settings(folder: Path) -> TokenizerSettings:
    """Settings that load the tokenizer saved in `folder`."""
    name = _card(folder)["name"]
    if name == ByteTokenizer.name:
        return BytesSettings()
    kind = SentencePieceSettings if name == SentencePieceTokenizer.name else HuggingFaceSettings
    return kind(model=str(folder / kind.file))


def load_tokenizer_file(path: Path | str, name: str | None = None) -> Tokenizer:
    """Load a sentencepiece model or a tokenizer.json, with the control symbols that the files beside it name.

    Args:
        name: of the settings that name the file; another kind of file is rejected.

    Raises:
        DataError: the file is missing, damaged, of another kind or not supported.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(
            f"tokenizer model {path} does not exist; set data.tokenizer.model to an existing file"
        )
    content = path.read_bytes()
    found = "huggingface" if _is_json(content) else "sentencepiece"
    if name not in (None, found):
        raise DataError(f"{path} requires data.tokenizer.name={found}, not {name}")
    if (path.parent / CARD).is_file() and path.name in _READERS:
        return load_tokenizer(path.parent)
    return _external(path, content)


def load_folder_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder: tokenizer.json, or else tokenizer.model.

    BOS and EOS are those of tokenizer_config.json, or else of special_tokens_map.json, config.json or
    generation_config.json. `add_bos` is the folder's `add_bos_token`, or else what the post-processor of
    tokenizer.json does. `eos_ids` includes the `eos_token_id` of generation_config.json, or else of
    config.json.

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


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(f"{path} is missing; prepare the data again")
    return path.read_bytes()


def _is_json(content: bytes) -> bool:
    return content.lstrip().startswith(b"{")


def _external(path: Path, content: bytes) -> Tokenizer:
    files = {
        name: _optional(path.with_name(f"{name}.json"))
        for name in ("tokenizer_config", "special_tokens_map", "config", "generation_config")
    }
    add_bos = files["tokenizer_config"].get("add_bos_token")
    ends = files["generation_config"].get("eos_token_id", files["config"].get("eos_token_id"))
    more: dict[str, Any] = {
        "eos_ids": _ids(ends),
        "add_bos": add_bos if isinstance(add_bos, bool) else None,
    }
    if not _is_json(content):
        return SentencePieceTokenizer(content, str(path), **more)
    controls = {f"{key}_id": _control(key, files) for key in ("bos", "eos", "pad")}
    return HuggingFaceTokenizer(content, str(path), **controls, **more)


def _optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with damage_reported(path, "restore it"):
        found = read_json(path)
        if not isinstance(found, dict):
            raise ValueError
    return found


def _control(key: str, files: dict[str, dict[str, Any]]) -> int | str | None:
    """The id or the text of a control symbol. A null in a tokenizer's file means that there is none."""
    for name in ("tokenizer_config", "special_tokens_map"):
        if f"{key}_token" in files[name]:
            token = files[name][f"{key}_token"]
            return token.get("content") if isinstance(token, dict) else token
    for name in ("config", "generation_config"):
        if found := _ids(files[name].get(f"{key}_token_id")):
            return found[0]
    return None


def _ids(value: Any) -> list[int]:
    """An id, or several, of a Hugging Face config."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
