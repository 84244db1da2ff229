"""The atlas: docs/atlas.md, and docs/atlas.html with filters, from the published results of all
claims."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data.files import write_text
from evaluation.reports.document import (
    Cell,
    ReportTable,
    counted,
    markdown,
    page,
    picture,
    plain,
    plain_text,
    with_ends,
)
from evaluation.reports.figures import (
    COLOURS,
    SOFT,
    FigureText,
    draw_dot,
    draw_line,
    mark,
    panels,
    rows_panel,
    save,
    set_scale,
)
from run_directory.console import duration
from studies.claims.claim_run import Claim
from studies.claims.claim_settings import QUESTIONS
from studies.claims.claim_verdicts import (
    ALPHA,
    INCONCLUSIVE,
    REFUTED,
    REPRODUCED,
    ClaimVerdict,
    holm,
)

FIGURE = "figure"
OVERVIEW = "figures/atlas.png"
READING = "results/reading/figure.png"
READING_TITLE = "Do schemes that hold also read?"
READING_TEXT = (
    "The read gain is the loss of repeated text after its earlier occurrence was replaced, minus "
    "its loss: above zero, the occurrence was read. [Reading](results/reading.md) has the protocol "
    "and all numbers."
)
KINDS = {REPRODUCED: COLOURS[0], INCONCLUSIVE: SOFT, REFUTED: COLOURS[1]}
METHODS_TITLE = "How to read the verdicts"
METHODS = (
    "Verdicts are about this scale: 0.1M to 0.3M parameters, trained in seconds. Each seed "
    "gives one paired number, positive as predicted; brackets are intervals of its mean over all "
    "seeds (losses in nats), or of the difference between the shares of seeds that solve a task. "
    "A claim is reproduced if the interval of every comparison is at or above the smallest effect "
    "δ, and refuted if one is below it. A claim of no difference (±δ) is reproduced if every "
    "interval is within ±δ, and refuted if one is beyond. Otherwise, and where more than one run "
    "in eight of an arm has not learned within the trained length, the verdict is inconclusive."
)
FILTERS = Path(__file__).with_name("filters.html")


@dataclass(frozen=True)
class AtlasEntry:
    """A claim with results. `survives`: its verdict holds simultaneously with all others."""

    claim: Claim
    verdict: ClaimVerdict
    survives: bool

    @property
    def kind(self) -> str:
        """The kind of verdict: reproduced, refuted or inconclusive."""
        return self.verdict.word.split(" ")[0]

    @property
    def here(self) -> str:
        """The measured values: `change at twice the length: novels +0.3 [+0.2, +0.4], stories ...
        (δ 0.25)`."""
        groups: dict[tuple[str, str], list[str]] = {}
        for name, comparison in self.verdict.comparisons.items():
            title, _, label = name.rpartition(", ")
            counts = " − ".join(f"{sum(arm)} of {len(arm)}" for arm in comparison.solved)
            ends = with_ends(comparison.estimate, *self.verdict.ends[name])
            key = (title, f"{'' if comparison.difference else '±'}{comparison.delta:g}")
            text = f"{label} {ends}, {counts}" if counts else f"{label} {ends}"
            groups.setdefault(key, []).append(text)
        return "; ".join(
            f"{title}{': ' if title else ''}{', '.join(parts)} (δ {delta})"
            for (title, delta), parts in groups.items()
        )

    @property
    def facts(self) -> dict[str, str]:
        """The facts that the page lists, by name; the filters of the HTML page read them from the
        page."""
        settings = self.claim.settings
        source = settings.source
        reporter = settings.as_reported_by
        n = self.verdict.seeds
        missing = [
            f"{n - count} of {arm} did not learn"
            for arm, count in self.verdict.learned.items()
            if count < n
        ]
        return {
            "verdict": f"{self.verdict.word}{' ‡' if self.survives else ''}",
            "here": self.here,
            "published": settings.published + (f" (as reported by {reporter})" if reporter else ""),
            "source": f"{source.authors}: {source.title} ({source.paper}, {source.place})",
            "scheme": ", ".join(self.claim.schemes),
            "task": self.claim.task,
            "seeds": f"{n}; {'; '.join(missing) or 'all learned'}",
            "CPU time": duration(self.claim.record["cpu_seconds"]),
            "command": command_of(self.claim),
            "deviations": settings.deviations,
        }

    @property
    def markdown(self) -> str:
        """The statement, the figure and the facts in Markdown."""
        figure = f"results/claims/{self.claim.name}/{FIGURE}.svg"
        alt = plain_text(f"Chart: {', '.join(self.verdict.comparisons)}")
        facts = [f"- **{name}**: {plain_text(text)}" for name, text in self.facts.items()]
        statement = plain_text(self.claim.settings.statement)
        return f"### {statement}\n\n![{alt}]({figure})\n\n" + "\n".join(facts)


def command_of(claim: Claim) -> str:
    return shlex.join(["python", "study.py", str(claim.file)])


def claim_figure(verdict: ClaimVerdict) -> Figure:
    """The value of every seed, the mean with its interval, and the smallest effect that counts."""
    comparisons = verdict.comparisons

    def draw(axes: Axes) -> None:
        for at, (name, comparison) in enumerate(comparisons.items()):
            values = [] if comparison.solved else comparison.values
            seeds = [at] * len(values)
            draw_line(axes, values, seeds, color=SOFT, ls="", marker="o", ms=3.4)
            ends = (comparison.estimate, *verdict.ends[name])
            draw_dot(axes, at + 0.22, ends, COLOURS[0], marker="D")
        marks = {each.delta: "δ" for each in comparisons.values()}
        marks |= {-each.delta: "−δ" for each in comparisons.values() if not each.difference}
        for at, text in marks.items():
            mark(axes, at, text)

    names = [name.split(", ")[-1] for name in comparisons]
    return panels([rows_panel(names, draw, row=0.42)], FigureText(), width=4.8)


def overview(entries: Sequence[AtlasEntry]) -> Figure:
    """Every comparison of every claim, in multiples of its smallest effect that counts."""
    rows = sorted(entries, key=lambda entry: (list(KINDS).index(entry.kind), entry.claim.name))

    def draw(axes: Axes) -> None:
        shown: list[float] = []
        for at, entry in enumerate(rows):
            for name, comparison in entry.verdict.comparisons.items():
                ends = [comparison.estimate, *entry.verdict.ends[name]]
                ends = [end / comparison.delta for end in ends]
                draw_dot(axes, at, ends, KINDS[entry.kind], hollow=not comparison.difference)
                shown += ends
        set_scale(axes, "x", shown, band=1)

    names = [f"{entry.claim.name.replace('_', ' ')}: {entry.kind}" for entry in rows]
    x = "effect, in multiples of δ (hollow: no difference is claimed)"
    return panels([rows_panel(names, draw, x=x, row=0.2)], FigureText(), width=8.0)


def write_atlas(claims: Sequence[Claim], docs: Path) -> list[Path]:
    """Write the figures and both pages from the results of claims in `docs`/results/claims. Returns
    the pages."""
    verdicts = {
        claim: verdict
        for claim in claims
        if claim.is_decided and (verdict := claim.verdict()) is not None
    }
    survives = holm([verdict.p for verdict in verdicts.values()])
    entries = [
        AtlasEntry(claim, verdict, is_safe)
        for (claim, verdict), is_safe in zip(verdicts.items(), survives, strict=True)
    ]
    for entry in entries:
        save(claim_figure(entry.verdict), entry.claim.folder, FIGURE, formats=("svg",))
    overview_file = docs / OVERVIEW
    save(overview(entries), overview_file.parent, overview_file.stem)
    kinds = [entry.kind for entry in entries]
    counts = [f"{kinds.count(kind)} {kind}" for kind in (REPRODUCED, REFUTED, INCONCLUSIVE)]
    # all claims without a verdict, so that none is missing
    others: list[list[Cell]] = [
        [each.settings.statement, each.settings.published, each.status, command_of(each)]
        for each in claims
        if each not in verdicts
    ]
    counts += [f"{len(others)} not run"] if others else []
    lead = [
        f"{counted(len(claims), 'claim')}: {', '.join(counts)}.",
        "Claims of papers and threads about positions and length, each run as a study. Its seeds, "
        "comparisons and smallest effect were committed before its results.",
        f"Each verdict is wrong with a probability of at most {ALPHA:.0%}, so at most "
        f"{plain(ALPHA * len(entries), 1)} wrong ones are expected; those marked ‡ hold "
        "simultaneously (Holm).",
    ]
    sections: dict[str, list[str | ReportTable]] = {}
    if (docs / READING).is_file():
        caption = "The change of the loss and what is read, by scheme; four seeds, 95% intervals."
        sections[READING_TITLE] = [READING_TEXT, picture(READING, caption, caption)]
    caption = "The intervals of all comparisons, in multiples of their smallest effect δ (shaded)."
    sections[METHODS_TITLE] = [plain_text(METHODS), picture(OVERVIEW, caption, caption)]
    for question, heading in QUESTIONS.items():
        own = [entry for entry in entries if entry.claim.settings.question == question]
        sections[heading] = [entry.markdown for entry in own]
    columns = ("claim", "published", "status", "command")
    table = ReportTable("Claims without results", columns, others, numbers=len(columns))
    sections["Written and not run"] = [table]
    title = "Atlas of claims about length"
    write_text(docs / "atlas.md", markdown(title, lead, sections))
    sections[METHODS_TITLE].append(FILTERS.read_text(encoding="utf-8"))
    write_text(docs / "atlas.html", page(markdown(title, lead, sections), docs))
    return [docs / "atlas.md", docs / "atlas.html"]
