"""What every method costs against the plain decoder, and the plain decoder against LlamaForCausalLM.

    python benchmarks/decoder.py [--device cpu] [--dtype float32] [--compile] [--pairs 20] [--only NAME …] [--json FILE]

One pair is one step of the case and one of its baseline, in an order that alternates; the ratio is taken pair by pair,
its 95 % interval from order statistics. Steps: training (forward, loss, backward) and decoding (eight single tokens
after a prompt of 256 in a dynamic cache). Peak memory: of building the model and two training steps, in a
process of its own. KV bytes: what the cache has allocated for a token of the prompt. Methods are shown with their
`example`; cases with checkpointing stand against the plain decoder with checkpointing. `--only` keeps the other rows
that the file has.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.depth_attention import operators
from crosslayer.core.methods import method_class, method_names, to_entry
from crosslayer.core.transformers_versions import CACHE
from crosslayer.environment import environment
from crosslayer.machine import peak_memory
from crosslayer.stats.times import paired_ratio
from crosslayer.testing.tiny import elements

SHAPE = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
LAYERS = SHAPE["num_hidden_layers"]
PROMPT, TOKENS = 256, 8  # of a decoding step
BLOCKS = {"name": "attnres", "block": 2}  # 16 sublayers in 8 blocks


@dataclass(frozen=True)
class Case:
    """A model, and how it runs; `listed`: by the definition of attention over depth; `methods` None: Llama's own."""

    methods: tuple | None = ()
    checkpointing: bool = False
    listed: bool = False

    def build(self, options):
        """Return the model on the device."""
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)) if self.methods is None else self._ours()
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = model.to(options.device, getattr(torch, options.dtype))
        if options.compile:
            model.compile()
        return model

    def _ours(self):
        return CrossLayerForCausalLM(CrossLayerConfig(**SHAPE, cross_layer=list(self.methods or ())))

    def running(self):
        """Return the context in which the case runs."""
        return mock.patch.object(operators, "uses_definition", lambda: True) if self.listed else nullcontext()


PLAIN = "plain decoder"
CASES = {
    PLAIN: Case(),
    "LlamaForCausalLM": Case(None),
    **{name: Case((to_entry(method_class(name).example(LAYERS)),)) for name in method_names()},
    "attnres, 8 blocks": Case((BLOCKS,)),
    "attnres, listed": Case(("attnres",), listed=True),
    "attnres, 8 blocks, listed": Case((BLOCKS,), listed=True),
    "plain decoder, checkpointing": Case((), checkpointing=True),
    "attnres, checkpointing": Case(("attnres",), checkpointing=True),
    "attnres, 8 blocks, checkpointing": Case((BLOCKS,), checkpointing=True),
}


def wait(device):
    """Wait for the device, so that times are of the work and not of its launch."""
    if device == "cuda":
        torch.cuda.synchronize()


def training_step(model, ids):
    """Run forward, loss and backward; return the seconds."""
    model.train()
    model.zero_grad(set_to_none=True)
    wait(ids.device.type)
    started = time.perf_counter()
    model(ids, labels=ids, use_cache=False).loss.backward()
    wait(ids.device.type)
    return time.perf_counter() - started


@torch.no_grad()
def decoding_steps(model, ids):
    """Decode tokens after a prompt that is in the cache; return the seconds."""
    model.eval()
    cache = filled(model, ids)
    wait(ids.device.type)
    started = time.perf_counter()
    for step in range(TOKENS):
        model(ids[:1, step : step + 1], **{CACHE: cache}, use_cache=True)
    wait(ids.device.type)
    return time.perf_counter() - started


@torch.no_grad()
def filled(model, ids):
    """Return a cache that holds a prompt of one sequence."""
    cache = DynamicCache(config=model.config)
    model(ids[:1, :PROMPT], **{CACHE: cache}, use_cache=True)
    return cache


def paired(case, base, ids, options):
    """Return ratios and seconds of both steps, case over baseline."""
    models = {"case": case.build(options), "baseline": base.build(options)}
    contexts, row = {"case": case.running, "baseline": base.running}, {}
    for kind, measure in (("training", training_step), ("decoding", decoding_steps)):
        times = {"case": [], "baseline": []}
        for number in range(-2, options.pairs):
            for name in list(models) if number % 2 else list(models)[::-1]:
                with contexts[name]():
                    seconds = measure(models[name], ids)
                if number >= 0:
                    times[name].append(seconds)
        ratio = paired_ratio(times["case"], times["baseline"])
        row[kind] = {
            "ratio": ratio.value,
            "ci95": ratio.interval,
            "seconds": {name: median(entries) for name, entries in times.items()},
            "spread": {name: [min(entries), max(entries)] for name, entries in times.items()},
        }
    return row


