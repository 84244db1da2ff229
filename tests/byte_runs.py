"""Run directories of untrained models over bytes."""

from collections.abc import Sequence
from pathlib import Path

import torch

from data.data_settings import DataSettings
from data.tokenizers import ByteTokenizer
from data.tokenizers.tokenizer_settings import BytesSettings
from model import ModelSettings, Transformer
from run_directory.checkpoints import save_weights
from run_directory.run import Run
from run_directory.run_settings import RunSettings


def byte_run(
    folder: Path,
    position: dict,
    length: int = 16,
    *,
    step: int = 0,
    bos: bool = True,
    command: Sequence[str] = ("test",),
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Random weights with logits far enough apart that rounding does not change which token is
    chosen."""
    shape = ModelSettings(
        dim=16,
        layers=2,
        heads=2,
        ffn_dim=24,
        position=position,
    )
    settings = RunSettings(
        train_length=length,
        model=shape,
        data=DataSettings(tokenizer=BytesSettings(), bos=bos),
        training={"validation": {"targets": 8}},
    )
    model = Transformer(shape, 258, length).initialize(5).to(dtype)
    with torch.no_grad():
        model.head.weight.mul_(30)
        model.head.weight[256:] = 0  # control symbols would end the texts
    Run.create(folder, settings, ByteTokenizer(), list(command))
    save_weights(folder, step, model)
    return folder
