"""A run as a Hugging Face folder: configuration, weights, tokenizer, model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from data.files import write_json, write_text
from errors import InteropError
from evaluation.reports.document import markdown_table
from interop.export import generated, native
from interop.export.described import ClassChoice
from interop.export.parity import MULTIPLES, Parity, measure, parity_lengths
from interop.export.tokenizer import control_ids, write_tokenizer
from interop.extras import load_extra
from interop.huggingface.families import FAMILIES
from interop.new_folder import check_new, new_folder, space_for
from model import Transformer
from run_directory.console import Console
from run_directory.run import LoadedRun, Run
from run_directory.weights import weights_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- sextant
- text-generation
---

# {name}

A decoder of {parameters:,} parameters with the positional scheme {positions}, {origin}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER"{code})
model = AutoModelForCausalLM.from_pretrained("FOLDER"{code})
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```

{requirements}

{facts}

## Parity

Largest difference of a logit between this folder in transformers and Sextant, on random tokens, in
float32 on a CPU:

{parity}
"""
GENERATED = """The modeling file is generated from Sextant's model code and does not import Sextant:
no class of transformers represents the model ({reason}). It requires torch 2.13 and transformers
5.23 or later. Where the positions depend on the length of the sequence, `generate` uses the final
length, prompt and new tokens."""


def export_folder(
    run: LoadedRun,
    out: Path,
    *,
    dtype: str = "float32",
    multiples: Sequence[int] = MULTIPLES,
    published: bool = False,
    console: Console | None = None,
) -> ClassChoice:
    """Write a run to a new Hugging Face folder and return the class that loads it. A failed export
    leaves no folder. The model of `run` is rounded to `dtype`.

    Args:
        dtype: dtype of the stored weights, one of DTYPES.
        multiples: multiples of the trained length at which logits are compared.
        published: write the format of released models whose class transformers does not have. The
            folder has no code, and logits are not compared.

    Raises:
        InteropError: the folder exists, a package is missing, no published format represents the
            model, or logits differ beyond the tolerance.
    """
    load_extra("transformers")
    check_new(out)
    console = console or Console()
    model = run.model.to(DTYPES[dtype])
    choice = native.choose_class(model, published)
    if published and choice.model_type is None:
        raise InteropError(f"no published format represents the model: {choice.reason}")
    with space_for(weights_of(model), out), new_folder(out) as folder:
        controls = control_ids(run.tokenizer)
        write_model(model, choice, folder, controls)
        write_json(folder / "generation_config.json", _generation(run, controls))
        write_tokenizer(
            run.tokenizer, folder, add_bos=run.settings.data.bos, max_length=model.train_length
        )
        parity = []
        lengths = [] if published else parity_lengths(model, multiples)
        for result in measure(model.float(), folder, choice.model_type, lengths):
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


def write_model(
    model: Transformer, choice: ClassChoice, folder: Path, controls: dict[str, Any]
) -> None:
    """Write the files from which transformers loads a model, with weights in the model's dtype.

    Args:
        controls: entries with ids of control symbols, including null ids, because some classes have
            other defaults.
    """
    state = weights_of(model)
    if choice.model_type is None:
        config = generated.config(model)
        tensors = {f"model.{name}": weight for name, weight in state.items()}
        write_text(folder / f"{generated.MODULE}.py", generated.source(model.settings))
    else:
        config = dict(choice.config)
        tensors = native.weights(model, state, choice)
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    write_json(folder / "config.json", config | controls | {"dtype": dtype, "use_cache": True})
    save_torch_state_dict({name: tensor.contiguous() for name, tensor in tensors.items()}, folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # the library makes the files private


def _generation(run: LoadedRun, controls: dict[str, Any]) -> dict[str, Any]:
    ids = {key: value for key, value in controls.items() if value is not None}
    if "pad_token_id" not in ids and run.tokenizer.eos_id is not None:
        ids["pad_token_id"] = run.tokenizer.eos_id  # `generate` fills ended rows with it
    return ids


def model_card(run: LoadedRun, choice: ClassChoice, parity: Sequence[Parity], dtype: str) -> str:
    """README.md of the folder."""
    model = run.model
    manifest = Run(run.folder).manifest
    length = model.train_length
    original = model.original_length
    positions = model.settings.describe_positions(length, original).replace(" | ", "; ")
    attempt = (manifest.get("attempts") or [{}])[-1]
    weights = "exponential mean (EMA)" if run.weights == "ema" else "as trained"
    facts = [
        ("positional scheme", positions),
        ("trained length", f"{length:,} tokens"),
        ("original length of scaling methods", f"{original:,} tokens"),
        ("longest input", "unlimited" if model.limit is None else f"{model.limit:,} tokens"),
        ("vocabulary", f"{model.vocab_size:,} ({run.tokenizer.name})"),
        ("weights", f"step {run.step:,}, {weights}, {dtype}"),
        ("commit of the training", attempt.get("commit") or "unknown"),
    ]
    differences = [[f"{p.length:,}", f"{p.difference:.1e}", f"{p.tolerance:.1e}"] for p in parity]
    requirements = GENERATED.format(reason=choice.reason)
    if choice.model_type:
        requirements = f"The folder contains no code; its class is {choice.model_type}."
        if code := FAMILIES[choice.model_type].code:
            requirements += f" transformers does not have it: add the modeling files of {code}."
    return CARD.format(
        name=run.folder.resolve().name,
        parameters=model.parameter_count(),
        positions=positions,
        origin="imported into Sextant" if "imported_from" in manifest else "trained with Sextant",
        code="" if choice.model_type else ", trust_remote_code=True",
        requirements=requirements,
        facts=markdown_table(["", ""], [[name, value] for name, value in facts], texts=2),
        parity=markdown_table(["tokens", "difference", "tolerance"], differences, texts=0),
    )
