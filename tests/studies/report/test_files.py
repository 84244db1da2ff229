"""The files of a study report, figures included."""

import numpy as np
from PIL import Image

from studies.report.report import write_report
from tests.studies.synthetic import results


def test_the_same_results_give_the_same_bytes(tmp_path):
    one, other = (
        write_report(results(schemes=("rope",)), tmp_path / name) for name in ("one", "other")
    )
    assert [file.name for file in one] == [file.name for file in other]
    assert sorted(file for file in (tmp_path / "one").rglob("*") if file.is_file()) == sorted(one)
    for a, b in zip(one, other, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name
    drawings = [file for file in one if file.suffix == ".png"]
    assert len(drawings) == 4
    for file in drawings:
        assert np.asarray(Image.open(file).convert("L")).std() > 5
