"""The model card of an exported run."""

from collections.abc import Sequence

from evaluation.reports.document import markdown_table
from interop.export.described import ClassChoice
from interop.export.parity import Parity
from run_directory.run import LoadedRun, Run

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
