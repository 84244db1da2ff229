"""generate.py end to end."""

import io
import json
import os
import signal
import sys

import pytest

import generate
from errors import TrainingError, printable
from generation.prompts import read_prompts
from generation.samples import Sample
from generation.writers import TextWriter
from tests.processes import ScriptProcess


@pytest.fixture
def ended(call, capsys):
    """ended(*words): the script's exit status and streams, without the seconds of a new process."""

    def ended(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            call(lambda: generate.run_main(generate.main), *words)
        return end.value.code, *capsys.readouterr()

    return ended


def test_jsonl_from_a_pipe_and_past_the_trained_length(run, monkeypatch, ended):
    overrides = ["--tokens", 20, "--samples", 2, "--seed", 3, "--jsonl", "--batch", 1]
    rule = ["model.position.scaling.name=yarn", "model.position.scaling.factor=auto"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("天 x\n".encode())))
    code, out, err = ended(run, *overrides, *rule)
    assert code == 0, err
    first, second = map(json.loads, out.splitlines())
    assert (first["prompt"], first["seed"], second["seed"]) == ("天 x", 3, 4)
    assert len(first["tokens"]) == 20
    assert first["finish_reason"] == "length"
    assert first["tokens"] != second["tokens"]
    assert first["settings"]["overrides"] == rule
    # begin-of-document and 5 bytes make 26 tokens of a trained 16
    assert "26 tokens" in err
    assert "trained at 16" in err
    assert first["settings"]["positions"] == "rope, yarn factor 1.625 (auto)"


def test_text_of_several_prompts_in_order(run, ended):
    overrides = ["--prompt", "ab", "--prompt", "longer", "--greedy", "--tokens", 5]
    code, out, err = ended(run, *overrides)
    assert (code, err) == (0, "")
    first, second = out.split("\n\n=== prompt 2, seed 0 ===\n")
    assert first.startswith("=== prompt 1, seed 0 ===\nab")
    assert second.startswith("longer")


def test_ctrl_c_prints_partial_text_and_exits_130(run, tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    overrides = [str(run), "--prompt", "abc", "--tokens", "1000000", "--no-cache"]
    environment = {"PYTHONIOENCODING": "ascii"}
    process = ScriptProcess("generate.py", overrides, tmp_path, pipe, tmp_path / "err", environment)
    with open(pipe, "rb", buffering=0) as reader:
        started = reader.read(20)  # it streams: text is here long before the end
        process.send_signal(signal.SIGINT)
        rest = b"".join(iter(lambda: reader.read(4096), b""))
    err = (tmp_path / "err").read_text()
    assert process.wait(60) == 130
    assert started.startswith(b"abc")
    assert rest.endswith(b"\n")
    assert "interrupted" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "raw", "place"),
    [
        ("p.txt", b"", "p.txt"),
        ("p.txt", b"fine\n\xff\n", r"p.txt .*byte 5"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 3}\n', "p.jsonl, line 2"),
        ("p.jsonl", b'{"prompt": "a"\n', "p.jsonl, line 1"),
        ("p.jsonl", b"\n" + b"[" * 200_000, "p.jsonl, line 2"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "p.jsonl, line 1"),
    ],
)
def test_bad_prompts_name_file_and_line(tmp_path, name, raw, place):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(TrainingError, match=place):
        read_prompts([], str(tmp_path / name), None)
    with pytest.raises(TrainingError, match=r"--prompt .*character 1"):
        read_prompts(["a\udcff"], None, None)


def test_prompt_files_are_read_line_by_line(tmp_path):
    for name, raw, prompts in (
        ("p.jsonl", b'{"prompt": "a\\nb"}\n\n{"prompt": ""}\n', ["a\nb", ""]),
        ("p.txt", b"eins\r\n\n  zwei\n", ["eins", "  zwei"]),
    ):
        (tmp_path / name).write_bytes(raw)
        assert read_prompts([], str(tmp_path / name), None) == prompts


def test_control_characters_are_escaped():
    for is_terminal, expected in ((True, "\\x1b[2J\ta\\x9b\n"), (False, "\x1b[2J\ta\x9b\n")):
        out = io.StringIO()
        out.isatty = lambda is_terminal=is_terminal: is_terminal
        sample = Sample("\x1b[2J\t", [1], 0, 0, None, "a\x9b", [2], "length")
        TextWriter([sample], out, printable).update()
        assert out.getvalue() == expected
