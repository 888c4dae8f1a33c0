"""Run by the tests, in a process of its own: vLLM opens a folder and continues prompts; JSON in, JSON out."""

import errno
import json
import os
import sys


def steps(output):
    """The candidates of every step beside the token that stands there; the first token of a prompt has none."""
    if output.prompt_logprobs is not None:
        yield from zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    yield from zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)


def answer(job):
    """What vLLM makes of the prompts of a job, in a folder of its own."""
    from vllm import LLM, SamplingParams

    if job.get("full"):
        fill_disk()
    llm = LLM(job["folder"], **{**OPTIONS, **job.get("options", {})})
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    of_prompts = None if job.get("new_logprobs_alone") else 0  # those of prompts keep vLLM from reusing a prefix
    sampling = SamplingParams(
        temperature=0, max_tokens=job["new"], ignore_eos=True, logprobs=0, prompt_logprobs=of_prompts
    )
    for _ in range(job.get("times", 1)):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    found = llm.get_metrics()
    metrics = {metric.name: metric.value for metric in found if hasattr(metric, "value")}
    prefilled = sum(metric.sum for metric in found if metric.name == "vllm:request_prefill_kv_computed_tokens")
    cache = llm.llm_engine.vllm_config.cache_config
    apart = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"  # the scheduler is in another process
    sizes = {} if apart else sizes_of(llm)
    llm.llm_engine.engine_core.shutdown()
    return {
        **sizes,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [[chosen[token].logprob for chosen, token in steps(output)] for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "prefilled": prefilled,
        "kv_blocks": cache.num_gpu_blocks,
        "kv_tokens": cache.kv_cache_size_tokens,
        "metrics": metrics,
    }


def fill_disk():
    """Let no block of a prompt store be written any more, as on a full disk."""
    from crosslayer.codec.store import Files

    def write(self, path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Files.write = write


def sizes_of(llm):
    """The bytes of the cache of a request of the maximal length, by vLLM's own count, and what decides on them."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    concurrency = get_max_concurrency_for_kv_cache_config(llm.llm_engine.vllm_config, config)
    in_flight = llm.llm_engine.vllm_config.max_in_flight_tokens
    return {"requests": concurrency, "in_flight": in_flight, "groups": len(config.kv_cache_groups)}


def main() -> None:
    jobs = json.load(sys.stdin)
    answers = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints, and its processes, goes where errors go
    found = []
    for job in jobs:
        found.append(answer(job))
        if len(jobs) > 1:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
    os.write(answers, json.dumps(found).encode())


OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 64 * 2**20,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "disable_log_stats": False,  # metrics are read
}

if __name__ == "__main__":
    main()
