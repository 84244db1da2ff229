"""The atlas: docs/atlas.md, and docs/atlas.html with filters, from the published results of all
claims."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data.files import write_text
from evaluation.reports.document import (
    ReportTable,
    TableCell,
    embedded,
    markdown,
    page,
    picture,
)
from evaluation.reports.figures import (
    COLOURS,
    DASHED,
    GRID,
    INK,
    SOFT,
    Curve,
    FigureText,
    Panel,
    mark,
    panels,
    save,
)
from evaluation.reports.text import counted, plain, with_ends
from run_directory.console import duration
from studies.claims.claim_results import ClaimVerdict
from studies.claims.claim_run import Claim
from studies.claims.claim_settings import QUESTIONS
from studies.claims.verdicts import ALPHA, INCONCLUSIVE, REFUTED, REPRODUCED, holm

FIGURE = "figure"
TONES = {REPRODUCED: "good", REFUTED: "bad"}
LEAD = (
    "Claims from papers and threads about positions and length, each run as a study whose seeds, "
    "comparisons and smallest effects were committed before its results."
)
METHODS = (
    "A verdict is about this scale: 0.1M to 0.3M parameters, trained in seconds. Reproduced: in "
    "every comparison the lower end of the interval is at or above the smallest effect. Refuted: "
    "in one of them the upper end is below it. Of a claim of no difference: within or beyond it in "
    "either direction. All seeds count; where more than one run in eight of an arm has not learned "
    "within the trained length, the verdict is inconclusive."
)
COLUMNS = ("claim", "published", "here", "verdict", "seeds", "CPU time", "command", "deviations")
HTML = """<article class="claim" data-scheme="{scheme}" data-task="{task}" data-verdict="{verdict}">
<h3>{statement}</h3>
<p><b class="badge {tone}">{word}</b> {here}</p>
<img src="{image}" alt="{name}">
<dl>{facts}</dl></article>"""
FILTERS = Path(__file__).with_name("filters.html")


@dataclass(frozen=True)
class AtlasEntry:
    """A claim with results. `survives`: its verdict holds simultaneously with all others."""

    claim: Claim
    verdict: ClaimVerdict
    survives: bool

    @property
    def word(self) -> str:
        return f"{self.verdict.word}{' ‡' if self.survives else ''}"

    @property
    def source(self) -> str:
        source = self.claim.settings.source
        return f"{source.authors}: {source.title} ({source.paper}, {source.place})"

    @property
    def published(self) -> str:
        reporter = self.claim.settings.as_reported_by
        return self.claim.settings.published + (f" (as reported by {reporter})" if reporter else "")

    @property
    def here(self) -> str:
        """`change at twice the length: novels +0.3 [+0.2, +0.4], stories ... (δ 0.25)`."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name, comparison in self.verdict.comparisons.items():
            title, _, label = name.rpartition(", ")
            sign = "" if comparison.difference else "±"
            key = (title or label, f"{sign}{comparison.delta:g}")
            ends = with_ends(comparison.estimate, *self.verdict.ends[name])
            groups.setdefault(key, []).append(f"{label} {ends}" if title else ends)
        return "; ".join(
            f"{title}: {', '.join(parts)} (δ {delta})" for (title, delta), parts in groups.items()
        )

    @property
    def seeds(self) -> str:
        n = self.verdict.seeds
        missing = {arm: n - count for arm, count in self.verdict.learned.items() if count < n}
        text = "; ".join(f"{count} of {arm} did not learn" for arm, count in missing.items())
        return f"{n}; {text}" if text else f"{n}, all learned"

    @property
    def cost(self) -> str:
        return duration(self.claim.record["cpu_seconds"])

    @property
    def command(self) -> str:
        return shlex.join(["python", "study.py", str(self.claim.file)])

    @property
    def row(self) -> list:
        """For the table of the Markdown page."""
        statement = f"{self.claim.settings.statement} {self.source}"
        verdict = TableCell(self.word, TONES.get(self.verdict.word, ""))
        more = [self.seeds, self.cost, self.command, self.claim.settings.deviations]
        return [statement, self.published, self.here, verdict, *more]

    @property
    def figure(self) -> str:
        """For the Markdown page."""
        caption = f"{self.claim.settings.statement} {self.word.capitalize()}."
        link = f"results/claims/{self.claim.name}/{FIGURE}.svg"
        return picture(link, caption, self.claim.name)

    @property
    def article(self) -> str:
        """For the HTML page."""
        facts = {
            "source": self.source,
            "published": self.published,
            "seeds": self.seeds,
            "CPU time": self.cost,
            "deviations": self.claim.settings.deviations,
            "command": self.command,
        }
        return HTML.format(
            scheme="|".join(self.claim.record["schemes"]),
            task=self.claim.record["task"],
            verdict=self.verdict.word.split(" ")[0],
            statement=escape(self.claim.settings.statement),
            tone=TONES.get(self.verdict.word, ""),
            word=escape(self.word),
            here=escape(self.here),
            name=escape(self.claim.name),
            image=embedded(self.claim.folder / FIGURE),
            facts="".join(f"<dt>{key}</dt><dd>{escape(text)}</dd>" for key, text in facts.items()),
        )


