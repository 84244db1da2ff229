"""llama.cpp in a process of its own, since its assertions abort. Reads a list of jobs, writes arrays.

Usage: python llama_cpp_runner.py JOBS.json OUT.npz. A job is {"file", "ids", "new", "texts", "length"}: the
logits of `ids`, `new` greedy tokens after them, and the ids of `texts`; either part may be absent.
"""

import json
import sys

import llama_cpp
import numpy as np

FLOAT32 = 0  # of the cache, so that the result does not depend on rounding to float16
QUIET = llama_cpp.llama_log_callback(lambda *_: None)


def main(jobs_file: str, out_file: str) -> None:
    llama_cpp.llama_log_set(QUIET, None)
    found = {}
    with open(jobs_file) as file:
        jobs = json.load(file)
    for number, job in enumerate(jobs):
        has_weights = "ids" in job
        options = {"n_ctx": job.get("length", 512), "type_k": FLOAT32, "type_v": FLOAT32, "n_threads": 1}
        llm = llama_cpp.Llama(
            job["file"], logits_all=has_weights, vocab_only=not has_weights, verbose=False, **options
        )
        if has_weights:
            ids = list(job["ids"])
            llm.eval(ids)
            found[f"logits{number}"] = np.array(llm.scores[: len(ids)])
            for _ in range(job.get("new", 0)):
                ids.append(int(np.argmax(llm.scores[len(ids) - 1])))
                llm.eval(ids[-1:])
            found[f"greedy{number}"] = np.array(ids[len(job["ids"]) :])
        for i, text in enumerate(job.get("texts", [])):
            ids = llm.tokenize(text.encode(), add_bos=False, special=False)
            found[f"text{number}-{i}"] = np.array(ids, dtype=np.int64)
            back = llm.detokenize(ids).decode(errors="replace")
            found[f"back{number}-{i}"] = np.frombuffer(back.encode(), dtype=np.uint8)
        if texts := job.get("texts"):
            begins = llm.tokenize(texts[0].encode(), add_bos=True)[:1]
            found[f"first{number}"] = np.array(begins, dtype=np.int64)
        llm.close()
    np.savez(out_file, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
