"""The live view of a training run."""

import io
import math
import re

import pytest
from rich.console import Console as RichConsole

from run_directory.console import Console
from training.live_view import LiveView, mean, sparkline


def train_line(step: int, loss: float | str, norm: float | str = 0.25, **more) -> dict:
    return {"kind": "train", "step": step, "loss": loss, "grad_norm": norm, "lr": 1.5e-3, **more}


def validation_line(step: int, nll: dict, targets: int, documents: int) -> dict:
    nll = {str(length): value for length, value in nll.items()}
    return {
        "kind": "validation",
        "step": step,
        "nll": nll,
        "targets": targets,
        "documents": documents,
    }


def new_view(name="run", steps=10) -> LiveView:
    return LiveView(name, steps, 1000 * steps, 0, Console(quiet=True))


def view() -> LiveView:
    found = new_view("tiny-0123456789", steps=2000)
    for step in range(1, 1001):
        speed = {"tokens": 2_000_000 - 754 * 14_200, "tokens_per_second": 14_200.0}
        speed |= {"mfu": 0.42, "peak_memory_bytes": 912 * 2**20}
        found.write(train_line(step, 5.0 - step / 500, **(speed if step % 10 == 0 else {})))
    lengths = [256 * 2**k for k in range(5)]
    for step, first, growth in ((500, 3.5, 0.1), (1000, 3.4, 0.2)):
        nll = {length: first + k * growth for k, length in enumerate(lengths)}
        found.write(validation_line(step, nll, 2048, 32))
    return found


def drawn(one: LiveView, width: int) -> list[str]:
    out = io.StringIO()
    RichConsole(file=out, width=width, force_terminal=True, color_system=None).print(one)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_width_and_show_metrics(width):
    lines = drawn(view(), width)
    assert all(len(line) <= width for line in lines) and len(lines) <= 8
    text = "\n".join(lines)
    assert "14,200 tokens/s  MFU 42%" in text
    # the mean of the last twenty steps, and how it differs from the twenty before
    assert "loss 3.0190 -0.0400" in text
    columns = [
        line.split() for line in lines if line.split()[:1] in (["context"], ["NLL"], ["change"])
    ]
    assert columns == [
        ["context", "256", "512", "1,024", "2,048", "4,096"],
        ["NLL", "3.4000", "3.6000", "3.8000", "4.0000", "4.2000"],
        ["change", "-0.1000", "+0.0000", "+0.1000", "+0.2000", "+0.3000"],
    ]
    if width >= 80:
        assert "tiny-0123456789  step 1,000/2,000" in text and "50%  12 min 34 s left" in text
        assert "held out: step 1,000, 2,048 targets of 32 documents" in text and "912 MiB" in text


def test_unknown_values_are_omitted():
    text = "\n".join(drawn(new_view(), 80))
    assert "waiting for the first step" in text
    assert not any(word in text for word in ("held out", "nan", "tokens/s", "left", "MiB"))
    broken = new_view()
    broken.write(train_line(1, "nan", "inf"))
    broken.write(validation_line(1, {16: 2.0, 32: "nan"}, 8, 1))
    assert "32" in "\n".join(drawn(broken, 80))


def test_small_curves():
    assert sparkline([0, 7], 24) == "▁█" and sparkline([3, 3, 3], 24) == "▁▁▁"
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 2, 6, 8, math.inf, math.nan], 3) == "▁█ "  # means of pairs: 1, 7, none
    assert sparkline([], 5) == "" and sparkline([math.nan], 5) == " "
    assert mean([1.0, math.inf, 2.0]) == 1.5 and math.isnan(mean([]))
