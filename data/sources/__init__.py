"""Where text comes from."""

from data.settings import FilesSource, HubSource, StdlibSource
from data.sources.base import Document, Source
from data.sources.hub import Hub
from data.sources.local import Files
from data.sources.stdlib import Stdlib

SOURCES = {"stdlib": Stdlib, "files": Files, "hub": Hub}


def open_source(settings: StdlibSource | FilesSource | HubSource) -> Source:
    return SOURCES[settings.name](settings)


__all__ = ["SOURCES", "Document", "Source", "open_source"]
