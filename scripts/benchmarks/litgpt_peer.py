"""The workloads of scripts/benchmark.py in litgpt.

They run in the Python of an environment with litgpt but without this project, because litgpt pins
packages to versions that this project cannot use:

    PYTHON scripts/benchmarks/litgpt_peer.py '{"weights": FILE, "shape": {...}, "case": "train", ...}'
"""

import ctypes
import json
import os
import sys
import time

import torch
from litgpt import Config
from litgpt.generate.base import generate
from litgpt.model import GPT
from safetensors.torch import load_file


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    torch.set_flush_denormal(True)
    libc = ctypes.CDLL("libc.so.6")  # the settings of training/run/hardware.py
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 256 << 20)):
        libc.mallopt(option, value)
    if request["threads"] == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    model = build(request["shape"], load_file(request["weights"]))
    call, tokens = CASES[request["case"].split("-")[0]](model, request)
    checked = [call() for _ in range(request["warmup"])][:1]
    samples = []
    for _ in range(request["repeats"]):
        cpu = time.process_time()
        wall = time.perf_counter()
        checked.append(call())
        samples.append({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall})
    with open("/proc/self/status", encoding="utf-8") as file:
        peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    print(json.dumps({"samples": samples, "tokens": tokens, "checked": checked[0], "peak": peak}))


def build(shape: dict, weights: dict[str, torch.Tensor]) -> GPT:
    config = Config(
        block_size=shape["block_size"],
        vocab_size=shape["vocab"],
        padded_vocab_size=shape["vocab"],
        n_layer=shape["layers"],
        n_head=shape["heads"],
        n_query_groups=shape["kv_heads"],
        n_embd=shape["dim"],
        intermediate_size=shape["ffn_dim"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=shape["norm_eps"],
        mlp_class_name="LLaMAMLP",
        rope_base=10_000,
    )
    model = GPT(config)
    own = {"transformer.wte.weight": weights["model.embed_tokens.weight"]}
    own |= {
        "transformer.ln_f.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    names = {
        "norm_1": "input_layernorm",
        "attn.proj": "self_attn.o_proj",
        "norm_2": "post_attention_layernorm",
        "mlp.fc_1": "mlp.gate_proj",
        "mlp.fc_2": "mlp.up_proj",
        "mlp.proj": "mlp.down_proj",
    }
    for i in range(shape["layers"]):
        layer = f"model.layers.{i}"
        parts = [weights[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        own[f"transformer.h.{i}.attn.qkv.weight"] = torch.cat(parts)
        for name, theirs in names.items():
            own[f"transformer.h.{i}.{name}.weight"] = weights[f"{layer}.{theirs}.weight"]
    model.load_state_dict(own, strict=True)
    return model.eval()


def train(model: GPT, request: dict):
    tokens = torch.tensor(request["tokens"])
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].contiguous()
    model.max_seq_length = inputs.shape[1]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = torch.compile(model) if "compiled" in request["variant"] else model

    def step() -> list[float]:
        logits = run(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [float(loss.detach())]

    return step, targets.numel()


def prefill(model: GPT, request: dict):
    ids = torch.tensor(request["tokens"])
    count = ids.shape[1]
    vocab = request["shape"]["vocab"]
    model.max_seq_length = count
    model.set_kv_cache(batch_size=1)
    places = torch.arange(count)

    def call() -> list[float]:
        with torch.inference_mode():
            return model(ids, places)[0, -1, :: vocab // 64].tolist()

    return call, count


def decode(model: GPT, request: dict):
    prompt = torch.tensor(request["tokens"])[0]
    new = request["new"]
    model.max_seq_length = len(prompt) + new

    @torch.inference_mode()
    def call() -> list[float]:
        model.set_kv_cache(batch_size=1)
        out = generate(
            model,
            prompt,
            len(prompt) + new,
            temperature=0.0,
            include_prompt=False,
        )
        return [float(token) for token in out]

    return call, new


CASES = {"train": train, "prefill": prefill, "decode": decode}

if __name__ == "__main__":
    main()
