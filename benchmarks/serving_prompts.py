"""Times the first token in vLLM: prefill, a prompt store, and vLLM's own connector that stores raw caches; writes JSON.

    python benchmarks/serving_prompts.py smollm2 codec --lengths 512,2048 --out benchmarks/results/serving_prompts.json

A codec is a folder that `crosslayer fit-codec MODEL --out FOLDER` wrote. Each way has an engine of its own in a process
of its own, without vLLM's prefix cache. Every prompt runs twice with one new token: the first time it is computed, and
stored where there is a store; the second time it is loaded. The ways take turns, prompt by prompt.

On a GPU, `--ways prefill,codec,tier` compares with vLLM's own tier of files instead. That tier lies behind one in the
memory of the host, which is so small here that another prompt displaces the first before it is loaded.
"""  # noqa: E501

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WAYS = ("prefill", "codec", "raw", "tier")
QUIET = 4  # seconds without a change: the thread that encodes 2,048 tokens writes its first block after one or two


def transfer(way: str, source: str, folder: str, store: str, dtype: str, length: int) -> dict | None:
    """What vLLM is told of a way to keep prompts of at most `length` tokens."""
    import crosslayer
    from crosslayer.codec.codec import load_codec
    from crosslayer.models.load import load_config
    from crosslayer.verbs.serve import prompts

    if way == "prefill":
        return None
    if way == "raw":
        extra = {"shared_storage_path": store}
        return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if way == "tier":
        one_prompt = crosslayer.plan(source, length=length, dtype=dtype, engine="vllm").headline()["stored_bytes"]
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": one_prompt,
            "secondary_tiers": [{"type": "fs", "root_dir": store}],
        }
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    codec = load_codec(folder)
    prompts.check_weights(codec, source, load_config(source))
    return prompts.transfer_config(codec, folder, store, None)


def serve_one_way(way: str, source: str, folder: str, dtype: str, length: int, eager: bool) -> None:
    """Answer lines of token ids with seconds to the first token, and tokens that were not computed."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints goes where errors go
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as store:
        told = transfer(way, source, folder, store, dtype, length + 32)
        options = {} if told is None else {"kv_transfer_config": told}
        llm = LLM(
            source,
            dtype=dtype,
            enforce_eager=eager,
            max_model_len=length + 32,
            max_num_batched_tokens=length + 32,
            max_num_seqs=1,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            **options,
        )
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        os.write(answers, b"ready\n")
        for line in sys.stdin:
            started = time.perf_counter()
            (output,) = llm.generate([{"prompt_token_ids": json.loads(line)}], sampling, use_tqdm=False)
            took = time.perf_counter() - started
            stored = sum(path.stat().st_size for path in Path(store).rglob("*") if path.is_file())
            answer = {"seconds": took, "cached": output.num_cached_tokens, "bytes": stored}
            os.write(answers, json.dumps(answer).encode() + b"\n")


def measure(
    name: str, folder: str, ways: list[str], lengths: list[int], repeats: int, dtype: str, eager: bool
) -> list[dict]:
    from crosslayer.corpus.domains import embedded_domains, split_domains
    from crosslayer.models.load import load_tokenizer, model_source
    from crosslayer.stats.times import paired_ratio

    parts = {"text": {"speeches": repeats + 1}}
    texts = embedded_domains(["speeches"])
    ids = split_domains(texts, load_tokenizer(name), parts=parts, length=max(lengths))["text"].ids.tolist()
    source = model_source(name)
    engines = {way: start(way, source, folder, dtype, max(lengths), eager) for way in ways}
    rows, held = [], dict.fromkeys(ways, 0)
    for length in lengths:
        times: dict[tuple[str, str], list[float]] = {}
        cached, sizes = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
        for turn in range(repeats + 1):  # the first is not counted
            for way, engine in engines.items():
                prompt = [turn + 3, *ids[turn][1:length]]  # prompts of different lengths share no prefix
                prompt[1] = length % 1000 + 3
                first = ask(engine, prompt)
                stored = settled(engine)
                ask(engine, [prompt[0] + 1000, *prompt[1:]])  # takes the place of the first in a tier in memory
                after = settled(engine)
                second = ask(engine, prompt)
                cached[way], sizes[way], held[way] = second["cached"], stored - held[way], after
                if turn:
                    times.setdefault((way, "first"), []).append(first["seconds"])
                    times.setdefault((way, "second"), []).append(second["seconds"])
        row = {
            "model": Path(name).name,
            "dtype": dtype,
            "eager": eager,
            "tokens": length,
            "repeats": repeats,
            "cached": cached,
            "bytes": sizes,
        }
        for (way, run), took in times.items():
            shown = {"median": float(np.median(took)), "low": min(took), "high": max(took)}
            row[f"{way}_{run}"] = shown
            if way != "prefill":
                shown["over_prefill"] = paired_ratio(took, times["prefill", "second"]).model_dump()
        rows.append(row)
        print(length, {key: round(value["median"], 4) for key, value in row.items() if "_" in key}, cached, flush=True)
    for engine in engines.values():
        engine.stdin.close()
        engine.wait()
    return rows


def start(way: str, source: str, folder: str, dtype: str, length: int, eager: bool) -> subprocess.Popen:
    words = [sys.executable, __file__, source, folder, "--way", way, "--dtype", dtype, "--lengths", str(length)]
    # GiB of each engine; on a CPU all compute on the same cores, as `crosslayer serve` lets them
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **own, **os.environ}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    engine = subprocess.Popen(words + ["--eager"] * eager, env=env, **pipes)
    if engine.stdout.readline() != "ready\n":
        raise SystemExit(f"the engine of {way} did not start")
    return engine


def ask(engine: subprocess.Popen, prompt: list[int]) -> dict:
    engine.stdin.write(json.dumps(prompt) + "\n")
    engine.stdin.flush()
    return json.loads(engine.stdout.readline())


def settled(engine: subprocess.Popen) -> int:
    """Wait until nothing more is written, by a thread of the store after the first token; return the bytes stored."""
    before, quiet = -1, 0
    while quiet < QUIET:
        now = ask(engine, [3, 4])["bytes"]
        quiet = quiet + 1 if now == before else 0
        before = now
        time.sleep(1)
    return before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("codec", help="its folder")
    parser.add_argument("--ways", default="prefill,codec,raw", help="of prefill, codec, raw, and on a GPU tier")
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a process for one engine
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    if given.way:
        serve_one_way(given.way, given.model, given.codec, given.dtype, max(lengths), given.eager)
        return
    from crosslayer.environment import environment

    started = time.time()
    rows = measure(given.model, given.codec, given.ways.split(","), lengths, given.repeats, given.dtype, given.eager)
    record = {"rows": rows, "seconds": round(time.time() - started, 1), "environment": environment().model_dump()}
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
