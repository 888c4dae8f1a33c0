"""Training steps, prompts and decoding steps of models in a real shape, with random weights, in turns.

    python benchmarks/gpu/steps.py training --json FILE [--dry-run]
    python benchmarks/gpu/steps.py serving --json FILE [--dry-run]

training: Attention Residuals, full and in blocks of 8 sublayers, against the plain decoder at 7B shape: forward, loss
and backward over one sequence, eager and compiled layer by layer, then decoding steps; one model at a time, since two
do not fit. serving: time to first token and a decoding step at 8B shape with SDPA, and a shorter prompt with eager
attention: CLA, UniAttn and dropped attention, each in turns with the plain decoder.
"""

import torch
from common import SHAPE_7B, SHAPE_8B, TINY, arguments, build, freed, in_turns, peak_bytes, resumed, save, seconds
from transformers import DynamicCache

from crosslayer.core.transformers_versions import CACHE

STEPS = 8  # decoding steps that are timed together


def training_methods(layers: int) -> dict[str, list]:
    """Return the methods whose steps are timed, the plain decoder first."""
    return {
        "plain": [],
        "attnres": ["attnres"],
        "attnres, blocks of 8": [{"name": "attnres", "block": min(8, layers)}],
    }


def serving_methods(layers: int) -> dict[str, list]:
    """Return ways to share or drop, in the upper half of the layers or everywhere."""
    upper = range(layers // 2, layers)
    groups = [tuple(upper[start : start + 4]) for start in range(0, len(upper) - 3, 4)] or [tuple(upper)]
    return {
        "cla, pairs": [{"name": "cla", "group": 2}],
        "uniattn, blocks of 4 in the upper half": [{"name": "uniattn", "superblocks": groups}],
        "drop, every other layer of the upper half": [{"name": "drop", "attention": list(upper)[1::2]}],
    }


def training_step(model, ids, device):
    """Return the time of forward, loss and backward."""
    model.train()
    model.zero_grad(set_to_none=True)
    taken = seconds(lambda: model(ids, labels=ids, use_cache=False).loss.backward(), device)
    model.zero_grad(set_to_none=True)
    return taken


@torch.no_grad()
def prompt(model, ids, device):
    """Return the time of a prompt, with the logits of its last token."""
    return seconds(lambda: filled(model, ids), device)


@torch.no_grad()
def filled(model, ids):
    """Return a cache that holds a prompt."""
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return cache


@torch.no_grad()
def decoding(model, cache, ids, device):
    """Return the time of one decoding step, the mean of several; the cache grows."""

    def run():
        for step in range(STEPS):
            model(ids[:, step : step + 1], **{CACHE: cache}, use_cache=True, logits_to_keep=1)

    return seconds(run, device) / STEPS


def alone(shape, methods, device, dtype, measure) -> dict:
    """Measure a model that has the device to itself: a row, or the error that stopped it."""
    try:
        model = build(shape, methods, device, dtype)
        return measure(model)
    except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
        return {"error": str(error).splitlines()[0][:200]}
    finally:
        model = None
        freed(device)


def training(options, device, dtype):
    """Time training steps one model at a time, eager and compiled, then decoding."""
    shape, tokens, pairs = (TINY, 32, 2) if options.dry_run else (SHAPE_7B, 4096, 6)
    ids = torch.randint(0, shape["vocab_size"], (1, tokens), device=device)
    record = resumed(options.json, shape=shape, tokens=tokens, in_turns=False)

    def measure(model, compiled):
        if compiled:
            for layer in model.model.layers:
                layer.compile()
        rows = in_turns({"training": lambda: training_step(model, ids, device)}, pairs, warmup=2)
        rows["peak_bytes"] = peak_bytes(device)
        if not compiled:
            cache = filled(model.eval(), ids[:, :256])
            rows |= in_turns({"decoding": lambda: decoding(model, cache, ids, device)}, pairs)
        return rows

    for compiled in (False, True):
        for name, methods in training_methods(shape["num_hidden_layers"]).items():
            label = f"{name}, compiled" if compiled else name
            if label in record["rows"]:
                continue
            torch._dynamo.reset()
            record["rows"][label] = alone(shape, methods, device, dtype, lambda m, c=compiled: measure(m, c))
            print(label, record["rows"][label], flush=True)
            save(options.json, record)


def serving(options, device, dtype):
    """Time prompts and decoding steps, each method in turns with the plain decoder."""
    shape, length, pairs = (TINY, 64, 2) if options.dry_run else (SHAPE_8B, 8192, 5)
    ids = torch.randint(0, shape["vocab_size"], (8, length), device=device)
    record = resumed(options.json, shape=shape, length=length, in_turns=True)
    plain = build(shape, [], device, dtype)
    for name, methods in serving_methods(shape["num_hidden_layers"]).items():
        if name in record["rows"]:
            continue
        models = {"plain": plain, name: build(shape, methods, device, dtype)}
        record["rows"][name] = served(models, ids, pairs, device)
        print(name, record["rows"][name], flush=True)
        save(options.json, record)
        del models
        freed(device)


def served(models, ids, pairs, device):
    """Return the times of two models: prompts, decoding, and a shorter prompt with eager attention."""

    def prompts(some):
        return in_turns({name: lambda m=model: prompt(m, some, device) for name, model in models.items()}, pairs)

    rows = {"prompt": prompts(ids[:1])}
    for batch in (1, 8):
        caches = {name: filled(model, ids[:batch]) for name, model in models.items()}
        some = ids[:batch]
        rows[f"decoding, batch {batch}"] = in_turns(
            {name: lambda n=name, c=caches, i=some: decoding(models[n], c[n], i, device) for name in models},
            3 * pairs,  # steps of some 20 ms are mostly launches, and their times vary
            warmup=4,
        )
        rows[f"decoding, batch {batch}"]["cache_bytes"] = {
            name: sum(
                state.nbytes for layer in cache.layers for state in (layer.keys, layer.values) if state is not None
            )
            for name, cache in caches.items()
        }
        del caches
        freed(device)
    half = ids[:1, : ids.shape[1] // 2]
    rows["half the prompt"] = prompts(half)
    for model in models.values():
        model.set_attn_implementation("eager")
    rows["half the prompt, eager"] = prompts(half)
    for model in models.values():
        model.set_attn_implementation("sdpa")
    return rows


def main():
    """Run one of the two parts."""
    parser = arguments(__doc__)
    parser.add_argument("part", choices=("training", "serving"))
    options = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    {"training": training, "serving": serving}[options.part](options, device, dtype)


if __name__ == "__main__":
    main()
