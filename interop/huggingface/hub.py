"""Models of the Hugging Face hub, by name."""

import re
from pathlib import Path

from errors import InteropError
from interop.checkpoint import TOKENIZERS

# Settings, weights and tokenizer at the top level; the second copy of the weights in Mistral's
# format is not needed.
WANTED = ["*.json", "*.safetensors", *TOKENIZERS]
UNWANTED = ["*/*", "consolidated*.safetensors"]
NAME = re.compile(r"(?P<name>[\w][\w.-]*(/[\w][\w.-]*)?)(@(?P<revision>[\w./-]+))?")


def download(name: str) -> Path:
    """The folder of a model in the local cache of huggingface_hub; downloads a model that is not
    cached.

    Args:
        name: name such as `Qwen/Qwen2.5-0.5B`, or with a revision `Qwen/Qwen2.5-0.5B@main`.

    Raises:
        InteropError: not a name of the hub, or the model is not cached and cannot be downloaded.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise InteropError(
            f"hf:{name}: no such folder, and not a name on the Hugging Face hub (ORG/MODEL)"
        )
    import huggingface_hub  # imported here: takes a second that local folders do not need

    try:
        return Path(
            huggingface_hub.snapshot_download(
                match["name"],
                revision=match["revision"],
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
            )
        )
    except Exception as error:  # errors of the hub, of its HTTP client, or of the file system
        reason = str(error).strip().partition("\n")[0]
        raise InteropError(
            f"hf:{name}: no such folder, and the model cannot be downloaded and is not cached "
            f"({reason}); check the name and the network, or log in with `hf auth login` if the "
            "model is gated or private"
        ) from error
