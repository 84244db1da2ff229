"""Prompts from the command line, from files and from standard input."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from errors import TrainingError


def read_prompts(
    prompts: Sequence[str], file: str | None, stdin: TextIO, read_stdin: bool = False
) -> list[str]:
    """All prompts, in this order: `prompts`, the prompts in `file`, standard input.

    Standard input contains one prompt. It is read if `read_stdin` is set, or if it is a pipe and
    there is no other prompt. Without any prompt, returns one empty prompt.

    Args:
        prompts: values of `--prompt`.
        file: one prompt per line; in a `.jsonl` file, one object with a "prompt" per line.

    Raises:
        TrainingError: a prompt is not UTF-8, or the file contains no prompt or malformed JSON.
    """
    texts = [_check_utf8(prompt, "--prompt") for prompt in prompts]
    if file:
        texts += _read_file(Path(file))
    if read_stdin or (not texts and not stdin.isatty()):
        texts.append(_decode(stdin.buffer.read(), "standard input").removesuffix("\n"))
    return texts or [""]


def _read_file(file: Path) -> list[str]:
    texts = []
    lines = _decode(file.read_bytes(), str(file)).split("\n")
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if line.strip() and file.suffix == ".jsonl":
            line = _parse_json(line, f"{file}, line {number}")
        elif not line.strip():
            continue
        texts.append(line)
    if not texts:
        raise TrainingError(f"{file} contains no prompt; write one prompt per line")
    return texts


def _parse_json(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{where} is not valid JSON: {error}") from error
    except RecursionError:
        raise TrainingError(f"{where} is not valid JSON: nested too deeply") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise TrainingError(f'{where} must be a JSON object with a string under "prompt"')
    return _check_utf8(record["prompt"], where)


def _check_utf8(prompt: str, where: str) -> str:
    """The prompt, unchanged. Raises TrainingError if it contains surrogates, which UTF-8 cannot
    encode."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise TrainingError(f"{where} is not UTF-8 text (character {error.start})") from error
    return prompt


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TrainingError(f"{where} is not UTF-8 text (byte {error.start})") from error
