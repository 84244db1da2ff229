"""The report of a study: its files, sentences and pages."""

import math
import re
from copy import deepcopy
from html.parser import HTMLParser

import pandas as pd
import pytest

from evaluation.statistics.results_table import select
from studies.study_report import findings as findings_of
from studies.study_report import write_report
from tests.artists import ends
from tests.studies.synthetic import L0, results, with_others
from tests.studies.test_loss_comparison import derived
from tests.tables import value

VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """The tags, ids, links and text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags = []
        self.open = []
        self.text = ""
        self.feed(text)
        self.ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        keys = ("src", "href")
        self.links = [found[key] for _, found in self.tags for key in keys if key in found]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += f"{data} "


@pytest.fixture
def write(figures, tmp_path):
    def write_and_read(record: dict) -> tuple[Page, str]:
        write_report(record, tmp_path)
        page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        return page, (tmp_path / "report.md").read_text(encoding="utf-8")

    return write_and_read


def findings(record: dict) -> str:
    return " ".join(findings_of(derived(record)))


def test_the_page_is_accessible_and_needs_no_network(write):
    page, text = write(with_others(results(schemes=("rope", "window", "alibi"))))
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    anchors = {f"#{name}" for name in page.ids}
    local = {link for link in page.links if not link.startswith("data:")}
    assert local - anchors == {"report.md", "results.csv", "results.json"}
    assert not {tag for tag, _ in page.tags} & {"script", "iframe"}
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 6
    assert all(len(image["alt"]) > 60 for image in images)
    heads = [attributes for tag, attributes in page.tags if tag == "th"]
    assert heads
    assert all(head.get("scope") in ("row", "col") for head in heads)
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_the_lead_states_the_findings(write):
    page, _ = write(results())
    text = " ".join(page.text.split())
    outcome = "alibi and window held to 4,096; rope + yarn held to 512, broken at 1,024; rope, none"
    assert outcome in text
    assert "positive for alibi; negative for sinusoidal, rope, none and rope + yarn" in text
    for number in ("fox (1 seed)", "9 clusters (18 documents)", "cells: 19 done, 1 failed"):
        assert number in text
    assert "not finite at step 17" in text
    assert "end after 256 tokens" in text


def test_numbers_of_the_report_are_those_of_its_table(write, tmp_path):
    _, text = write(results())
    rows = pd.read_csv(tmp_path / "results.csv", keep_default_na=False, na_values=[""])
    rows = rows[rows.seed.isna() & rows["where"].isna()].set_index(["variant", "metric", "length"])
    for name in ("none", "alibi", "fox"):
        for length in (512, 1024, 2048, 4096):
            assert f"| {rows.value[name, 'nll', length]:.3f} |" in text
            delta = rows.loc[name, "delta", length]
            ends = "" if math.isnan(delta.low) else f" \\[{-delta.high:+.3f}, {-delta.low:+.3f}]"
            assert f"{-delta.value:+.3f}{ends}".replace("-", "−") in text
        difference = f"{rows.value[name, 'difference', 4096]:+.3f}".replace("-", "−")
        assert difference in text
    delta = rows.loc["rope + yarn", "delta", 4096]
    sample = delta[["scheme", "method", "verdict", "seeds", "units", "family", "level"]].tolist()
    assert sample == ["rope", "yarn", "broken", "3", 9, 32, 0.95]
    assert "256 tokens" in rows.note["learned", "failure", 512]
    assert "| rope | 1,245,097 | 2,048,000 | 8.1e+06 |" in text  # means of 3 seeds


def test_variants_without_intervals_are_in_no_claim():
    for sentence in re.split(r"\. ", findings(results())):
        if re.search(r"better|worse|held to|broken at|positive|negative|significant", sentence):
            assert "fox" not in sentence
    assert not re.search(r"better|worse|held to|broken|positive", findings(results(seeds=2)))


def test_undertrained_schemes_are_reported(write, figures):
    record = results(schemes=("rope", "alibi", "none"))
    assert "ndertrained" not in findings(record)
    table = derived(record).table
    assert value(table, "alibi", "held_to") == 4096
    assert select(table, "context_reach", "alibi")
    for unigram in (0.5, 5.15):  # 0.35 nats above the loss of rope, 0.2 above that of NoPE
        for cell in record["cells"][:-1]:
            cell["evaluations"]["long"]["unigram_unit_nll"] = [unigram] * 9
        first = findings_of(derived(record))[0]
        assert first.startswith("Undertrained (†): rope, rope + yarn, alibi and none;")
        table = derived(record).table
        words = {row.verdict for row in select(table, "delta")}
        assert words == {"", "inconclusive", "broken"}
        for metric in ("held_to", "context_reach", "gain_shown_to"):
            assert not select(table, metric)
        assert "held to" not in findings(record)
    _, text = write(record)
    assert "| none † |" in text
    labels = {end.name for end in ends(figures["nll_by_length"].axes[0])}
    assert {"rope †", "rope + yarn †", "none †"} <= labels


def test_an_unfinished_study_has_a_report(write):
    record = results()
    for cell in record["cells"]:
        cell |= {"status": "pending", "training": None, "timing": {}, "evaluations": {}}
    assert "20 pending" in write(record)[1]


def test_effects_by_size_are_reported_from_two_rungs_on(write, tmp_path):
    """And those of a rung whose cells are not at hand are read from effects.csv."""
    rise = {"scheme": "rope", "length": "4x", "from": "1x"}
    effect = {"statement": "RoPE rises", "value": rise, "delta": 0.1, "expect": "steady"}
    record = results(schemes=("rope",))
    record["study"]["trend"] = {"effects": {"rise": effect}}

    def on_rung(rung: str, parameters: int) -> dict:
        cells = deepcopy(record["cells"])
        for cell in cells:
            cell["axes"] = {"rung": rung, **cell["axes"]}
            if cell["training"]:
                cell["training"] |= {"layer_parameters": parameters, "train_length": L0}
        return record | {"cells": cells}

    small = on_rung("small", 1000)
    _, text = write(small)
    assert "Effects by size" not in text
    large = on_rung("large", 9000)
    pending = {"status": "pending", "training": None, "timing": {}, "evaluations": {}}
    large["cells"] = [cell | pending for cell in small["cells"]] + large["cells"]
    page, text = write(large)
    first, *others = [link for link in page.links if link.startswith(("#effects", "#findings"))]
    assert first == "#effects-by-size"
    assert others  # those of the evaluation of each rung
    assert text.index("Effects from small to large: steady (1).") < text.index("Effects by size")
    row = next(line for line in text.splitlines() if line.startswith("| RoPE rises"))
    assert row.count("| +0.54") == 2  # drawn around 0.55
    assert "| steady | steady |" in row
    rungs = pd.read_csv(tmp_path / "effects.csv")["rung"]
    assert list(rungs.unique()) == ["small", "large"]


def test_the_same_results_give_the_same_bytes(tmp_path):
    record = results(schemes=("rope", "window"))
    stored = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        write_report(record, folder)
        files = [file for file in folder.rglob("*") if file.is_file()]
        stored.append({file.relative_to(folder): file.read_bytes() for file in files})
    assert stored[0] == stored[1]
