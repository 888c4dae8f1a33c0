"""What chosen tokens cost: a retrofit beside choosers at equal distances, choosing in every layer, and evictions.

    python benchmarks/shared_choice.py --json FILE --retrofit FOLDER … [--text NAME=FILE …] [--windows 4] [--length 512]

Each FOLDER is one of `crosslayer retrofit --read-budget`. Beside it, on the same windows, which nothing was fitted to:
choosers at equal distances that read as much; every layer attending to its own choice of as many tokens; StreamingLLM
and H2O with a cache of as much as the retrofit reads. With `--tokens K …` instead: each wiring with so many chosen
tokens, and with the first and last of them choosers at equal distances and the choice in every layer.

KL to the original, nats per token, differences paired by window. `reads` is the share of the original's keys and values
that a decoding step reads. What is measured stands in FILE after each row.
"""

import argparse
import dataclasses
import json
from datetime import date
from pathlib import Path

import numpy as np
import quality
from quality import mean_interval, window_losses, windows_of

from crosslayer import load_model
from crosslayer.cache.running import CacheOptions
from crosslayer.core.decoder.convert import plain_decoder
from crosslayer.environment import environment
from crosslayer.verbs.retrofit.choosers import affordable, evenly, groups_of
from crosslayer.verbs.retrofit.convert import convert

EVICTIONS = ("streaming", "h2o")


def others(method, layers, context):
    """Return the choosers at equal distances and the choice in every layer, by name, with as many chosen tokens."""
    plan = method.plan(layers)
    share, reads = plan.chosen.share(context), plan.read_states(context) / (2 * layers)
    plain = dataclasses.replace(method, chooser_heads=())
    groups = tuple(map(tuple, groups_of(evenly(layers, affordable(layers, reads, share)))))
    alone = tuple((layer,) for layer in range(layers))
    return {
        "equal distances": dataclasses.replace(plain, groups=groups, sparse_choosers=()),
        "every layer": dataclasses.replace(plain, groups=alone, sparse_choosers=tuple(range(layers))),
        "own heads": plain,  # without matching the heads of chooser and reader
    }


def by_tokens(options, original, measure):
    """Measure the wirings, and what stands beside them, with several numbers of chosen tokens."""
    layers, none = original.config.num_hidden_layers, CacheOptions(None, None)

    def run(name, budget, method):
        converted = convert(original, [method], share_weights=True).model.eval()
        reads = method.plan(layers).read_states(options.length) / (2 * layers)
        measure(f"{name}, {method.tokens:g} tokens", budget, converted, reads, none)

    methods = {}
    for folder in options.retrofit:
        (methods[Path(folder).name],) = load_model(folder, dtype="float32")[0].config.methods
    for budget, method in methods.items():
        for tokens in options.tokens:
            run("search", budget, dataclasses.replace(method, tokens=tokens))
    for number, (budget, method) in enumerate(methods.items()):
        for tokens in (options.tokens[0], options.tokens[-1]):
            beside = others(dataclasses.replace(method, tokens=tokens), layers, options.length)
            run("equal distances", budget, beside["equal distances"])
            if number == 0:  # the same for all of them
                run("every layer", "", beside["every layer"])


def main(options):
    """Measure every retrofit and what stands beside it."""
    quality.LENGTH = options.length
    original, tokenizer = load_model(options.model, dtype="float32")
    original.eval()
    plain = plain_decoder(original)  # evictions run in it, beside the original
    judged, rows, layers = windows_of(tokenizer, options), [], original.config.num_hidden_layers
    settings = {"model": options.model, "windows": options.windows, "length": options.length}
    settings["text"] = [text.partition("=")[0] for text in options.text]

    def measure(name, budget, model, reads, cache, beside=None):
        _, divergences = window_losses(model, original, judged, cache)
        row = {"name": name, "budget": budget, "reads": round(reads, 4), "kl": mean_interval(divergences)}
        row["kl_by_window"] = divergences.tolist()
        if beside is not None:
            row["minus_search"] = mean_interval(divergences - np.array(beside["kl_by_window"]))
        rows.append(row)
        print(name, budget, row["reads"], row["kl"], row.get("minus_search"), flush=True)
        record = {"date": str(date.today()), "settings": settings, "rows": rows}
        record |= {"environment": environment().model_dump()}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return row

    none = CacheOptions(None, None)
    if options.tokens:
        by_tokens(options, original, measure)
        return
    for folder in options.retrofit:
        model, _ = load_model(folder, dtype="float32")
        (method,), context = model.eval().config.methods, options.length
        reads = method.plan(layers).read_states(context) / (2 * layers)
        search = measure("search", Path(folder).name, model, reads, none)
        for name, other in others(method, layers, context).items():
            converted = convert(original, [other], share_weights=True).model.eval()
            measure(
                name, Path(folder).name, converted, other.plan(layers).read_states(context) / (2 * layers), none, search
            )
        for policy in EVICTIONS:
            evicted = CacheOptions(f"{policy}:{1 - reads:.4f}", None)
            measure(policy, Path(folder).name, plain, reads, evicted, search)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--retrofit", nargs="+", required=True)
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=float, nargs="*", default=[])
    parser.add_argument("--json", required=True)
    main(parser.parse_args())
