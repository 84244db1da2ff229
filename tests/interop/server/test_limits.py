"""Refusals, overload, disconnects and slow clients."""

import json
import re
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

import sextant
from errors import InteropError
from generation.continuous_batch import ContinuousBatch
from interop.extras import load_extra
from interop.server.serving import Limits, bind
from tests.interop.server.running import serving
from tests.processes import ScriptProcess

LONG = {"prompt": "a", "max_tokens": 2000, "temperature": 0, "stream": True}
SHORT = {"prompt": "ab", "max_tokens": 5, "temperature": 0}


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 3000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"seed": -1}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": -1}, None),
        ({"top_p": 0}, None),
    ],
)
def test_invalid_requests_name_the_key(client, body, param):
    answer = client.post(
        "/v1/completions", content=json.dumps({"prompt": "a"} | body), headers=JSON
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert next(iter(body)) in error["message"] or param == "prompt"


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000])
def test_malformed_json(client, body):
    answer = client.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_other_refusals(client, address):
    assert client.post("/v1/completions", content=b"{}").status_code == 415
    unknown = client.post("/v1/completions", json=SHORT | {"model": "gpt-4"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/v1/models/gpt-4").status_code == 404
    for answer, status in ((client.get("/v1/nothing"), 404), (client.get("/v1/completions"), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    # A page of another site whose name resolves to this machine.
    assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400


def chunks(size: int):
    for _ in range(size >> 10):
        yield b" " * 1024


def test_oversized_bodies_are_refused(client):
    declared = client.post("/v1/completions", content=b" " * ((1 << 20) + 1), headers=JSON)
    streamed = client.post("/v1/completions", content=chunks(2 << 20), headers=JSON)
    for answer in (declared, streamed):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_full_queue_is_refused_and_recovers(loaded):
    with (
        serving(loaded, Limits(rows=2, queue=1)) as (address, engine),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        with client.stream("POST", "/v1/completions", json=LONG | {"n": 3}) as running:
            lines = running.iter_lines()
            next(lines)
            refused = client.post("/v1/completions", json=SHORT)
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            assert client.get("/v1/models").status_code == 200
            never = client.post("/v1/completions", json=SHORT | {"n": 4})
            assert never.status_code == 400
        until(lambda: engine.load() == (0, 0))
        assert client.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_cancels(loaded, stream):
    with serving(loaded, Limits(rows=2, queue=4), max_length=10**6) as (address, engine):
        body = json.dumps(LONG | {"max_tokens": 500_000, "n": 3, "stream": stream}).encode()
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as link:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            link.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            until(lambda: engine.load() == (2, 1))
        until(lambda: engine.load() == (0, 0))
        answer = httpx.post(f"{address}/v1/completions", json=SHORT, timeout=60).json()
        assert (
            answer["choices"][0]["text"]
            == sextant.generate(loaded, "ab", tokens=5, temperature=0)[0]
        )


def test_clients_that_do_not_read_or_write_hold_up_nobody(loaded):
    limits = Limits(rows=2, queue=4, send_seconds=0.5, read_seconds=0.5)
    with serving(loaded, limits, max_length=10**6) as (address, engine):
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"max_tokens": 500_000, "logprobs": 5}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        )
        head += "Content-Type: application/json\r\n\r\n"
        with socket.socket() as silent, socket.socket() as slow:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for link, sent in ((silent, body), (slow, body[:5])):
                link.connect((host, int(port)))
                link.sendall(head.encode() + sent)
            until(lambda: engine.load()[0] == 1)
            answer = httpx.post(f"{address}/v1/completions", json=SHORT, timeout=60)
            assert answer.status_code == 200
            assert b" 408 " in slow.recv(4096)
            until(lambda: engine.load() == (0, 0))  # its response was abandoned


def streamed(client, body) -> Iterator[str]:
    """The parts of a streamed text."""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


@pytest.mark.parametrize(
    ("method", "model"),
    [("admit", "tiny"), ("step", "tiny:linear")],  # a step is common to all rows of a model
)
def test_errors_of_the_model_fail_one_request(loaded, monkeypatch, method, model):
    """Another stream goes on, in the same batch after an error in `admit`, and new requests are served."""
    body = LONG | {"model": model, "max_tokens": 60}
    original = getattr(ContinuousBatch, method)

    def failing(self, *row):
        found = original(self, *row)
        if any(one.prompt == [256, *b"bad"] for one in row or self.rows):
            raise RuntimeError("a defect")
        return found

    with (
        serving(loaded, Limits(rows=4)) as (address, engine),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        expected = "".join(streamed(client, body))
        monkeypatch.setattr(ContinuousBatch, method, failing)
        stream = streamed(client, body)
        found = next(stream)
        bad = client.post("/v1/completions", json=SHORT | {"model": "tiny", "prompt": "bad"})
        assert bad.status_code == 500
        assert bad.json()["error"]["type"] == "server_error"
        assert found + "".join(stream) == expected
        text = client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
        assert text == sextant.generate(loaded, "ab", tokens=5, temperature=0)[0]
        assert engine.load() == (0, 0)


def test_taken_port_and_missing_extra():
    with bind(0) as listener, pytest.raises(InteropError, match="--port"):
        bind(listener.getsockname()[1])
    with pytest.raises(InteropError, match=r"\.\[serve\]"):
        load_extra("a_package_that_does_not_exist", "serve")


def test_script_serves_until_interrupted(loaded, tmp_path):
    words = [str(loaded.folder), "--port", "0", "model.position.window=8"]
    err = tmp_path / "err"
    err.touch()
    process = ScriptProcess("scripts/serve.py", words, tmp_path, tmp_path / "out", err)

    def address():
        return re.search(r"http://127\.0\.0\.1:\d+(?=\D)", err.read_text())

    try:
        until(lambda: address() or process.poll() is not None)
        found = address()
        assert found, "the server has ended"
        listed = httpx.get(f"{found[0]}/v1/models", timeout=60).json()["data"]
        assert "window" in listed[0]["positions"]
        body = LONG | {"max_tokens": 400}
        with httpx.stream("POST", f"{found[0]}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
    finally:
        process.kill()
    assert "Traceback" not in err.read_text()
