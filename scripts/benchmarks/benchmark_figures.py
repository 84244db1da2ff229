"""The figures of docs/benchmarks/cpu.md."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from evaluation.reports.charts import (
    COLOURS,
    INK,
    MARKERS,
    SOFT,
    STYLE,
    WIDTH,
    fix_ticks,
    grid,
    save,
)


def exponent(sizes: np.ndarray, seconds: np.ndarray) -> float:
    """The slope of log seconds against log size over the larger half of the sizes; NaN for a single
    size."""
    n = max(2, (len(sizes) + 1) // 2)
    if len(sizes) < 2:
        return float("nan")
    return float(np.polyfit(np.log(sizes[-n:]), np.log(seconds[-n:]), 1)[0])


def draw_ratios(
    table: pd.DataFrame,
    goals: dict[tuple[str, str], float],
    folder: Path,
) -> None:
    """Bars of the ratios to the baseline, with a line at each goal."""
    table = table[table["variant"] != table["baseline"]]
    shapes = sorted(table["shape"].unique())
    height = 1.0 + 0.26 * max((table["shape"] == shape).sum() for shape in shapes)
    with rc_context(STYLE):
        fig = Figure(figsize=(1.5 * WIDTH, height), layout="constrained")
        for ax, shape in zip(
            fig.subplots(1, len(shapes), squeeze=False)[0],
            shapes,
            strict=True,
        ):
            rows = table[table["shape"] == shape].to_dict("records")
            for y, row in enumerate(rows):
                ours = str(row["variant"]).startswith("ours")
                ax.barh(
                    -y,
                    row["ratio"],
                    color=COLOURS[0] if ours else "#BBBBBB",
                    height=0.7,
                )
                goal = goals.get((row["case"], shape)) if ours else None
                if goal is not None:
                    ax.plot(
                        [goal, goal],
                        [-y - 0.42, -y + 0.42],
                        color=INK,
                        lw=1.6,
                    )
            ax.axvline(1, color=SOFT, lw=0.8)
            ax.set_yticks(
                [-y for y in range(len(rows))], [f"{row['case']}: {row['variant']}" for row in rows]
            )
            ax.set_xlabel("speed over transformers (black line: goal)")
            ax.set_title(f"Shape {shape}")
            grid(ax)
            ax.grid(axis="y", visible=False)
        save(fig, folder, "cpu")


def draw_growth(table: pd.DataFrame, folder: Path) -> None:
    """Seconds against size on log axes, a panel for each case and size."""
    panels = sorted({(row["case"], row["axis"]) for row in table.to_dict("records")})
    with rc_context(STYLE):
        fig = Figure(figsize=(1.5 * WIDTH, 6.0), layout="constrained")
        axes = fig.subplots(-(-len(panels) // 2), 2, squeeze=False).flatten()
        for ax in axes[len(panels) :]:
            ax.remove()
        for ax, (case, axis) in zip(axes, panels, strict=False):
            cells = table[(table["case"] == case) & (table["axis"] == axis)]
            for i, (variant, rows) in enumerate(cells.groupby("variant", sort=True)):
                rows = rows.sort_values("size")
                sizes = rows["size"].to_numpy()
                seconds = rows["seconds"].to_numpy()
                label = f"{variant}, exponent {exponent(sizes, seconds):.2f}"
                ax.loglog(
                    sizes,
                    seconds,
                    color=COLOURS[i],
                    marker=MARKERS[i],
                    ms=4,
                    label=label,
                )
            sizes = np.sort(cells["size"].unique())
            fix_ticks(ax, [sizes[0], sizes[len(sizes) // 2], sizes[-1]])
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
            ax.set_xlabel(axis)
            ax.set_title(str(case))
            ax.legend(fontsize=7, frameon=False)
            ax.set_ylabel("CPU seconds")
            grid(ax)
        save(fig, folder, "growth")
