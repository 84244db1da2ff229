import pytest

from studies.report.report import write_report
from tests.studies.report.browser import Browser, find_browser
from tests.studies.synthetic import results

# Elements that reach past the window though nothing around them scrolls or cuts.
OUTSIDE = """
[...document.querySelectorAll('body *')].filter(e => {
  if (e.closest('svg') && e.tagName !== 'svg') return false;
  for (let p = e.parentElement; p; p = p.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return false;
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map(e => e.tagName + '.' + e.className)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    record = results(seen=2)
    # A name that no line can break, and a long one of many words.
    record["cells"][-1]["error"] = "x" * 300 + " and a reason of many words " * 5
    write_report(record, out)
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian's package chromium has one)")
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
)
def test_the_page_fits_the_window_without_errors_or_requests(browser, folder, width, scheme):
    """No sideways scrolling of the page, nothing past its edge, no console errors, no request but itself."""
    browser.ask(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    browser.open(folder / "report.html", width)
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(OUTSIDE) == []
    assert browser.value("document.querySelectorAll('figure svg').length") == 5
    asked = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [
        (folder / "report.html").as_uri()
    ]
    bad = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    assert [event for event in browser.events if event.get("method") in bad] == []
    dark = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark[4:-1].split(","))) < 200) == (scheme == "dark")


def test_wide_tables_scroll_inside_the_page(browser, folder):
    browser.open(folder / "report.html", 390)
    inner = "[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth, e.tabIndex])"
    places = browser.value(inner)
    assert any(whole > seen for whole, seen, _ in places)
    assert all(seen <= 390 and tab == 0 for _, seen, tab in places)


def test_text_is_legible_on_a_phone(browser, folder):
    browser.open(folder / "report.html", 390)
    sizes = browser.value("""[...document.querySelectorAll('p, li, td, th, figcaption')]
        .map(e => parseFloat(getComputedStyle(e).fontSize))""")
    assert min(sizes) >= 11
    drawn = browser.value("""[...document.querySelectorAll('figure svg')].map(
        e => e.getBoundingClientRect().width / e.viewBox.baseVal.width)""")
    assert min(drawn) * 8 >= 7  # the smallest words of a figure are 8 points
    cut = browser.value(
        "[...document.querySelectorAll('.pan')].filter(e => e.scrollWidth > e.clientWidth).length"
    )
    assert cut == 0  # the names right of the lines are seen without scrolling


def test_print_shows_whole_tables(browser, folder):
    browser.ask("Emulation.setEmulatedMedia", media="print", features=[])
    browser.open(folder / "report.html", 700)
    try:
        hidden = "[...document.querySelectorAll('.scroll')].map(e => getComputedStyle(e).overflowX)"
        assert set(browser.value(hidden)) == {"visible"}
        assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
        assert (
            browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        )
        pages = browser.ask("Page.printToPDF")["data"]
        assert len(pages) > 20_000
    finally:
        browser.ask("Emulation.setEmulatedMedia", media="")
