"""Speed of preparing text and of reading batches, by wall time, each measurement in its own
process.

python scripts/benchmarks/data_speed.py '{"case": "preparing", "variant": "naive", ...}'
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data import BatchSampler, DataSettings, open_prepared, prepare
from data.files import atomic
from data.sampling.segments import Segment
from data.tokenizers import load_tokenizer, saved_settings
from training.batches import read_ahead
from training.hardware import peak_memory

ROWS = 8
LENGTH = 512
STEPS = 500
CONSUMER = 1_000_000  # tokens/s
WORDS = 20_000


@dataclass(frozen=True)
class DataWorkload:
    """What one process measures.

    Attributes:
        case: ``tokenizer`` (prepares `source` and trains the tokenizer that the others use),
            ``preparing`` or ``loading``.
        variant: of ``preparing``: ``ours`` or ``naive``.
        source: a file of `write_text_file`.
        root: folder to write to. ``loading`` reads the prepared folder in it.
        tokenizer: folder of the tokenizer.
    """

    case: str
    variant: str
    source: str
    root: str
    tokenizer: str = ""


def write_text_file(path: Path, megabytes: int) -> None:
    """Documents of about 2 KB of words with Zipf's frequencies, one in a line of JSON."""
    draw = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(draw.choice(letters, size=n)) for n in draw.integers(2, 10, WORDS)]
    rates = 1 / np.arange(1, WORDS + 1)
    rates /= rates.sum()
    with atomic(path) as file:
        written = 0
        while written < megabytes << 20:
            for picks in draw.choice(WORDS, size=(256, 300), p=rates):
                line = json.dumps({"text": " ".join(words[i] for i in picks)}) + "\n"
                written += file.write(line.encode())


def tokenizer(work: DataWorkload) -> dict[str, Any]:
    prepared = prepare(settings(work, {"name": "sentencepiece", "vocab_size": 4096}))
    return {"folder": str(prepared.folder)}


def settings(work: DataWorkload, tokenizer: Any) -> DataSettings:
    source = {"name": "files", "path": work.source}
    return DataSettings.model_validate(
        {"root": work.root, "source": source, "tokenizer": tokenizer}
    )


def preparing(work: DataWorkload) -> dict[str, Any]:
    if work.variant == "ours":
        prepared = prepare(settings(work, saved_settings(Path(work.tokenizer))))
        return {
            "tokens": prepared.train.n_tokens + prepared.valid.n_tokens,
            "folder": str(prepared.folder),
        }
    encoder = load_tokenizer(Path(work.tokenizer))
    ids = []
    with open(work.source, encoding="utf-8") as file:
        for line in file:
            ids += [encoder.bos_id, *encoder.encode(json.loads(line)["text"]), encoder.eos_id]
    np.array(ids, dtype=np.uint16).tofile(Path(work.root) / "naive.bin")
    return {"tokens": len(ids)}


def loading(work: DataWorkload) -> dict[str, Any]:
    """Batches of packed documents for a consumer of CONSUMER tokens/s."""
    prepared = open_prepared(Path(work.root))
    batches = BatchSampler(
        prepared.train, [Segment(LENGTH, ROWS, STEPS)], packing="intra_document", seed=0
    )
    reader = read_ahead(batches.batch, 0, STEPS)
    next(reader)
    begin = time.perf_counter()
    waited = 0.0
    tokens = 0
    for _ in range(STEPS - 1):
        time.sleep(ROWS * LENGTH / CONSUMER)
        asked = time.perf_counter()
        tokens += next(reader).tokens.numel()
        waited += time.perf_counter() - asked
    return {"tokens": tokens, "waited": waited / (time.perf_counter() - begin)}


CASES = {"tokenizer": tokenizer, "preparing": preparing, "loading": loading}


def main() -> None:
    work = DataWorkload(**json.loads(sys.argv[1]))
    begin = time.perf_counter()
    record = CASES[work.case](work)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "peak": peak_memory(torch.device("cpu")), **record}))


if __name__ == "__main__":
    main()
