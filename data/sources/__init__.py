"""Text sources."""

from data.data_settings import SourceSettings, TaskSource
from data.sources.hub_source import Hub
from data.sources.local import Files, PreparedText, Stdlib
from data.sources.synthetic import Filler, TaskDocuments
from data.sources.text_source import Document, Source
from data.text_settings import TextSettings

SOURCES = {"stdlib": Stdlib, "filler": Filler, "files": Files, "hub": Hub, "prepared": PreparedText}


def open_text(settings: TextSettings, place: str) -> Source:
    """Open a source of existing text. `place` is the name of its setting, for messages."""
    return SOURCES[settings.name](settings, place)


def open_source(settings: SourceSettings, place: str = "data.source") -> Source:
    """Open any source: existing text or task items."""
    if isinstance(settings, TaskSource):
        haystack = getattr(settings.task, "haystack", None)
        text = haystack and open_text(haystack, f"{place}.task.haystack")
        return TaskDocuments(settings, place, text)
    return open_text(settings, place)


__all__ = ["SOURCES", "Document", "Source", "TaskDocuments", "open_source", "open_text"]
