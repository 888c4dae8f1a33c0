"""Attention Residuals at inference in one phase and in two, and against the plain decoder.

    OMP_NUM_THREADS=1 python benchmarks/two_phase.py [--rounds 15] [--json FILE]

*reads* are the readers of a model alone, on random sublayer outputs: from how many new tokens on two phases pay
(`FEWEST_SOURCES`, `FEWEST_ELEMENTS`). *models* are whole prompts and decoding steps, with the plain decoder of the same
shape, under the rule that the package has. One model runs both ways, in turns; times are processor time of one thread.
Ratios are taken round by round, with 95% intervals of the median from order statistics. `difference` is that of both
ways' logits, over the largest logit, in float32.
"""

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
from decoder import SHAPE, filled

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.depth_attention import two_phase
from crosslayer.core.transformers_versions import CACHE
from crosslayer.environment import environment
from crosslayer.stats.times import paired_ratio

FORMS = {"full": None, "blocks of 2": 2, "blocks of 8": 8}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
NEVER, RULE = sys.maxsize, two_phase.FEWEST_ELEMENTS  # from how many elements on there are two phases


def build(layers: int, method: dict | None) -> CrossLayerForCausalLM:
    """Return a decoder with drawn queries: zero queries would make all weights equal."""
    torch.manual_seed(0)
    method = method and {"name": "attnres", "query_init": 0.1, **method}
    return CrossLayerForCausalLM(CrossLayerConfig(**{**SHAPE, "num_hidden_layers": layers}, cross_layer=method)).eval()


def readers(model: CrossLayerForCausalLM) -> list[torch.nn.Module]:
    """Return the readers in order."""
    sites = [(layer.attn_residual, layer.mlp_residual) for layer in model.model.layers]
    return [*(reader for pair in sites for reader in pair), model.model.final_residual]


def read_all(modules: list[torch.nn.Module], outputs: list[torch.Tensor]) -> None:
    """Let each reader read, and each sublayer write an output that is given."""
    stream, carry = outputs[0], {}
    for reader, output in zip(modules, outputs[1:], strict=True):
        _, carry = reader(stream, carry)
        stream, carry = reader(stream, carry, output)


def seconds(fewest: int, run, *args, **options) -> float:
    """Return the processor time of a call, with `fewest` as the size from which reads have two phases."""
    two_phase.FEWEST_ELEMENTS = fewest
    started = time.thread_time()
    run(*args, **options)
    return time.thread_time() - started


def ratio_of(times: list[float], baseline: list[float]) -> dict:
    """Return the ratio of two rows of times as JSON."""
    ratio = paired_ratio(times, baseline)
    return {"ratio": ratio.value, "ci95": ratio.interval, "seconds": median(times)}


def interleaved(cases: dict, rounds: int) -> dict[str, list[float]]:
    """Return the times of cases (fewest elements, function, arguments), in turns, in an order that alternates."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-1, rounds):
        for name in list(cases) if number % 2 else list(cases)[::-1]:
            fewest, run, *args = cases[name]
            took = seconds(fewest, run, *args)
            if number >= 0:
                times[name].append(took)
    return times


def measure_reads(layers: int, block: int | None, tokens: int, rounds: int) -> dict:
    """Return the time of all reads in two phases, against one."""
    modules = readers(build(layers, {"block": block}))
    outputs = [torch.randn(1, tokens, SHAPE["hidden_size"]) for _ in range(len(modules) + 1)]
    repeats = max(1, 64 // tokens)

    def run() -> None:
        for _ in range(repeats):
            read_all(modules, outputs)

    times = interleaved({"one": (NEVER, run), "two": (0, run)}, rounds)
    return ratio_of(times["two"], times["one"])


def measure_model(layers: int, block: int | None, tokens: int, seen: int, rounds: int) -> dict:
    """Return the times of a pass over `tokens` after `seen` cached ones: one phase, two, and the plain decoder."""
    ids = torch.randint(0, SHAPE["vocab_size"], (1, 768), generator=torch.Generator().manual_seed(0))
    plain, model = build(layers, None), build(layers, {"block": block})

    def run(decoder, cache) -> None:
        decoder(ids[:, seen : seen + tokens], logits_to_keep=1, use_cache=bool(cache), **{CACHE: cache})
        if cache:
            cache.crop(-tokens)

    caches = [filled(one, ids[:, :seen]) if seen else None for one in (plain, model)]
    phases = {"one": NEVER, "two": RULE}
    cases = {"plain": (NEVER, run, plain, caches[0])}
    cases |= {name: (fewest, run, model, caches[1]) for name, fewest in phases.items()}
    times = interleaved(cases, rounds)
    logits = {}
    for name, two_phase.FEWEST_ELEMENTS in phases.items():
        logits[name] = model(ids[:, :tokens], use_cache=False).logits
    difference = float((logits["two"] - logits["one"]).abs().max() / logits["one"].abs().max())
    return {
        "one_over_plain": ratio_of(times["one"], times["plain"]),
        "two_over_plain": ratio_of(times["two"], times["plain"]),
        "two_over_one": ratio_of(times["two"], times["one"]),
        "difference": difference,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "two_phase.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    reads, models = {}, {}
    for layers in (8, 32):
        for form, block in FORMS.items():
            name = f"{2 * layers} sublayers, {form}"
            for tokens in TOKENS:
                found = measure_reads(layers, block, tokens, options.rounds)
                reads[f"{name}, {tokens} tokens"] = found
                print(f"reads: {name}, {tokens} tokens: {found['ratio']:.3f} {found['ci95']}", flush=True)
    for layers in (8, 32):
        for form, block in FORMS.items():
            for tokens, seen in ((1, 256), (32, 256), (512, 0)):
                name = f"{2 * layers} sublayers, {form}, {tokens} tokens after {seen}"
                models[name] = found = measure_model(layers, block, tokens, seen, options.rounds)
                print(
                    name,
                    *(f"{key} {found[key]['ratio']:.3f} {found[key]['ci95']}" for key in list(found)[:3]),
                    flush=True,
                )
    result = {"date": str(date.today()), "rounds": options.rounds, "shape": SHAPE}
    result |= {"fewest_sources": two_phase.FEWEST_SOURCES, "fewest_elements": RULE}
    result |= {"reads": reads, "models": models} | environment().model_dump()
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