def filters(entries: Sequence[AtlasEntry]) -> str:
    """Choices of the claims that the HTML page shows."""
    records = [entry.claim.record for entry in entries]
    values = {
        "scheme": {scheme for record in records for scheme in record["schemes"]},
        "task": {record["task"] for record in records},
        "verdict": {entry.verdict.word.split(" ")[0] for entry in entries},
    }
    selects = ""
    for name, choices in values.items():
        options = "".join(f"<option>{escape(choice)}</option>" for choice in sorted(choices))
        selects += (
            f'<label>{name} <select name="{name}"><option value="">all</option>{options}'
            "</select></label>"
        )
    return FILTERS.read_text(encoding="utf-8").replace("SELECTS", selects)


def claim_figure(entry: AtlasEntry) -> Figure:
    """The value of every seed, the mean with its interval, and the smallest effect that counts."""
    verdict = entry.verdict
    names = list(verdict.comparisons)
    curves = []
    for i, name in enumerate(names):
        comparison = verdict.comparisons[name]
        low, high = verdict.ends[name]
        values = comparison.values if not comparison.solved else []
        curves.append(Curve("", values, [i] * len(values), SOFT, dash="", marker="o", size=3.4))
        mean = Curve("", [comparison.estimate], [i + 0.22], COLOURS[0], [low], [high], across=True)
        curves.append(replace(mean, marker="D"))
    deltas = {(c.delta, c.difference) for c in verdict.comparisons.values()}

    def scales(axes: Axes) -> None:
        axes.set_ylim(len(names) - 0.4, -0.5)
        axes.set_yticks(range(len(names)), [name.split(", ")[-1] for name in names], fontsize=9)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=GRID, lw=0.7, zorder=0)
        axes.spines["left"].set_visible(False)
        axes.axvline(0, color=INK, lw=1.0, ls=DASHED, zorder=2)
        for delta, is_difference in deltas:
            mark(axes, delta, "δ")
            if not is_difference:
                mark(axes, -delta, "−δ")

    heading = names[0].rpartition(", ")[0] or names[0]
    panel = Panel(curves, heading, scales=scales, named=False, height=0.5 + 0.42 * len(names))
    return panels([panel], FigureText(), width=4.8)


def write_atlas(claims: Sequence[Claim], docs: Path) -> list[Path]:
    """Write the figures and both pages from the results of claims in `docs`/results/claims; the
    pages."""
    entries = _entries(claims)
    for entry in entries:
        save(claim_figure(entry), entry.claim.folder, FIGURE, formats=("svg",))
    counts = {
        word: sum(entry.verdict.word.startswith(word) for entry in entries)
        for word in (REPRODUCED, REFUTED, INCONCLUSIVE)
    }
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    expected = plain(ALPHA * len(entries), 1)
    lead = [
        f"{counted(len(entries), 'claim')}: {summary}. {LEAD}",
        f"Each verdict is wrong with a probability of at most {ALPHA:.0%}, so that at most "
        f"{expected} wrong ones are expected; those with ‡ hold simultaneously (Holm).",
    ]
    texts = {}
    for name, is_html in (("atlas.md", False), ("atlas.html", True)):
        sections = {"Verdicts": [METHODS, filters(entries) if is_html else ""]}
        for question, title in QUESTIONS.items():
            own = [entry for entry in entries if entry.claim.settings.question == question]
            table = ReportTable(title, COLUMNS, [entry.row for entry in own], numbers=len(COLUMNS))
            parts = [table, *(entry.figure for entry in own)]
            sections[title] = [entry.article for entry in own] if is_html else parts
        text = markdown("Atlas of claims about length", lead, sections)
        texts[docs / name] = page(text, docs) if is_html else text
    for file, text in texts.items():
        write_text(file, text)
    return list(texts)


def _entries(claims: Sequence[Claim]) -> list[AtlasEntry]:
    """The claims that have results under their present settings."""
    verdicts = {
        claim.name: verdict
        for claim in claims
        if claim.record.get("hash") == claim.hash and (verdict := claim.verdict()) is not None
    }
    survives = holm([verdict.p for verdict in verdicts.values()])
    by_name = {claim.name: claim for claim in claims}
    return [
        AtlasEntry(by_name[name], verdict, is_safe)
        for (name, verdict), is_safe in zip(verdicts.items(), survives, strict=True)
    ]
