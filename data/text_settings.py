"""Where text comes from, as settings: what both a corpus and a task's haystack are read from."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Paths = str | list[str]


class Settings(BaseModel):
    """Frozen after reading; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StdlibSource(Settings):
    """The Python files of the running interpreter's standard library: on every machine, no download."""

    name: Literal["stdlib"] = "stdlib"


class FillerSource(Settings):
    """The five sentences that surround a pass key in Mohtashami and Jaggi 2023 (arXiv:2305.16300), in random
    order: text without content, made on the spot."""

    name: Literal["filler"] = "filler"


class FilesSource(Settings):
    """Files of this machine. Record files (.jsonl, .json, .parquet; .gz and .zst too) give one document a
    record; every other file is one document, or several when `separator` is set."""

    name: Literal["files"] = "files"
    path: Paths = Field(description="a folder, a file, or a list of them")
    patterns: list[str] = Field(
        ["**/*.txt", "**/*.md", "**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst", "**/*.parquet"],
        description="glob patterns of the files taken inside folders",
    )
    exclude: list[str] = Field(
        [], description="glob patterns of files left out, against the path in its folder"
    )
    separator: str | None = Field(None, description="text between documents inside one plain text file")
    text_key: str = Field("text", description="key or column of the text in record files")
    name_key: str | None = Field(None, description="key or column naming a document in record files")
    cluster_key: str | None = Field(
        None, description="key or column of what groups documents (author, series), for intervals"
    )
    manifest: str | None = Field(
        None, description="jsonl file giving `cluster_key` for text files, matched by `file` = file name"
    )

    @model_validator(mode="after")
    def _manifest_needs_key(self):
        if self.manifest is not None and self.cluster_key is None:
            raise ValueError("manifest needs cluster_key: the key of the manifest that groups documents")
        return self


class HubSource(Settings):
    """A data set through `datasets.load_dataset`: the Hugging Face hub, or local files by format name."""

    name: Literal["hub"] = "hub"
    path: str = Field(description="data set on the hub (owner/name), or a format: parquet, json, text")
    subset: str | None = Field(None, description="configuration of the data set")
    split: str = Field("train", description="split of the data set")
    revision: str | None = Field(None, description="commit or tag of the data set, for exact repetition")
    data_files: Paths | None = Field(None, description="files of the data set, or local files for a format")
    streaming: bool = Field(True, description="read over the network as needed instead of downloading first")
    text_key: str = Field("text", description="column of the text")
    name_key: str | None = Field(None, description="column naming a document")
    cluster_key: str | None = Field(None, description="column of what groups documents, for intervals")


class PreparedSource(Settings):
    """The documents of a prepared folder, spelled out again: held-out text that a further source of a mixture
    is screened for, or text to be prepared with another tokenizer."""

    name: Literal["prepared"] = "prepared"
    path: str = Field(description="folder that scripts/prepare.py has made")
    split: Literal["train", "valid"] = Field("train", description="which of its texts")


TextSettings = Annotated[
    StdlibSource | FillerSource | FilesSource | HubSource | PreparedSource, Field(discriminator="name")
]
