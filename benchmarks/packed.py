"""What a packed row costs in memory and time: with a mask of all tokens, and document by document.

    python benchmarks/packed.py [--lengths 8192 32000 64000] [--dense 32000] [--rounds 3] [--json FILE]

A row of documents of random lengths, about `--document` tokens on average, goes through a decoder of one layer with two
heads of 64 and a vocabulary of 256, forward and backward, in float32: little beside the mask. Both take turns. Rows
of more than `--dense` tokens are measured by document alone, rows of more than 10,000 once. Memory is the largest
resident set above what was in use before; seconds are of the process's CPU time.
"""

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.environment import environment
from crosslayer.machine import peak_memory
from crosslayer.training.attention import WITHIN_DOCUMENTS

WAYS = {"dense": "sdpa", "documents": WITHIN_DOCUMENTS}
CPU, OFTEN = torch.device("cpu"), 10_000


def positions(length, mean):
    """Return the positions (1, T) of a row of documents, which begin anew with each."""
    generator = torch.Generator().manual_seed(length)
    begins = torch.rand(length, generator=generator) < 1 / mean
    begins[0] = True
    places = torch.arange(length)
    return (places - (places * begins).cummax(0).values)[None]


def step(model, ids, position_ids):
    """Return bytes at the peak, and CPU seconds, of a forward and a backward pass."""
    model.zero_grad()
    with peak_memory(CPU) as peak:
        started = time.process_time()
        model(ids, position_ids=position_ids, labels=ids, use_cache=False).loss.backward()
        seconds = time.process_time() - started
    return peak.bytes, seconds


def measured(length, options):
    """Return medians of both ways at a length, and their ratios."""
    shape = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 128,
        "intermediate_size": 352,
        "vocab_size": 256,
        "max_position_embeddings": length,
    }
    ways = WAYS if length <= options.dense else {"documents": WITHIN_DOCUMENTS}
    model, ids = CrossLayerForCausalLM(CrossLayerConfig(**shape)), torch.zeros(1, length, dtype=torch.long)
    position_ids, found = positions(length, options.document), {way: [] for way in ways}
    for _ in range(options.rounds if length <= OFTEN else 1):
        for way, name in ways.items():
            model.set_attn_implementation(name)
            found[way].append(step(model, ids, position_ids))
    medians = {
        way: {"bytes": statistics.median(b for b, _ in rounds), "seconds": statistics.median(s for _, s in rounds)}
        for way, rounds in found.items()
    }
    both = ("bytes", "seconds") if "dense" in medians else ()
    ratios = {name: medians["documents"][name] / medians["dense"][name] for name in both}
    return {**medians, "ratio": ratios, "documents_in_row": int((position_ids == 0).sum())}


def main():
    """Measure, print a table, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32000, 64000])
    parser.add_argument("--dense", type=int, default=32000)
    parser.add_argument("--document", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "packed.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {length: measured(length, options) for length in options.lengths}
    print(
        "| tokens | MB: dense | documents | ratio | seconds: dense | documents | ratio |\n|---|---|---|---|---|---|---|"
    )
    for length, row in rows.items():
        cells = [f"{length:,}"]
        for name, unit in (("bytes", 1e6), ("seconds", 1)):
            cells += [f"{row[way][name] / unit:,.1f}" if way in row else "" for way in WAYS]
            cells.append(f"{row['ratio'][name]:.3f}" if row["ratio"] else "")
        print(f"| {' | '.join(cells)} |")
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    result = {"date": str(date.today()), "rows": rows, "options": settings, **environment().model_dump()}
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
