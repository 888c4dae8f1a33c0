"""Time and peak memory of a diagnosis against one plain forward pass, and against two other ways to the same measures.

    python benchmarks/diagnose.py [--length 2048] [--repeats 5] [--long 8192] [--lens PYTHON] [--json FILE]

Sides: `plain`, one SDPA forward with logits; `crosslayer`, `crosslayer.diagnose`; `eager maps`, the same measures
from `output_attentions=True`; `TransformerLens`, the same from its cached activations (`--lens` names a Python that
has it, if this one has not). Times: the sides interleaved in one process (TransformerLens in a second one, beside its
own plain side), medians with minimum and maximum, ratios to the plain side repeat by repeat. Memory: each side in a
process of its own, peak resident set.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch

import crosslayer
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import packed
from crosslayer.environment import environment
from crosslayer.probe import measures as m

HERE = Path(__file__).resolve()


def measures_of_full_maps(maps, values, streams, attention_updates, mlp_updates):
    """Take all measures from whole maps, list of (H, S, S), the way most scripts do."""
    columns = torch.stack([heads.sum((0, 1)) for heads in maps])
    shares = m.importance(columns)
    mean = torch.stack([heads.mean(0) for heads in maps])  # (L, S, S)
    flat, rest = mean.flatten(1), mean[:, :, 1:].flatten(1)
    by_head = torch.stack([torch.stack([heads[h].flatten() for heads in maps]) for h in range(len(maps[0]))])
    return {
        "first_token_share": shares[:, 0],
        "entropy": m.entropy(shares),
        "top_importance": m.top_importance(shares),
        "sink_rate": torch.stack([(heads[:, :, 0].mean(1) > 0.3).float().mean() for heads in maps]),
        "map_similarity": m.gram_cosine(flat @ flat.T),
        "map_similarity_without_first": m.gram_cosine(rest @ rest.T),
        "map_similarity_per_head": m.gram_cosine(by_head @ by_head.transpose(1, 2)).mean(0),
        "value_norm_ratio": torch.stack([m.over_median(m.value_norms(v)) for v in values]),
        "value_spectrum": torch.stack([m.value_spectrum(v) for v in values]),
        "hidden_norm_ratio": torch.stack([m.over_median(m.hidden_norms(x)) for x in streams[:-1]]),
        "stream_norm": torch.stack([m.hidden_norms(x).mean() for x in streams[:-1]]),
        "token_similarity": torch.stack([m.token_similarity(x) for x in streams[:-1]]),
        "layer_io_similarity": torch.stack([m.mean_cosine(x, y) for x, y in zip(streams, streams[1:], strict=False)]),
        "attention_io_similarity": torch.stack(
            [m.mean_cosine(x, x + u) for x, u in zip(streams, attention_updates, strict=False)]
        ),
        "mlp_l1_l2": torch.stack([m.l1_over_l2(u)[0] for u in mlp_updates]),
    }


def plain(model, ids):
    """Run a forward pass with logits."""
    return model(input_ids=ids, use_cache=False).logits[0, -1, 0]


def ours(model, ids):
    """Run the diagnosis."""
    return crosslayer.diagnose(model, ids)


def eager_maps(model, ids):
    """Take the measures from `output_attentions=True`."""
    layers, kept = model.model.layers, {"v": [], "attention": [], "mlp": [], "last": []}
    model.set_attn_implementation("eager")

    def keep(what):
        return lambda _, args, output: kept[what].append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.self_attn.v_proj.register_forward_hook(keep("v")) for layer in layers]
    hooks += [layer.self_attn.register_forward_hook(keep("attention")) for layer in layers]
    hooks += [layer.mlp.register_forward_hook(keep("mlp")) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(keep("last")))
    try:
        outputs = model(input_ids=ids, use_cache=False, output_attentions=True, output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation("sdpa")
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    streams = [x[0] for x in (*outputs.hidden_states[:-1], *kept["last"])]
    values = [v[0].view(-1, heads, size).transpose(0, 1) for v in kept["v"]]
    maps = [batch[0] for batch in outputs.attentions]  # (H, S, S) each
    return measures_of_full_maps(maps, values, streams, [u[0] for u in kept["attention"]], [u[0] for u in kept["mlp"]])


def lens(bridge, ids):
    """Take the measures from TransformerLens' cached activations."""
    wanted = ("hook_pattern", "hook_resid_pre", "hook_resid_post", "attn.hook_v", "hook_attn_out", "hook_mlp_out")
    _, cache = bridge.run_with_cache(ids, names_filter=lambda name: name.endswith(wanted))
    count = bridge.cfg.n_layers

    def each(name):
        return [cache[name, i][0] for i in range(count)]

    streams = [*each("resid_pre"), cache["resid_post", count - 1][0]]
    values = [v.transpose(0, 1) for v in each("v")]
    return measures_of_full_maps(each("pattern"), values, streams, each("attn_out"), each("mlp_out"))


