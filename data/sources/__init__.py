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


def open_text(settings: TextSettings) -> Source:
    """A source of text that was found."""
    return SOURCES[settings.name](settings)


def open_source(settings: SourceSettings) -> Source:
    """Any source: of text, or of items of a task."""
    return Tasks(settings, open_text) if isinstance(settings, TaskSource) else open_text(settings)


__all__ = ["GENERATED", "SOURCES", "Document", "Source", "open_source", "open_text"]
