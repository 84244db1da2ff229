"""Runs in a process of its own, where transformers is installed and this repository is not on the
path.

Loads every folder in argv[1], repeats what its reference.safetensors records, and prints the
differences as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def compare(folder: Path) -> dict:
    reference = load_file(folder / "reference.safetensors")
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    model.eval()
    ids = reference["ids"]
    mask = reference["mask"]
    prompt = int(reference["prompt"])
    new = reference["greedy"].shape[1]
    with torch.no_grad():
        plain = model(ids).logits
        # As `generate` does; not all classes derive positions from the mask.
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        padded = model(ids, attention_mask=mask, position_ids=position_ids).logits
        last = model(ids, logits_to_keep=3).logits
        loss = model(ids, labels=ids).loss

    def greedy(**options) -> torch.Tensor:
        out = model.generate(
            ids[:, :prompt], max_new_tokens=new, do_sample=False, pad_token_id=0, **options
        )
        return out[:, prompt:]

    nll = torch.nn.functional.cross_entropy(
        reference["plain"][:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    return {
        "wrong_weights": [key for key in ("missing_keys", "unexpected_keys") if info[key]],
        "class": type(model).__name__,
        "plain": float((plain - reference["plain"]).abs().max()),
        "padded": float((padded - reference["padded"])[mask.bool()].abs().max()),
        "last": float((last - plain[:, -3:]).abs().max()),
        "loss": float((loss - nll).abs()),
        "greedy": greedy().tolist(),
        "ragged": greedy(attention_mask=mask[:, :prompt]).tolist(),
    }


assert not {"model", "interop", "errors"} & sys.modules.keys()
found = {folder.name: compare(folder) for folder in sorted(Path(sys.argv[1]).iterdir())}
assert not {"model", "interop", "errors"} & sys.modules.keys()
print(json.dumps(found))
