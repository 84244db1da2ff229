"""The summary of a preparation, as a dict and as terminal tables."""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from data.store import TokenStore

# with fewer independent documents or clusters, evaluation omits confidence intervals
POINTS_ONLY_BELOW = 6
FEW_BELOW = 20  # with fewer units, evaluation flags its intervals
LENGTHS = tuple(1 << k for k in range(8, 16))  # 256 ... 32768 tokens


class NullConsole:
    """A console with the methods of the scripts' console and no output, the default for library
    calls."""

    def info(self, text: str) -> None:
        pass

    warn = info

    @contextmanager
    def bar(self, label: str, total: int | None, unit: str = "it"):
        yield self

    def advance(self, n: int = 1) -> None:
        pass

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
    ) -> None:
        pass


def split_summary(store: TokenStore) -> dict[str, Any]:
    clusters = [cluster for cluster in store.clusters if cluster]
    documents = store.n_documents
    tokens = store.n_tokens
    raw = int(store.bytes.sum())
    control = documents * (store.has_bos + store.has_eos)
    return {
        "documents": documents,
        # clusters, and documents without a cluster
        "units": len(set(clusters)) + documents - len(clusters),
        "tokens": tokens,
        "bytes": raw,
        "bytes_per_token": raw / (tokens - control) if tokens > control else None,
        "longest": int(store.lengths.max()) if documents else 0,
        "documents_at_least": {
            str(length): int((store.lengths >= length).sum()) for length in LENGTHS
        },
    }


def report_few_held_out(summary: dict[str, Any], console: Any) -> None:
    """Report the limits that too little validation text puts on evaluation, and the fix."""
    documents = summary["valid"]["documents"]
    units = summary["valid"].get("units", documents)  # not recorded by earlier versions
    if not 0 < units < FEW_BELOW:
        return
    lacks = f"flags intervals over fewer than {FEW_BELOW}"
    report = console.info
    if units < POINTS_ONLY_BELOW:
        lacks = f"has no confidence intervals with fewer than {POINTS_ONLY_BELOW}"
        report = console.warn
    what = "documents" if units == documents else "clusters"
    report(
        f"{units} {what} held out for validation: evaluation {lacks}; add documents, increase "
        "data.valid_fraction, or set data.valid_source"
    )


def show(
    summary: dict[str, Any],
    console: Any,
    splits: Sequence[str] = ("train", "valid"),
) -> None:
    """Print tables of these splits. prepared.json has the same numbers."""
    columns = [_cells(summary[name]) for name in splits]
    rows = [[title, *(column[title] for column in columns)] for title in columns[0]]
    rows = [row for row in rows if any(row[1:])]
    console.table(f"prepared {summary['label']}", ["", *splits], rows)
    for line in remarks(summary):
        console.info(line)
    if summary["lossy_documents"]:
        change = summary["tokenizer"].get("normalization")  # not recorded by earlier versions
        console.warn(
            f"{summary['lossy_documents']:,} documents are not reproduced exactly by this "
            f"tokenizer{f', which applies {change}' if change else ''}: their bits per byte are "
            "not exact"
        )


def _cells(split: dict[str, Any]) -> dict[str, str]:
    """One column of the table, by row title."""
    cells = {key: f"{split[key]:,}" for key in ("documents", "tokens", "bytes")}
    cells["bytes per token"] = (
        "-" if split["bytes_per_token"] is None else f"{split['bytes_per_token']:.3f}"
    )
    cells["longest document"] = f"{split['longest']:,}"
    for length in LENGTHS:
        count = split["documents_at_least"][str(length)]
        share = count / max(1, split["documents"])
        cells[f">= {length:,} tokens"] = f"{share:.1%} ({count:,})"
    return cells


def remarks(summary: dict[str, Any]) -> list[str]:
    lines = []
    for fault, n in summary["passed_over"].items():
        lines.append(f"skipped {n:,} documents: {fault} (such as {summary['examples'][fault]})")
    tokenizer = summary["tokenizer"]
    copies = summary["near_duplicates"]["documents"]  # null in earlier versions: not looked for
    if "bytes_used" in tokenizer:
        lines.append(
            f"tokenizer: {tokenizer['vocab_size']:,} ids, trained on "
            f"{tokenizer['bytes_used'] / 1e6:,.1f} MB of training text"
        )
    if copies:
        lines.append(
            f"near-duplicates of validation text excluded from training: {copies:,} documents"
        )
    return lines
