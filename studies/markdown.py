"""A document as Markdown, with its figures as PNG beside it."""

from __future__ import annotations

from studies.document import Block, Bullets, Cell, Code, Document, Picture, Table

EMPHASIS = {"held": "**", "broken": "**", "better": "**", "worse": "**"}


def render(document: Document) -> str:
    """The whole file; figures are looked for in `figures/`."""
    parts = [f"# {_plain(document.title)}", _plain(document.subtitle)]
    head, *rest = [_plain(line) for line in document.lead] or [""]
    parts += [f"**{head}**" if head else "", *rest]
    for section in document.sections:
        parts.append(f"## {_plain(section.title)}")
        parts += [_block(block) for block in section.blocks]
    files = ", ".join(f"[{name}]({name}) ({what})" for name, what in document.downloads)
    parts.append(f"Beside this file: {files}." if files else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> str:
    match block:
        case str():
            return _plain(block)
        case Bullets():
            return "\n".join(
                f"- {f'**{_plain(name)}**: ' if name else ''}{_plain(text)}" for name, text in block.items
            )
        case Code():
            return f"```\n{block.text}\n```"
        case Picture():
            return f"![{_plain(block.alt)}](figures/{block.name}.png)\n\n*{_plain(block.caption)}*"
        case Table():
            return _table(block)


def _table(table: Table) -> str:
    columns = [_plain(name) or " " for name in table.columns]
    lines = [f"**{_plain(table.title)}**", ""]
    lines.append(f"| {' | '.join(columns)} |")
    lines.append("|" + "|".join("---:" if n >= table.numbers else "---" for n in range(len(columns))) + "|")
    for row in table.rows:
        cells = [one if isinstance(one, Cell) else Cell(one) for one in row]
        words = [f"{mark}{_plain(c.text)}{mark}" for c in cells for mark in (EMPHASIS.get(c.tone, ""),)]
        lines.append(f"| {' | '.join(words)} |")
    if table.note:
        lines += ["", f"*{_plain(table.note)}*"]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """No word is markup by accident."""
    for sign in ("\\", "|", "*", "_", "`", "<", "["):
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
