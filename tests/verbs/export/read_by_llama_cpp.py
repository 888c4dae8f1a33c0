"""Run by a Python that has llama-cpp-python: logits and token ids of GGUF files, in float32 on the CPU.

It reads a list of jobs as JSON, {"file", "ids", "texts"}, and answers with {"logits", "ids", "texts"} for each: logits
(T, V), the ids of each text, and the text of those ids.
"""

import json
import sys

import llama_cpp

FLOAT32 = 0  # ggml's number of the type; the cache is in float16 by default


def answer(job):
    """Return what llama.cpp says of a file."""
    model = llama_cpp.Llama(
        job["file"],
        n_ctx=max(64, len(job["ids"])),
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        flash_attn=False,
        type_k=FLOAT32,
        type_v=FLOAT32,
        verbose=False,
    )
    model.eval(job["ids"])
    ids = [model.tokenize(text.encode(), add_bos=True, special=True) for text in job["texts"]]
    # the first of several tokens loses a leading space there, so that each is asked alone
    back = [b"".join(model.detokenize([number], special=True) for number in row).decode() for row in ids]
    return {"logits": model.scores[: len(job["ids"])].tolist(), "ids": ids, "texts": back}


json.dump([answer(job) for job in json.load(sys.stdin)], sys.stdout)
