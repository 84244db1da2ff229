"""Models of the hub, over HTTP from a server on this machine that answers as the hub does."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session, constants

from errors import InteropError
from interop import build_model, read_folder
from interop.huggingface.hub import download
from tests.interop.models import make

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Serves a folder as ORG/MODEL.

    Attributes:
        cut: names of files of which half is sent.
        requested: paths of the requests.
    """

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Answers)
        self.folder = folder
        self.cut = set()
        self.requested = []


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, with_body: bool):
        self.server.requested.append(self.path)
        path = self.path.removeprefix("/api/models/").lstrip("/").partition("?")[0]
        if path.startswith("org/gated"):
            return self.send(401, b"", {"X-Error-Code": "GatedRepo"})
        if not path.startswith("org/model"):
            return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if "/tree/" in self.path:
            sizes = {file.name: file.stat().st_size for file in self.server.folder.iterdir()}
            tree = [
                {"type": "file", "path": n, "size": size, "oid": "0"} for n, size in sizes.items()
            ]
            return self.send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        if self.path.startswith("/api"):
            if not path.endswith(("revision/main", COMMIT)):
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = [{"rfilename": file.name} for file in self.server.folder.iterdir()]
            about = {"_id": "0", "id": "org/model", "sha": COMMIT, "siblings": files}
            return self.send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})
        file = self.server.folder / path.rsplit("/", 1)[1]
        if not file.is_file():
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content = file.read_bytes()
        about = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        self.send(200, content, about, with_body, file.name in self.server.cut)

    def send(self, status: int, content: bytes, headers: dict, with_body=True, is_cut=False):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.close_connection = is_cut

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    make("llama").save_pretrained(tmp_path / "model", max_shard_size="50KB")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "model" / "modeling_own.py").write_text("raise SystemExit")
    server = Hub(tmp_path / "model")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    close_session()  # sessions remember proxies and offline mode
    yield server
    close_session()
    server.shutdown()
    server.server_close()


def test_download(hub, tmp_path):
    """Shards, settings and nothing else; the second time from the cache."""
    folder = download("org/model")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in hub.folder.iterdir() if path.suffix in (".json", ".safetensors")
    }
    found, expected = (
        build_model(read_folder(one)).model.state_dict() for one in (folder, hub.folder)
    )
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    before = [path for path in hub.requested if path.endswith(".safetensors")]
    assert download("org/model") == folder
    assert [path for path in hub.requested if path.endswith(".safetensors")] == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/absent", "hf:org/absent: .*no such model on the hub"),
        ("org/gated", r"hf:org/gated is gated: .*hf auth login"),
        ("org/model@v2", "hf:org/model@v2: the model has no revision 'v2'"),
    ],
)
def test_models_that_are_not_served(hub, name, message):
    with pytest.raises(InteropError, match=message):
        download(name)


def test_interrupted_shard(hub, monkeypatch):
    """Half a shard is never read as a whole one, and the next attempt completes it."""
    (shard, *_) = sorted(hub.folder.glob("*.safetensors"))
    monkeypatch.setattr("time.sleep", lambda _: None)  # between attempts of huggingface_hub
    hub.cut.add(shard.name)
    with pytest.raises(InteropError, match=r"hf:org/model: .*cannot be downloaded"):
        download("org/model")
    hub.cut.clear()
    folder = download("org/model")
    assert (folder / shard.name).read_bytes() == shard.read_bytes()


def test_shard_missing_from_the_hub(hub):
    (shard, *_) = sorted(hub.folder.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(InteropError, match=f"{shard.name} is missing"):
        read_folder(download("org/model"))
