"""Data for training: how fast text becomes tokens on a core, and what a row costs.

    python benchmarks/data.py [--text SOURCE] [--tokenizers bytes,bpe:8192,smollm2] [--json FILE]

Tokenising is everything between documents in memory and shards that are written, checked and opened, in bytes of UTF-8,
on one core; reading is from a source (packed, as it lies there) to documents. Rows come from a mixture of three domains
over the files on disk, singly and as collated batches. The last column sets a batch against a training step (forward
and backward, float32, without the optimizer) of a small Llama, for which data weigh most: a step of any larger model
takes longer, and its data do not. All times are CPU seconds of the process, which runs a single thread.
"""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before the library counts its threads

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

from crosslayer.corpus.documents import TextSource, stream_documents
from crosslayer.corpus.domains import embedded_domains
from crosslayer.environment import environment
from crosslayer.training.rows import FixedRows, Mixture
from crosslayer.training.shards import tokenise
from crosslayer.training.tokenizers import make_tokenizer

WEIGHTS = {"first": 0.5, "second": 0.3, "third": 0.2}
MEGABYTE = 10**6


def seconds(call):
    """Return the CPU seconds that a call takes, and what it returns."""
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def spread(values):
    """Return the median of some measurements, the lowest and the highest."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def read(name):
    """Return the documents of a source, or of all embedded domains."""
    if name:
        return list(stream_documents(TextSource(name)))
    return [text for texts in embedded_domains().values() for text in texts]


def tokenising(documents, names, rounds):
    """Return MB/s by tokenizer, and bytes of text per token; the tokenizers take turns."""
    size = sum(len(text.encode()) for text in documents) / MEGABYTE
    tokenizers = {name: make_tokenizer(name, lambda: documents) for name in names}
    speeds, tokens = {name: [] for name in names}, {}
    for _ in range(rounds):
        for name, tokenizer in tokenizers.items():
            with TemporaryDirectory() as folder:
                place = Path(folder) / "shards"
                taken, shards = seconds(lambda: tokenise(documents, tokenizer, place, fingerprint=""))  # noqa: B023
            speeds[name].append(size / taken)
            tokens[name] = shards.tokens
    return {
        name: {"MB_per_s": spread(speeds[name]), "bytes_per_token": size * MEGABYTE / tokens[name]} for name in names
    }


def three_domains(documents, folder):
    """Return shards of three parts of the documents, in byte pairs."""
    tokenizer = make_tokenizer("bpe:8192", lambda: documents)
    parts = {name: documents[place::3] for place, name in enumerate(WEIGHTS)}
    return {name: tokenise(texts, tokenizer, folder / name, fingerprint="") for name, texts in parts.items()}


def rows(domains, length, options):
    """Return µs of a row and of a row within a collated batch, and ms of a training step of a batch."""
    mixture = Mixture(
        {name: FixedRows(shards, length, name) for name, shards in domains.items()}, WEIGHTS, 0, options.rows
    )
    place_us, row_us, batch_us = [], [], []
    for _ in range(options.rounds):
        place_us.append(seconds(lambda: [mixture.window(item) for item in range(len(mixture))])[0] / len(mixture) * 1e6)
        row_us.append(seconds(lambda: [mixture[item] for item in range(len(mixture))])[0] / len(mixture) * 1e6)
        loader = DataLoader(mixture, batch_size=options.batch, collate_fn=default_data_collator)
        batch_us.append(seconds(lambda: sum(1 for _ in loader))[0] / len(mixture) * 1e6)  # noqa: B023
    batch = default_data_collator([mixture[item] for item in range(options.batch)])
    step_ms = [1e3 * taken for taken in steps(batch, length, options.rounds)]
    return {
        "place_us": spread(place_us),
        "row_us": spread(row_us),
        "row_in_batch_us": spread(batch_us),
        "step_ms": spread(step_ms),
        "share_of_step": statistics.median(batch_us) * options.batch / 1e3 / statistics.median(step_ms),
    }


def steps(batch, length, rounds):
    """Return the seconds of training steps of a Llama of 2.4 million parameters."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)

    def step():
        model.zero_grad()
        model(**batch, use_cache=False).loss.backward()

    step()
    return [seconds(step)[0] for _ in range(rounds)]


def report(record):
    """Print the figures as tables."""
    print("| tokenizer | MB/s on one core: median (lowest-highest) | bytes per token |\n|---|---|---|")
    for name, case in record["tokenising"].items():
        speed = case["MB_per_s"]
        cells = f"{speed['median']:.2f} ({speed['lowest']:.2f}-{speed['highest']:.2f}) | {case['bytes_per_token']:.2f}"
        print(f"| {name} | {cells} |")
    print(f"\nreading the source: {record['reading_MB_per_s']['median']:.0f} MB/s of text\n")
    print("| tokens of a row | place, µs | row, µs | row in a batch, µs | step of a batch, ms | data in the step |")
    print("|---|---|---|---|---|---|")
    for length, case in record["rows"].items():
        times = [f"{case[name]['median']:.1f}" for name in ("place_us", "row_us", "row_in_batch_us", "step_ms")]
        print(f"| {length} | {' | '.join(times)} | {100 * case['share_of_step']:.3f} % |")


def main():
    """Measure, print the tables, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a source; default: all embedded domains")
    parser.add_argument("--tokenizers", default="bytes,bpe:8192,smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "data.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    reading = [seconds(lambda: read(options.text)) for _ in range(options.rounds)]
    documents = reading[0][1]
    size = sum(len(text.encode()) for text in documents) / MEGABYTE
    record = {
        "date": str(date.today()),
        "text": {
            "source": TextSource(options.text).describe() if options.text else "all embedded domains",
            "MB": size,
            "documents": len(documents),
        },
        "reading_MB_per_s": spread([size / taken for taken, _ in reading]),
        "tokenising": tokenising(documents, options.tokenizers.split(","), options.rounds),
    }
    with TemporaryDirectory() as folder:
        domains = three_domains(documents, Path(folder))
        record["rows"] = {length: rows(domains, length, options) for length in options.lengths}
    record["options"] = {name: value for name, value in vars(options).items() if name not in ("json", "text")}
    record |= environment().model_dump()
    record["load"] = os.getloadavg()[0]  # other work on the machine makes even CPU seconds longer
    report(record)
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
