"""The commands `study.py claims` and `study.py FILE` for the file of one claim."""

import time
from collections.abc import Sequence
from pathlib import Path

from errors import UserError
from evaluation.reports.document import counted
from run_directory.console import Console, duration
from settings.load import load_settings
from studies.claims.atlas import write_atlas
from studies.claims.claim_run import PUBLISHED, Claim, is_complete
from studies.claims.claim_settings import ClaimSettings
from studies.claims.claim_verdicts import detectable, sd_bound
from studies.planned_cells import USER_ERRORS
from studies.study_run import StudyCall

CLAIMS = Path("configs/claims")
COLUMNS = ["claim", "question", "cells", "status", "cost", "left"]


def load_claims(folder: Path = CLAIMS) -> list[Claim]:
    """All claims of a folder, in the order of their names."""
    files = sorted(folder.glob("*.yaml"))
    return [Claim(file, load_settings(ClaimSettings, [str(file)])) for file in files]


def run_claims(call: StudyCall) -> int:
    """List the claims with their status and cost. With --all, run the unfinished claims, the
    cheapest first; with --publish, write the atlas. Returns the exit status."""
    options = call.options
    console = call.console
    claims = load_claims()
    if options.publish:
        pages = write_atlas([claim.publish(PUBLISHED) for claim in claims], PUBLISHED.parents[1])
        print(f"written: {', '.join(map(str, pages))}")
        return 0
    left: dict[Claim, float] = {}
    absent = []
    rows = []
    for claim in claims:
        cells = str(claim.record.get("cells", ""))
        if not claim.is_decided:
            try:
                run = claim.study_run(call)
                left[claim] = sum(run.flops[name] for name in run.flops.keys() - run.done)
                cells = f"{len(run.done)} of {len(run.cells)}"
            except USER_ERRORS:  # errors of this claim, such as a missing text
                absent.append(claim)
        rows.append([
            claim.name,
            claim.settings.question,
            cells,
            claim.status,
            f"{duration(claim.record['cpu_seconds'])} CPU" if claim.is_decided else "",
            f"{left[claim]:.1e} FLOPs" if claim in left else "",
        ])  # fmt: skip
    console.table(counted(len(claims), "claim"), COLUMNS, rows)
    print(f"left: {sum(left.values()):.1e} FLOPs; cells that claims share count twice")
    if absent:
        console.warn(
            f"{counted(len(absent), 'claim')} cannot run here; to print the reason: "
            f"python study.py {absent[0].file} --dry-run"
        )
    if not options.all or options.dry_run:
        return 0
    return run_all(sorted(left, key=left.__getitem__), call)


def run_all(claims: Sequence[Claim], call: StudyCall) -> int:
    """Run claims one after the other, within `options.hours`. Returns the worst exit status."""
    options = call.options
    hours = options.hours
    begun = time.monotonic()
    worst = 0
    for claim in claims:
        if hours is not None:
            options.hours = max(0.0, hours - (time.monotonic() - begun) / 3600)
        try:
            status = run_claim(claim, call)
        except UserError as error:  # an error of this claim; the others can run
            call.console.warn(f"{claim.name}: {error}")
            status = 2
        worst = max(worst, status)
        if status > 128:  # stopped by a signal
            break
    return worst


def run_claim(claim: Claim, call: StudyCall) -> int:
    """Run one claim or its pilot. Returns the exit status."""
    options = call.options
    console = call.console
    run = claim.study_run(call, options.pilot)
    if not options.pilot:
        claim.freeze(options.dry_run)
    pool = run.run()
    if pool is None:
        return 0
    results = run.gather()
    status = pool.report(options.repeat)
    if not options.pilot:
        _print_verdict(claim, results, console)
    elif is_complete(results):
        _print_pilot(claim, results)
    return status


def _print_pilot(claim: Claim, results: dict) -> None:
    """Print the values of each comparison, and the smallest effect that the seeds of the claim can
    show given the SD of the values."""
    pilot = claim.pilot_values(results)
    seeds = claim.settings.seeds
    for name, values in pilot.items():
        numbers = ", ".join(f"{value:+.4f}" for value in values)
        spread = ""
        if len(values) > 1:
            effect = detectable(len(seeds), len(pilot)) * sd_bound(values)
            spread = f", SD {values.std(ddof=1):.4f} ({len(seeds)} seeds can show {effect:.3g})"
        print(f"{name}: mean {values.mean():+.4f}{spread}: {numbers}")


def _print_verdict(claim: Claim, results: dict, console: Console) -> None:
    verdict = claim.finish(results)
    if verdict is None:
        console.info(f"{claim.name}: no verdict before all cells are done")
        return
    print(f"{claim.name}: {verdict.word}. {claim.settings.statement}")
    for name, (low, high) in verdict.ends.items():
        comparison = verdict.comparisons[name]
        print(
            f"    {name}: {comparison.estimate:+.3f} [{low:+.3f}, {high:+.3f}], delta "
            f"{comparison.delta:g}"
        )
    learned = ", ".join(f"{arm} {count}" for arm, count in verdict.learned.items())
    print(f"    learned, of {verdict.seeds} seeds: {learned}")
