"""A run as a Hugging Face folder: configuration, weights, tokenizer, model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from data.files import write_json, write_text
from errors import InteropError
from interop.export.card import model_card
from interop.export.classes import choose_class
from interop.export.described import ClassChoice
from interop.export.files import check_new, new_folder, space_for, write_model
from interop.export.parity import MULTIPLES, measure, parity_lengths
from interop.export.tokenizer import control_ids, write_tokenizer
from interop.extras import load_extra
from run_directory.console import Console
from run_directory.run import LoadedRun
from run_directory.weights import weights_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_folder(
    run: LoadedRun,
    out: Path,
    *,
    dtype: str = "float32",
    multiples: Sequence[int] = MULTIPLES,
    console: Console | None = None,
) -> ClassChoice:
    """Write a run to a new Hugging Face folder, and return the class that loads it; nothing is left
    if that fails. The model of `run` is rounded to `dtype`.

    Args:
        dtype: of the stored weights, one of DTYPES.
        multiples: multiples of the trained length at which logits are compared.

    Raises:
        InteropError: the folder exists, a package is missing, or logits differ beyond the
            tolerance.
    """
    load_extra("transformers")
    check_new(out)
    console = console or Console()
    model = run.model.to(DTYPES[dtype])
    choice = choose_class(model)
    with space_for(weights_of(model), out), new_folder(out) as folder:
        controls = control_ids(run.tokenizer)
        write_model(model, choice, folder, controls)
        write_json(folder / "generation_config.json", _generation(run, controls))
        write_tokenizer(
            run.tokenizer, folder, add_bos=run.settings.data.bos, max_length=model.train_length
        )
        parity = []
        for result in measure(
            model.float(), folder, choice.model_type, parity_lengths(model, multiples)
        ):
            console.info(
                f"{result.length:,} tokens: logits differ by at most {result.difference:.1e} "
                f"(tolerance {result.tolerance:.1e})"
            )
            if not result.is_met:
                raise InteropError(
                    f"{out} was not written: at {result.length:,} tokens its logits in "
                    f"transformers differ from ours by {result.difference:.1e}, more than "
                    f"{result.tolerance:.1e}; report this with the run's settings.yaml"
                )
            parity.append(result)
        write_text(folder / "README.md", model_card(run, choice, parity, dtype))
    return choice


def _generation(run: LoadedRun, controls: dict[str, Any]) -> dict[str, Any]:
    ids = {key: value for key, value in controls.items() if value is not None}
    if "pad_token_id" not in ids and run.tokenizer.eos_id is not None:
        ids["pad_token_id"] = run.tokenizer.eos_id  # `generate` fills ended rows with it
    return ids