def build(side):
    """Return the model that a side runs on."""
    model, tokenizer = crosslayer.load_model("smollm2", device="cpu")
    if side != "lens":
        return model, tokenizer
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(
        "HuggingFaceTB/SmolLM2-135M-Instruct", hf_model=model, tokenizer=tokenizer, dtype=torch.float32
    ), tokenizer


SIDES = {"plain": plain, "crosslayer": ours, "eager maps": eager_maps, "lens": lens}


@torch.no_grad()
def times(sides, length, repeats):
    """Return seconds of each side, interleaved repeats after a warm-up."""
    _, tokenizer = crosslayer.load_model("smollm2", device="cpu")
    ids = packed(load_documents(TextSource()), tokenizer, sequences=1, length=length).ids
    models = {side: build(side)[0] for side in sides}
    seconds = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        for side in sides:
            started = time.perf_counter()
            SIDES[side](models[side], ids)
            if repeat:
                seconds[side].append(time.perf_counter() - started)
    return seconds


@torch.no_grad()
def peak(side, length):
    """Return the peak resident set of a run of a side in this process, in bytes, and its seconds."""
    model, tokenizer = build(side)
    ids = packed(load_documents(TextSource()), tokenizer, sequences=1, length=length).ids
    started = time.perf_counter()
    SIDES[side](model, ids)
    return {"bytes": peak_resident(), "seconds": time.perf_counter() - started}


def peak_resident():
    """Return the peak resident set in bytes; ru_maxrss would begin at the parent's on Linux."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(x.split()[1]) * 1024 for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def child(python, *arguments):
    """Run this script in a process of its own and return what it prints."""
    try:
        done = subprocess.run([python, str(HERE), *arguments], capture_output=True, text=True)
    except OSError as error:
        print(error, file=sys.stderr)
        return None
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(name, seconds, reference, memory, base):
    """Return a row of the table."""
    ratios = [a / b for a, b in zip(seconds, reference, strict=True)]
    return {
        "side": name,
        "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "peak_mb": memory / 1e6,
        "over_plain_mb": (memory - base) / 1e6,
    }


def main():
    """Run everything, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--long", type=int, default=8192, help="a further diagnosis at this length, 0 for none")
    parser.add_argument("--lens", default=sys.executable, help="Python of an environment with transformer-lens")
    parser.add_argument("--json", type=Path, default=HERE.parent / "results" / "diagnose.json")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, *rest = options.child
        result = peak(rest[0], int(rest[1])) if what == "peak" else times(["plain", "lens"], int(rest[0]), int(rest[1]))
        print(json.dumps(result))
        return

    seconds = times(["plain", "crosslayer", "eager maps"], options.length, options.repeats)
    memory = {side: child(sys.executable, "--child", "peak", side, str(options.length)) for side in seconds}
    base = memory["plain"]["bytes"]
    rows = [row(side, seconds[side], seconds["plain"], memory[side]["bytes"], base) for side in seconds]
    other = child(options.lens, "--child", "times", str(options.length), str(options.repeats))
    if other is not None:
        used = child(options.lens, "--child", "peak", "lens", str(options.length))
        rows.append(row("TransformerLens", other["lens"], other["plain"], used["bytes"], base))
    print("| side | time ÷ plain (min-max) | median seconds | peak memory | over plain |\n|---|---|---|---|---|")
    for side in rows:
        ratio, median = side["ratio"], side["seconds"]["median"]
        spread = f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"
        print(
            f"| {side['side']} | {spread} | {median:.2f} | {side['peak_mb']:.0f} MB | {side['over_plain_mb']:+.0f} MB |"
        )
    result = {"date": str(date.today()), "length": options.length, "repeats": options.repeats, "rows": rows}
    if options.long:
        result["long"] = {
            "length": options.long,
            **child(sys.executable, "--child", "peak", "crosslayer", str(options.long)),
        }
        long = result["long"]
        print(f"diagnosis of 1 × {options.long}: {long['seconds']:.1f} s, peak memory {long['bytes'] / 1e6:.0f} MB")
    result |= environment().model_dump()
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
