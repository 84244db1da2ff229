"""Settings of text sources, for corpora and for the haystacks of tasks."""

import json
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from settings.fields import StrictSettings, counts_if_changed, setting

Paths = str | list[str]


class StdlibSource(StrictSettings):
    """Source files of the Python standard library, available without a download."""

    name: Literal["stdlib"] = "stdlib"


class FillerSource(StrictSettings):
    """The five sentences that surround a pass key in Mohtashami and Jaggi 2023 (arXiv:2305.16300),
    in random order."""

    name: Literal["filler"] = "filler"


class RecordSource(StrictSettings):
    """Base class of sources of records, with their keys or columns."""

    name: str
    text_key: str = setting("text", "key or column of the text")
    name_key: str | None = setting(None, "key or column naming a document")
    cluster_key: str | None = setting(
        None,
        "key or column that groups documents (author, series), for confidence intervals",
    )

    @property
    def columns(self) -> list[str]:
        return [key for key in (self.text_key, self.name_key, self.cluster_key) if key is not None]


class FilesSource(RecordSource):
    """Local files. Record files (.jsonl, .json, .parquet; .gz and .zst too) have one document per
    record; other files are one document, or several if `separator` is set."""

    name: Literal["files"] = "files"
    path: Paths = Field(description="a folder, a file, or a list of them")
    patterns: list[str] = setting(
        ["**/*.txt", "**/*.md", "**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst", "**/*.parquet"],
        "glob patterns of files to read in folders",
    )
    exclude: list[str] = setting([], "glob patterns of files to skip, relative to the folder")
    separator: str | None = setting(
        None,
        r"text between documents inside one plain text file; \n: line break, \t: tab",
        min_length=1,
    )
    split_bytes: int | None = counts_if_changed(
        "split documents into spans of at most this many bytes, at line breaks; null: only if the "
        "source has few, long documents, so that spans of them can be held out",
        ge=256,
        exclude_if=lambda value: value is None,
    )
    manifest: str | None = setting(
        None,
        "jsonl file giving `cluster_key` for text files, matched by `file` = file name",
    )
    max_document_bytes: int | None = counts_if_changed(
        "skip documents, and lines of record files, of more bytes than this; null: 268,435,456",
        ge=1,
        exclude_if=lambda value: value is None,
    )

    @field_validator("separator")
    @classmethod
    def _decoded(cls, separator: str | None) -> str | None:
        """Decode line breaks and tabs, which a shell passes as backslash and letter."""
        return separator and separator.replace(r"\n", "\n").replace(r"\t", "\t")

    @model_validator(mode="after")
    def _manifest_needs_key(self):
        if self.manifest is not None and self.cluster_key is None:
            raise ValueError(
                "manifest requires cluster_key, the key of the manifest that groups documents"
            )
        return self


class HubSource(RecordSource):
    """A data set through `datasets.load_dataset`: the Hugging Face hub, or local files by format
    name."""

    name: Literal["hub"] = "hub"
    path: str = Field(
        description="data set on the hub (owner/name), or a format: parquet, json, text"
    )
    subset: str | None = setting(None, "configuration of the data set")
    split: str = setting("train", "split of the data set")
    revision: str | None = setting(None, "commit or tag of the data set, for reproducibility")
    data_files: Paths | None = setting(None, "files of the data set, or local files for a format")
    streaming: bool = setting(True, "read over the network as needed instead of downloading first")


class PreparedSource(StrictSettings):
    """The documents of a prepared folder: validation text to exclude from other sources of a
    mixture, or text to prepare with another tokenizer."""

    name: Literal["prepared"] = "prepared"
    path: str = Field(description="folder created by scripts/prepare.py")
    split: Literal["train", "valid"] = setting("train", "split to read")


def with_text(overrides: list[str], path: str) -> list[str]:
    """`overrides` with one that reads the text files of a folder, or one file. It is inserted after
    the settings files and before other overrides, such as data.source.split_bytes=8192."""
    files = [word for word in overrides if "=" not in word]
    settings = [word for word in overrides if "=" in word]
    return [*files, f"data.source={json.dumps({'name': 'files', 'path': path})}", *settings]


TextSource = StdlibSource | FillerSource | FilesSource | HubSource | PreparedSource
TextSettings = Annotated[TextSource, Field(discriminator="name")]
