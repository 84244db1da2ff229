"""The page in headless Chromium, against the API."""

import time

import httpx
import pytest

from tests.studies.report.browser import Browser, find_browser

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def page(address, tmp_path_factory):
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("browser"))
    browser.ask(
        "Emulation.setDeviceMetricsOverride",
        width=900,
        height=1000,
        deviceScaleFactor=1,
        mobile=False,
    )
    browser.ask("Page.navigate", url=address)
    until(browser, "document.querySelectorAll('#method option').length > 1")
    yield browser
    browser.close()


def until(browser, expression: str) -> None:
    deadline = time.monotonic() + 60
    while not browser.value(expression):
        assert time.monotonic() < deadline, browser.value("document.body.innerText")
        time.sleep(0.05)


def generate(browser, method: str, prompt: str, tokens: int) -> list[float | None]:
    """The NLLs that the page shows after a click on Generate."""
    browser.value(
        f"""for (const [id, value] of Object.entries({{method: "{method}", prompt: "{prompt}",
        tokens: {tokens}, temperature: 0}})) document.getElementById(id).value = value"""
    )
    browser.value("document.getElementById('run').click()")
    until(browser, "!document.getElementById('run').disabled")
    return browser.value("sextant.tokens.map(token => token.nll)")


def test_page_shows_the_loss_of_each_token_under_a_method(page, address):
    prompt = "abcü <b>" * 6
    shown = {}
    for method in ("tiny", "tiny:linear"):
        shown[method] = generate(page, method, prompt, 12)
        body = {
            "model": method,
            "prompt": prompt,
            "max_tokens": 12,
            "temperature": 0,
            "echo": True,
            "logprobs": 0,
        }
        choice = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]
        expected = [None if x is None else -x for x in choice["logprobs"]["token_logprobs"]]
        assert shown[method] == pytest.approx(expected, abs=1e-6)
        assert page.value("document.getElementById('text').textContent") == choice["text"]
        spans = "Array.from(document.querySelectorAll('#text span'), span => span.style.backgroundColor)"
        assert sum(bool(colour) for colour in page.value(spans)) == len(expected) - 1
        dots = page.value("document.querySelector('#mean').previousSibling.getAttribute('d')")
        assert dots.count("M") == len(expected) - 1
    assert shown["tiny"] != shown["tiny:linear"]


def test_page_loads_nothing_else_and_reports_errors(page, address):
    urls = [
        event["params"]["request"]["url"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    paths = {"/", "/v1/models", "/v1/completions"}
    assert {url for url in urls if not url.startswith("data:")} <= {
        address + path for path in paths
    }
    generate(page, "tiny", "a", 100_000)
    assert "100002" in page.value("document.getElementById('status').textContent")
    assert not [event for event in page.events if event["method"] == "Runtime.exceptionThrown"]
