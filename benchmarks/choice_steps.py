"""A decoding step, and a prompt, with chosen tokens against the full cache.

    python benchmarks/choice_steps.py [--loads 8192x4 2048x1] [--tokens 512] [--pairs 20] [--json FILE]

One pair is a step of the plain decoder and one of the same weights with chosen tokens, in alternating order; both
read a cache of the given length, filled with the states of a short text, repeated. The ratio is taken pair by pair, its
95 % interval from order statistics. Prompts of at most 4,096 tokens are timed in the same way, in six pairs. The wiring
is that which the search chose on smollm2 at a quarter of the reads (docs/evidence/README.md), or every fourth
layer as a chooser for models of other depths.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache

from crosslayer import load_model
from crosslayer.core.decoder.convert import plain_decoder
from crosslayer.core.methods.shared_choice import SharedChoice
from crosslayer.core.transformers_versions import CACHE
from crosslayer.environment import environment
from crosslayer.stats.times import paired_ratio
from crosslayer.verbs.retrofit.convert import convert

SEARCHED = "orrrarrarrrrrrorrorrorrrrrrrrr"  # a: attends to all tokens, o: to its own choice, r: to another layer's
PROMPT = 64  # tokens of the text
PROMPT_PAIRS, LONGEST_PROMPT = 6, 4096


def method_of(kinds, tokens):
    """Return the method of what layers attend to."""
    groups = []
    for layer, kind in enumerate(kinds):
        groups = [*groups[:-1], [*groups[-1], layer]] if kind == "r" else [*groups, [layer]]
    groups = tuple(tuple(group) for group in groups if len(group) > 1 or kinds[group[0]] == "o")
    return SharedChoice(groups=groups, tokens=tokens, sparse_choosers=tuple(i for i, k in enumerate(kinds) if k == "o"))


def filled(model, ids, length):
    """Return a cache of `length` tokens: the states of ids (B, T), repeated."""
    short, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids, **{CACHE: short}, use_cache=True, logits_to_keep=1)
    for index, layer in enumerate(short.layers):
        states = [state.repeat(1, 1, length // PROMPT, 1) for state in (layer.keys, layer.values)]
        cache.update(*states, index)
    return cache


def measure(models, batch, length, pairs):
    """Return seconds of a step, (pairs,) of each model."""
    ids = torch.randint(10, 10_000, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
    caches = [filled(model, ids, length) for model in models]
    times = [[], []]
    for pair in range(pairs + 2):  # two to warm up
        for side in (0, 1) if pair % 2 else (1, 0):
            start = time.perf_counter()
            models[side](ids[:, :1], **{CACHE: caches[side]}, use_cache=True)
            times[side].append(time.perf_counter() - start)
            caches[side].crop(-1)
    return [side[2:] for side in times]


def measure_prompt(models, batch, length):
    """Return seconds of a prompt, (PROMPT_PAIRS,) of each model."""
    ids = torch.randint(10, 10_000, (batch, length), generator=torch.Generator().manual_seed(0))
    times = [[], []]
    for pair in range(PROMPT_PAIRS + 1):  # one to warm up
        for side in (0, 1) if pair % 2 else (1, 0):
            start = time.perf_counter()
            models[side](ids, use_cache=True, logits_to_keep=1)
            times[side].append(time.perf_counter() - start)
    return [side[1:] for side in times]


@torch.no_grad()
def main():
    """Measure and print every load."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--loads", nargs="+", default=["8192x4", "2048x1"], help="tokens x sequences")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loaded, _ = load_model(options.model, dtype="float32")
    layers = loaded.config.num_hidden_layers
    kinds = SEARCHED if layers == len(SEARCHED) else "".join("r" if layer % 4 else "a" for layer in range(layers))
    method = method_of(kinds, float(options.tokens))
    models = [plain_decoder(loaded).eval(), convert(loaded, [method], share_weights=True).model.eval()]
    rows = []
    for load in options.loads:
        length, batch = map(int, load.split("x"))
        plain, chosen = measure(models, batch, length, options.pairs)
        ratio = paired_ratio(chosen, plain)
        row = {"tokens": length, "sequences": batch, "ratio": ratio.value, "interval": ratio.interval}
        row |= {"plain_seconds": median(plain), "chosen_seconds": median(chosen)}
        row["reads"] = models[1].config.plan.read_states(length) / (2 * layers)
        rows.append(row)
        if length <= LONGEST_PROMPT:
            plain_prompt, chosen_prompt = measure_prompt(models, batch, length)
            prompt = paired_ratio(chosen_prompt, plain_prompt)
            row |= {"prompt_ratio": prompt.value, "prompt_interval": prompt.interval}
            print(f"{load}: a prompt {prompt.text()} of {median(plain_prompt):.2f} s")
        times = f"{ratio.text()} of {median(plain):.3f} s"
        print(f"{load}: {times}, {row['reads']:.0%} of the reads", flush=True)
    if options.json:
        facts = {"date": str(date.today()), "environment": environment().model_dump(), "kinds": kinds}
        options.json.write_text(json.dumps({**facts, "chosen": options.tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
