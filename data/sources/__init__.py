"""Where text comes from."""

from data.settings import SourceSettings, TaskSource
from data.sources.base import GENERATED, Document, Source
from data.sources.filler import Filler
from data.sources.hub import Hub
from data.sources.local import Files
from data.sources.prepared import PreparedText
from data.sources.stdlib import Stdlib
from data.sources.task import Tasks
from data.text_settings import TextSettings

SOURCES = {"stdlib": Stdlib, "filler": Filler, "files": Files, "hub": Hub, "prepared": PreparedText}


def open_text(settings: TextSettings, place: str) -> Source:
    """A source of text that was found; `place` is the setting that asks for it, for messages."""
    return SOURCES[settings.name](settings, place)


def open_source(settings: SourceSettings, place: str = "data.source") -> Source:
    """Any source: of text, or of items of a task."""
    if isinstance(settings, TaskSource):
        return Tasks(settings, place, open_text)
    return open_text(settings, place)


__all__ = ["GENERATED", "SOURCES", "Document", "Source", "open_source", "open_text"]
