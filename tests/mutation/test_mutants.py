"""The table of mutants matches the code; checking all of them takes minutes and is slow."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m["name"])
def test_mutant_text_and_test_files_exist(mutant):
    assert (ROOT / mutant["file"]).read_text(encoding="utf-8").count(mutant["old"]) == 1
    assert mutant["old"] != mutant["new"]
    assert (ROOT / mutant["tests"].split()[0]).is_file()


def test_mutant_names_are_unique():
    assert max(collections.Counter(m["name"] for m in MUTANTS).values()) == 1
    assert len(MUTANTS) >= 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_mutant_is_caught():
    line = [sys.executable, str(ROOT / "tests" / "mutation" / "check.py")]
    found = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
