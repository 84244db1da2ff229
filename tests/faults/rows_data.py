"""Invalid text and settings files."""

import os

from tests.faults.fault import Fault, call
from tests.files import table

_FILES = table("faults/settings_files.yaml")


def _settings_file(content: str):
    def run(folder, overrides):
        (folder / "settings.yaml").write_text(content, encoding="utf-8")
        return call("train.py", *overrides, "settings.yaml", cwd=folder)

    return run


def _corpus(files: dict[bytes, str], *more: str):
    """Preparation of a folder of these files."""

    def run(folder, overrides):
        for name, text in files.items():
            (folder / os.fsdecode(name)).write_text(text, encoding="utf-8")
        own = [f"data.source.path={folder}", f"data.root={folder / 'prepared'}"]
        return call("scripts/prepare.py", *overrides, *own, *more, "--workers=1", cwd=folder)

    return run


_TEXT = "some words of a document " * 20
_RECORDS = {b"r.jsonl": "[" * 200_000 + "\n" + f'{{"text": "{_TEXT}"}}\n' * 20}
_BOMB = "\n".join(
    ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
)

FAULTS = [
    Fault(
        "settings of nested aliases",
        _settings_file(_BOMB),
        names=("settings.yaml", "100,000 values"),
    ),
    Fault(
        "records nested too deeply", _corpus(_RECORDS), status=0, names=("1 documents", "r.jsonl#0")
    ),
    Fault(
        "documents too large",
        _corpus(
            {b"a.txt": _TEXT, b"b.txt": _TEXT, b"\xff\x1b.txt": _TEXT * 9},
            "data.source.max_document_bytes=999",
        ),
        status=0,
        names=("data.source.max_document_bytes", r"\udcff\x1b.txt"),
    ),
    Fault(
        "names that are not UTF-8", _corpus({b"%d\xff.txt" % i: _TEXT for i in range(20)}), status=0
    ),
    *(Fault(name, _settings_file(file), names=tuple(names)) for name, file, names in _FILES),
]
