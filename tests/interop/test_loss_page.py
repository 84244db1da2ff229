"""The page of scripts/serve.py: losses, pieces of text and refused requests."""

import http.client
import json
import shutil
import threading

import pytest
import torch

from interop.loss_page import MAX_BODY, LossPage, make_server
from model import TokenPositions
from run_directory.position_overrides import override
from run_directory.run import Run
from tests.byte_runs import byte_run

TEXT = "abcü <b>" * 6
LENGTH = 32


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "tiny"
    return LossPage(Run.open(byte_run(folder, {"name": "rope"}, LENGTH)).load())


@pytest.fixture(scope="module")
def port(page):
    with make_server(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def request(port, method, path, body=None, **headers) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    kind = {"Content-Type": "application/json"} if body is not None else {}
    connection.request(method, path, body, kind | headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def test_losses_are_those_of_the_model(page, port):
    methods = ["linear", "trained"]
    body = json.dumps({"text": TEXT, "methods": methods})
    status, content = request(port, "POST", "/score", body)
    result = json.loads(content)
    assert status == 200
    assert "".join(result["pieces"]) == TEXT
    run = Run.open(page.run.folder).load()
    ids = torch.tensor([[256, *TEXT.encode()]])
    assert len(result["pieces"]) == ids.shape[1] > LENGTH
    for method, changes in (("trained", []), ("linear", ["model.position.scaling.name=linear"])):
        run.model.reposition(override(run.settings, changes).model)
        with torch.no_grad():
            inputs = ids[:, :-1]
            nll = run.model(inputs, TokenPositions.plain(inputs.shape[1]), ids[:, 1:])
        first, *others = result["nll"][method]
        assert first is None
        assert others == pytest.approx(nll[0].tolist(), abs=1e-5)
    assert result["nll"]["linear"] != result["nll"]["trained"]


def test_page_and_description(page, port):
    status, content = request(port, "GET", "/")
    assert status == 200
    assert b"<textarea" in content
    about = json.loads(request(port, "GET", "/about")[1])
    assert about["run"] == "tiny"
    assert about["train_length"] == LENGTH
    assert about["example"]
    assert about["methods"][0] == "trained"
    assert "truncate" not in about["methods"]


def error_of(response: tuple[int, bytes]) -> str:
    status, answer = response
    assert status == 400
    return json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("content", "headers", "named"),
    [
        ({}, {"Host": "example.com"}, "loopback"),
        ({}, {"Content-Type": "text/plain"}, "JSON"),
        ("", {"Content-Length": str(MAX_BODY + 1)}, str(MAX_BODY)),
        ("[" * 100_000, {}, "TEXT"),
        ({"text": 3}, {}, "TEXT"),
        ({"methods": ["unknown"]}, {}, "unknown"),
        ({"text": "a" * 16 * LENGTH}, {}, "max-length"),
    ],
)
def test_refused_requests(content, headers, named, port):
    if isinstance(content, dict):
        content = json.dumps({"text": "ab", "methods": ["trained"]} | content)
    assert named in error_of(request(port, "POST", "/score", content, **headers))


def test_refused_pages(port):
    assert "loopback" in error_of(request(port, "GET", "/", Host="example.com"))
    for path in ("/etc/passwd", "/score"):
        assert "no such page" in error_of(request(port, "GET", path))


def test_the_page_in_a_browser(port):
    """The example is scored when the page opens, and a new text when the button is pressed."""
    library = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser")
    with library.sync_playwright() as playwright:
        options = ["--no-sandbox"]  # in containers
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        view = browser.new_page()
        errors = []
        view.on("pageerror", lambda error: errors.append(error))
        view.goto(f"http://127.0.0.1:{port}")
        status = library.expect(view.locator("#status"))
        status.to_contain_text("nats", timeout=60_000)
        view.fill("#text", TEXT)
        view.click("#score")
        count = 1 + len(TEXT.encode())  # with BOS
        status.to_contain_text(f"{count} tokens", timeout=60_000)
        panes = [pane.inner_text() for pane in view.locator(".pane").all()]
        colored = view.locator(".pane").first.locator("span").count()
        curves = view.locator("path.mean").count()
        browser.close()
    assert not errors
    assert panes == [TEXT, TEXT]
    assert colored == count
    assert curves == 2
