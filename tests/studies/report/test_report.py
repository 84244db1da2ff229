import copy
import csv
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from errors import StudyError
from studies.report.document import DARK
from studies.report.findings import lead, sentence
from studies.report.report import write_report
from studies.results.compare import derive
from studies.results.losses import read_losses
from studies.results.stored import read_study
from tests.studies.synthetic import TRUTH, results

VOID = {"meta", "link", "br", "img", "path", "use"}


class Page(HTMLParser):
    """What a reader's machine would make of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.ids = []
        self.links = []
        self.open = []
        self.tags = []
        self.text = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        self.ids += [found["id"]] if "id" in found else []
        self.links += [
            found[key] for key in ("src", "href", "xlink:href", "srcset", "action") if key in found
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += [data, " "]


@pytest.fixture(scope="module")
def written(vector_figures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    files = write_report(results(seen=2), folder)
    return folder, files


@pytest.fixture(scope="module")
def page(written):
    return Page((written[0] / "report.html").read_text(encoding="utf-8"))


def test_the_page_makes_no_requests(page, written):
    text = (written[0] / "report.html").read_text(encoding="utf-8")
    beside = {"report.md", "results.csv", "results.json"}
    assert {link for link in page.links if not link.startswith(("#", "data:,"))} == beside
    assert "<script" not in text and "@import" not in text and "<iframe" not in text
    assert not re.findall(r"url\((?!#)", text)
    names = set(re.findall(r'xmlns(?::\w+)?="([^"]+)"', text))  # names, not places
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= names


def test_the_page_is_well_formed_and_accessible(page):
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    pictures = [found for tag, found in page.tags if tag == "svg"]
    assert len(pictures) == 5
    for found in pictures:
        assert found["role"] == "img" and len(found["aria-label"]) > 60
    heads = [found for tag, found in page.tags if tag == "th"]
    assert heads and all(found.get("scope") in ("row", "col") for found in heads)
    assert [tag for tag, _ in page.tags if tag in ("h1", "h2")].count("h1") == 1
    assert ("html", {"lang": "en"}) in page.tags


def test_every_figure_color_has_a_dark_counterpart(written):
    for file in (written[0] / "figures").glob("*.svg"):
        used = {
            color.lower()
            for color in re.findall(r"#[0-9a-fA-F]{6}\b", file.read_text(encoding="utf-8"))
        }
        assert used <= set(DARK), file.name


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_dark_text_colors_have_enough_contrast():
    card = _luminance(DARK["#ffffff"])
    lines = {"#e6e6e6", "#c9c9c9", "#999999", "#ffffff"}  # grid, others, axes, the page itself
    for light, dark in DARK.items():
        if light not in lines:
            assert (_luminance(dark) + 0.05) / (card + 0.05) > 4.5, light


def test_the_lead_states_the_findings(page):
    text = " ".join("".join(page.text).split())
    assert (
        "alibi and window held to 4,096; rope + yarn held to 512; rope, none and sinusoidal broken"
        in text
    )
    assert "fewer than 3 training seeds: fox (1 seed)" in text
    assert "9 clusters (18 documents)" in text and "Few clusters" in text
    assert "Of 20 cells 1 failed" in text and "the loss is not finite at step 17" in text
    assert "its positions end after 256 tokens" in text
    trained, longest = (
        text[text.index(f"NLL minus that of rope at {n}") :] for n in ("256", "4,096")
    )
    assert re.match(r"[^:]+16 comparisons\): higher \(worse\) for .*none \(\+0\.1", trained)
    worse, better = longest[: longest.index("Point")].split("; ")[:2]
    assert "16 comparisons): higher (worse) for sinusoidal (+2.5" in worse
    assert (
        better.startswith("lower (better) for")
        and "none (−0.4" in better
        and "alibi (−2.1" in better
    )
    assert "same targets, simultaneous over 32 comparisons" in text


def test_lengths_held_to_are_listed_from_the_longest_down(monkeypatch):
    monkeypatch.setitem(TRUTH, "none", (4.95, (0.0, 0.0, 0.9, 1.5)))
    assert "none held to 1,024; rope + yarn held to 512" in findings_of(
        results(schemes=("rope", "none"))
    )


def test_no_claim_without_an_interval(page):
    """A scheme with one seed is in no sentence about better, worse, held or broken."""
    text = " ".join("".join(page.text).split())
    for words in re.split(r"(?<=\.\)) ?|(?<=\.) ", text[: text.index("Overview")]):
        if re.search(r"\b(better|worse|held to|broken at|positive|negative|significant)\b", words):
            assert "fox" not in words, words
    assert "−0.088 nats at 4,096 relative to 256 (point estimate)" in text
    few = findings_of(results(seeds=2))
    assert "no verdicts" in few
    assert not re.search(r"better|worse|held to|broken|positive|negative", few)


def findings_of(record: dict) -> str:
    study = read_study(record)
    comparison = derive(study, read_losses(study, "long", ()))
    return " ".join([*lead(comparison), *(sentence(name, comparison) for name in comparison.names)])


def test_undertrained_schemes_are_reported():
    record = results(schemes=("rope", "none"))
    assert "undertrained" not in findings_of(record)
    for cell in record["cells"]:
        found = cell.get("evaluations", {}).get("long", {})
        found["unigram_unit_nll"] = [0.5 for _ in found.get("unigram_unit_nll", [])]
    message = findings_of(record)
    assert "undertrained: rope" in message and "(0.500 nats)" in message


def test_the_absence_of_positive_gains_is_stated():
    found = findings_of(results(schemes=("rope", "window", "none")))
    assert "truncation at 4,096" in found and "positive for no scheme; negative for rope" in found


def test_results_csv_has_one_row_per_number(written):
    rows = list(
        csv.DictReader(io.StringIO((written[0] / "results.csv").read_text(encoding="utf-8")))
    )
    found = {(r["variant"], r["metric"], r["length"], r["where"], r["seed"]): r for r in rows}
    assert len(found) == len(rows)
    delta, gain = (found["alibi", metric, "4096", "", ""] for metric in ("delta", "gain"))
    assert delta["verdict"] == "held" and float(delta["value"]) == pytest.approx(-0.03, abs=0.01)
    assert float(gain["value"]) == pytest.approx(-float(delta["value"])) and gain["seeds"] == "3"
    assert (delta["family"], gain["family"], delta["level"], gain["units"]) == (
        "32",
        "1",
        "0.95",
        "9",
    )
    seeds = [float(found["alibi", "nll", "4096", "", seed]["value"]) for seed in "012"]
    assert np.mean(seeds) == pytest.approx(float(found["alibi", "nll", "4096", "", ""]["value"]))
    assert float(found["alibi", "difference", "4096", "", ""]["high"]) < 0
    assert gain["targets_hash"] == "7a" * 32 and gain["protocol"] == "fixed-targets"
    fox = found["fox", "delta", "4096", "", ""]
    assert fox["value"] and fox["low"] == fox["high"] == "" and fox["verdict"] == "points only"
    assert (
        found["learned", "failure", "512", "", ""]["note"] == "its positions end after 256 tokens"
    )
    assert ("learned", "nll", "512", "", "") not in found


def test_markdown_has_figures_and_rectangular_tables(written):
    text = (written[0] / "report.md").read_text(encoding="utf-8")
    figures = re.findall(r"\]\((figures/[\w.]+)\)", text)
    assert len(figures) == 5
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block


def test_an_unfinished_study_has_a_report(tmp_path):
    record = results()
    for cell in record["cells"]:
        cell |= {"status": "pending", "training": None, "timing": {}, "evaluations": {}}
    write_report(record, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "No loss evaluation has finished yet" in text and "20 pending" in text


def test_names_with_markup_are_escaped(blank_figures, tmp_path):
    record = results(schemes=("rope", "window"))
    record["name"] = "a <b>bold</b> | name & *more*"
    for cell in record["cells"]:
        if cell["axes"]["scheme"] == "window":
            cell["axes"]["scheme"] = "<window|1>"
    write_report(record, tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.open == [] and "b" not in {
        tag for tag, _ in page.tags[: [t for t, _ in page.tags].index("main")]
    }
    assert "<window|1>" in "".join(page.text)


def test_invalid_results_write_no_files(tmp_path):
    with pytest.raises(StudyError):
        write_report({"format": 1}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_second_evaluation_has_its_own_figures_and_sections(blank_figures, tmp_path):
    record = results(schemes=("rope", "window"))
    for cell in record["cells"]:
        if "evaluations" in cell:
            cell["evaluations"]["valid"] = copy.deepcopy(cell["evaluations"]["long"])
    record["study"]["report"]["primary"] = "valid"
    files = {file.name for file in write_report(record, tmp_path)}
    assert {
        "nll_by_length.png",
        "long_nll_by_length.png",
        "difference.svg",
        "long_difference.svg",
    } <= files
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.index("## NLL by context length (valid)") < text.index(
        "## NLL by context length (long)"
    )
