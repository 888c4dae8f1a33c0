"""Run by the tests, in a process of its own: vLLM opens a folder and continues prompts; JSON in, JSON out."""

import json
import os
import sys


def steps(output):
    """The candidates of every step beside the token that stands there; the first token of a prompt has none."""
    yield from zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    yield from zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)


def main() -> None:
    job = json.load(sys.stdin)
    answers = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints, and its processes, goes where errors go
    from vllm import LLM, SamplingParams

    llm = LLM(job["folder"], **{**OPTIONS, **job["options"]})
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True, logprobs=0, prompt_logprobs=0)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    cache = llm.llm_engine.vllm_config.cache_config
    answer = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [[chosen[token].logprob for chosen, token in steps(output)] for output in outputs],
        "blocks": cache.num_gpu_blocks,
        "tokens_held": cache.kv_cache_size_tokens,
        "block_size": cache.block_size,
    }
    os.write(answers, json.dumps(answer).encode())


OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 64 * 2**20,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,  # prompt_logprobs asks for the prompt to be computed
}

if __name__ == "__main__":
    main()