PEAKS = {}  # by case: a baseline's is asked for again and again


def peak(name, options):
    """Return the peak memory of a case, in bytes, from a process of its own."""
    if name in PEAKS:
        return PEAKS[name]
    shared = [f"--{key}={getattr(options, key)}" for key in ("device", "dtype", "batch", "tokens")]
    flags = ["--compile"] if options.compile else []
    command = [sys.executable, __file__, "--memory", name, *shared, *flags]
    PEAKS[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return PEAKS[name]


def own_peak(case, options):
    """Return the peak memory of building a model and two training steps, in bytes."""
    ids = random_ids(options)
    with peak_memory(torch.device(options.device)) as used, case.running():
        model = case.build(options)
        for _ in range(2):
            training_step(model, ids)
    assert used.bytes is not None, used.reason
    return used.bytes


def kv_bytes(case, ids, options):
    """Return the bytes that a token takes in the cache, from what is allocated."""
    model = case.build(options).eval()
    return elements(filled(model, ids)) * next(model.parameters()).element_size() // PROMPT


VIEWS = {
    "view", "reshape", "transpose", "expand", "slice", "select", "unsqueeze", "permute", "detach", "empty",
    "as_strided", "alias", "t",
}  # fmt: skip


def kernels(case, ids, options):
    """Return how many operators do work in a forward pass: on a GPU its kernels, on a CPU leaf operators."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if options.device == "cuda" else [])
    model = case.build(options).eval()
    with torch.no_grad(), profile(activities=activities) as profiler:
        model(ids, use_cache=False)
    if options.device == "cuda":
        return sum(1 for event in profiler.events() if str(event.device_type).endswith("CUDA"))
    leaves = [e for e in profiler.events() if e.name.startswith("aten::") and not e.cpu_children]
    return sum(1 for e in leaves if e.name.removeprefix("aten::").strip("_") not in VIEWS)


def random_ids(options):
    """Return token ids (B, T)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPE["vocab_size"], (options.batch, options.tokens), generator=generator)
    return ids.to(options.device)


def measure(name, ids, options):
    """Return everything of a case, with a baseline that checkpoints where the case does."""
    case = CASES[name]
    base = f"{PLAIN}, checkpointing" if case.checkpointing else PLAIN
    torch._dynamo.reset()  # what was compiled for other cases counts towards the compiler's limit
    row = paired(case, CASES[base], ids, options)
    row["pairs"] = options.pairs
    row["baseline"], row["peak_bytes"], row["kv_bytes"] = base, peak(name, options), kv_bytes(case, ids, options)
    row["peak_ratio"] = row["peak_bytes"] / (row["peak_bytes"] if name == base else peak(base, options))
    row["kernels"] = kernels(case, ids, options) if not (case.listed or case.checkpointing or options.compile) else None
    return row


def line(name, row):
    """Return a row of the table."""
    cells = []
    for kind in ("training", "decoding"):
        low, high = row[kind]["ci95"] or (float("nan"), float("nan"))
        cells.append(f"{row[kind]['ratio']:.3f} ({low:.3f}-{high:.3f})")
    memory = f"{row['peak_ratio']:.2f} ({row['peak_bytes'] / 1e9:.2f} GB)"
    return f"| {name} | {' | '.join(cells)} | {memory} | {row['kv_bytes']} |"


def earlier(options):
    """Return the rows that the file has already, which a run of some cases leaves as they are."""
    if set(options.only) == set(CASES) or not options.json.exists():
        return {}
    rows = json.loads(options.json.read_text()).get("rows", {})
    return {name: row for name, row in rows.items() if name in CASES and "pairs" in row}


def main():
    """Run all cases, or those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", default=list(CASES))
    parser.add_argument("--memory", choices=list(CASES), metavar="NAME", help="print the peak memory of a case, alone")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "decoder.json")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # two models, training and decoding with a cache that grows
    if options.memory:
        print(own_peak(CASES[options.memory], options))
        return
    ids, rows = random_ids(options), earlier(options)
    print("| case | training step | decoding | peak memory | KV bytes per token |\n|---|---|---|---|---|")
    for name in options.only:
        rows[name] = measure(name, ids, options)
        print(line(name, rows[name]), flush=True)
    result = {
        "date": str(date.today()),
        "rows": rows,
        "shape": SHAPE,
        "options": {
            key: str(value) for key, value in vars(options).items() if key not in ("json", "memory", "only", "pairs")
        },
        **environment().model_dump(),
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
