"""Heat maps of task accuracy, and small multiples of attention measures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from evaluation.reports.figures import INK, SOFT, STYLE
from studies.report.figures import DOTTED, HEAD, WIDTH, SeedSeries, clean, sheet

SHADES = "cividis"  # uniform in lightness, suitable for all kinds of colour vision


def heat_figure(
    maps: Sequence[tuple[str, str, dict[tuple[float, int], float]]], title: str, subtitle: str, note: str
) -> Figure:
    """One depth × length heat map per (label, colour, (depth, length) -> share), with numbers."""
    lengths = sorted({length for _, _, cells in maps for _, length in cells})
    depths = sorted({depth for _, _, cells in maps for depth, _ in cells})
    with rc_context(STYLE):
        columns = min(len(maps), max(1, int((WIDTH - 0.6) / max(1.6, 0.36 * len(lengths)))))
        rows, cell = math.ceil(len(maps) / columns), 0.2
        tall = cell * len(depths) + 0.62
        height = HEAD + rows * tall + 0.25
        figure = sheet(height, title, subtitle, note)
        wide = (WIDTH - 0.62) / columns
        shades = colormaps[SHADES]
        for n, (label, colour, cells) in enumerate(maps):
            row, column = divmod(n, columns)
            bottom = height - HEAD - row * tall - cell * len(depths) - 0.12
            area = (0.55 + column * wide) / WIDTH, bottom / height
            axes = figure.add_axes((*area, (wide - 0.16) / WIDTH, cell * len(depths) / height))
            axes.set_xlim(-0.5, len(lengths) - 0.5)
            axes.set_ylim(len(depths) - 0.5, -0.5)
            for (depth, length), share in cells.items():
                x, y = lengths.index(length), depths.index(depth)
                square = Rectangle(
                    (x - 0.5, y - 0.5), 1, 1, facecolor=shades(share), edgecolor="white", lw=0.6
                )
                axes.add_patch(square)
                ink = "#fefefe" if share < 0.55 else "#111111"  # like the cells, the same on a dark page
                axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=ink)
            axes.set_title(label, loc="left", fontsize=9, color=colour, fontweight="bold", pad=3)
            axes.xaxis.set_major_locator(FixedLocator(list(range(len(lengths)))))
            axes.set_xticklabels([f"{length:,}" for length in lengths], fontsize=7)
            axes.yaxis.set_major_locator(FixedLocator(list(range(len(depths)))))
            axes.set_yticklabels([f"{depth:.2g}" for depth in depths] if column == 0 else [], fontsize=7)
            axes.tick_params(length=0)
            for side in axes.spines.values():
                side.set_visible(False)
        middle = (height - HEAD - rows * tall / 2) / height
        figure.text(0.02, middle, "depth of the answer", rotation=90, va="center", fontsize=8.5, color=INK)
        return figure


def measures_figure(
    panels: Sequence[tuple[str, Sequence[SeedSeries]]],
    trained_length: int,
    title: str,
    subtitle: str,
    note: str,
) -> Figure:
    """One panel per measure against length, with all series in each and one legend."""
    with rc_context(STYLE):
        columns = min(3, len(panels))
        rows = math.ceil(len(panels) / columns)
        lines = max((series for _, series in panels), key=len)
        keys = math.ceil(len(lines) / 4)
        panel, key = 1.75, 0.2 * keys + 0.1
        height = HEAD + 0.3 + key + rows * panel
        figure = sheet(height, title, subtitle, note)
        wide = (WIDTH - 0.2) / columns
        for n, (label, series) in enumerate(panels):
            row, column = divmod(n, columns)
            bottom = height - HEAD - row * panel - 1.28
            area = (0.2 + column * wide + 0.32) / WIDTH, bottom / height, (wide - 0.45) / WIDTH, 1.2 / height
            axes = figure.add_axes(area)
            for one in series:
                axes.plot(
                    one.x, one.y, color=one.colour, marker=one.marker, lw=1.3, ms=3.6, mec="white", mew=0.5
                )
            xs = sorted({x for one in series for x in one.x})
            axes.set_xscale("log", base=2)
            while len(xs) > 4:
                xs = xs[::-2][::-1]
            axes.xaxis.set_major_locator(FixedLocator(xs))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.axvline(trained_length, color=SOFT, lw=0.9, ls=DOTTED, zorder=1)
            clean(axes, "y", ("top", "right"))
            axes.tick_params(labelsize=7, length=2)
            axes.set_title(label, loc="left", fontsize=8, color=INK, pad=4)
        handles = [
            Line2D([], [], color=one.colour, marker=one.marker, lw=1.3, ms=4, label=one.label)
            for one in lines
        ]
        figure.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0.02, 0.26 / height), ncols=4, fontsize=8,
            frameon=False, handlelength=1.6, columnspacing=1.4, labelcolor=[one.colour for one in lines],
        )  # fmt: skip
        return figure
