"""Every injected fault gives the documented exit status, one error message, no traceback and no
lost data."""

import importlib
from pathlib import Path

import pytest

FAULTS = [
    fault
    for file in sorted(Path(__file__).parent.glob("rows_*.py"))
    for fault in importlib.import_module(f"tests.faults.{file.stem}").FAULTS
]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=pytest.mark.slow if fault.is_slow else ())
        for fault in FAULTS
    ],
)
def test_fault(fault, tmp_path, overrides):
    result = fault.run(tmp_path, overrides)
    assert "Traceback" not in result.err, result.err
    assert result.status == fault.status, result.err
    for name in fault.names:
        assert name in result.err
