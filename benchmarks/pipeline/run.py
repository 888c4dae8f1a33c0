"""Block Attention Residuals over a pipeline: bytes sent, gradients, step times; with cross-stage caching and without.

    python -m benchmarks.pipeline.run [--pairs 20] [--width 128] [--json FILE]

P ranks (gloo, on the CPU) with V stages each, 8 layers in 8 blocks of 2 sublayers, 1F1B or interleaved 1F1B. The unit
of traffic is one source: B · T · C numbers of a microbatch. The formulas (arXiv 2603.15031) count blocks, N of a stage:
C(C−1)/2 · N for C = PV stages, with cross-stage caching P(P−1)/2 · N + (V−1)P² · N. The embedding is a source too and
comes on top: over C−1 cuts, with caching once to every rank that lacks it. Bytes are counted where a stage posts its
sends, gradients against one process, relative to the largest of each tensor. Step times are interleaved, in an order
that turns.
"""

import argparse
import json
import os
import socket
import statistics
import time
from collections import Counter
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy.stats import bootstrap
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.pipeline import pipeline_stages
from crosslayer.core.pipeline.cuts import KEPT
from crosslayer.environment import environment

CASES = ((2, 1), (2, 2), (4, 1), (4, 2))
LAYERS = 8
SENDS = {"up": "get_fwd_send_ops", "down": "get_bwd_send_ops"}


def formula(ranks, rounds, keep):
    """Return how many blocks cross cuts in a microbatch, and how often the embedding does."""
    stages = ranks * rounds
    blocks = LAYERS // stages
    if keep == "nothing":
        return stages * (stages - 1) // 2 * blocks, stages - 1
    if keep == "received":  # the embedding comes back to the first rank, which has computed it
        later, embedding = ranks**2, ranks - 1 + (rounds > 1)
    else:  # nothing comes back to the rank that has computed it
        later, embedding = ranks * (ranks - 1), ranks - 1
    return (ranks * (ranks - 1) // 2 + (rounds - 1) * later) * blocks, embedding


def build(options, dtype):
    """Return the decoder, the same on every rank; queries and gains are not at their first values."""
    torch.manual_seed(0)
    config = CrossLayerConfig(
        vocab_size=512,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.tokens,
        cross_layer=[{"name": "attnres", "block": 2}],
    )
    model = CrossLayerForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model


def loss_of(logits, ids):
    """Return the loss in the model's dtype."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def send_counts(stages):
    """Return a counter of the bytes that stages of this rank send from now on, up and down."""
    sent = Counter()

    def counted(way, operations):
        def count(chunk):
            sends = operations(chunk)
            sent[way] += sum(send.tensor.nbytes for send in sends)
            return sends

        return count

    for stage in stages:
        for way, name in SENDS.items():
            setattr(stage, name, counted(way, getattr(stage, name)))
    return sent


class Run:
    """A pipeline with its schedule, which counts the bytes that this rank sends."""

    def __init__(self, options, dtype, rounds, keep):
        self.stages = pipeline_stages(build(options, dtype), torch.device("cpu"), rounds, keep)
        self.sent = send_counts(self.stages)
        kind, stages = (ScheduleInterleaved1F1B, self.stages) if rounds > 1 else (Schedule1F1B, self.stages[0])
        self.schedule = kind(stages, options.microbatches, loss_fn=loss_of)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(512, (options.microbatches * options.batch, options.tokens), generator=generator)

    def step(self):
        """Run a training step and return its seconds, until the last rank is through."""
        for stage in self.stages:
            stage.submod.zero_grad()
        self.sent.clear()
        dist.barrier()
        started = time.perf_counter()
        self.schedule.step(*[self.ids] if dist.get_rank() == 0 else [], target=self.ids)
        dist.barrier()
        return time.perf_counter() - started

    def gap(self, expected):
        """Return the largest difference of a gradient to `expected`, relative to the largest in its tensor."""
        found = {name: p.grad for stage in self.stages for name, p in stage.submod.named_parameters()}
        gaps = [(grad - expected[name]).abs().max() / expected[name].abs().max() for name, grad in found.items()]
        return over_ranks(max(gaps).item(), dist.ReduceOp.MAX)

    def left(self):
        """Return how many microbatches still wait on all ranks: 0 after a step."""
        waiting = self.stages[0].submod.exchange.waiting
        return over_ranks(sum(len(queue) for queue in waiting.values()), dist.ReduceOp.SUM)


def over_ranks(number, operation):
    """Return the sum or maximum of a number over all ranks."""
    tensor = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return tensor.item()


def gaps(options, dtype, rounds):
    """Return the gap of gradients to one process, by what is kept."""
    runs = {keep: Run(options, dtype, rounds, keep) for keep in KEPT}
    whole = build(options, dtype)
    ids = next(iter(runs.values())).ids
    loss_of(whole(ids, use_cache=False).logits, ids).backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    result = {}
    for keep, run in runs.items():
        run.step()
        result[keep] = run.gap(expected)
    return result


def measure(options, ranks, rounds):
    """Return the rows of P ranks and V rounds, by what is kept."""
    single, double = gaps(options, torch.float32, rounds), gaps(options, torch.float64, rounds)
    runs = {keep: Run(options, torch.float32, rounds, keep) for keep in KEPT}
    rows, unit = {}, options.microbatches * options.batch * options.tokens * options.width * 4
    for keep, run in runs.items():
        run.step()  # the first also exchanges shapes
        run.step()
        blocks, embedding = formula(ranks, rounds, keep)
        rows[keep] = {
            "bytes": {way: int(over_ranks(run.sent[way], dist.ReduceOp.SUM)) for way in SENDS},
            "formula_bytes": {"blocks": blocks * unit, "embedding": embedding * unit},
            "formula_units": {"blocks": blocks, "embedding": embedding},
            "left": int(run.left()),
            "gradient_gap": {"float32": single[keep], "float64": double[keep]},
        }
    times = {keep: [] for keep in KEPT}
    for pair in range(options.pairs):
        for place in range(len(KEPT)):
            keep = KEPT[(pair + place) % len(KEPT)]
            times[keep].append(runs[keep].step())
    for keep, row in rows.items():
        ratios = [a / b for a, b in zip(times[keep], times["nothing"], strict=True)]
        row["seconds"] = statistics.median(times[keep])
        row["step_ratio"] = {"median": statistics.median(ratios), "ci95": interval(ratios)}
    return rows


def interval(ratios):
    """Return the 95 % bootstrap interval of the median."""
    if len(set(ratios)) == 1:
        return [ratios[0], ratios[0]]
    found = bootstrap((ratios,), statistics.median, n_resamples=2000, vectorized=False, rng=0).confidence_interval
    return [float(found.low), float(found.high)]


def worker(rank, ranks, rounds, options, port, path):
    """Measure on one rank; rank 0 writes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    rows = measure(options, ranks, rounds)
    if rank == 0:
        path.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still run when the interpreter takes its modules down


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def table(results):
    """Return the results as a table."""
    lines = [
        "| P | V | kept | blocks sent, formula | and embedding | measured, up / down | gradient gap, float32 / 64 |"
        " step ÷ nothing kept (95%) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in results:
        for keep, row in case["kept"].items():
            units = row["formula_units"]
            unit = row["formula_bytes"]["embedding"] / units["embedding"]
            measured = " / ".join(f"{row['bytes'][way] / unit:g}" for way in SENDS)
            gap = " / ".join(f"{row['gradient_gap'][dtype]:.0e}" for dtype in ("float32", "float64"))
            ratio, (low, high) = row["step_ratio"]["median"], row["step_ratio"]["ci95"]
            time_cell = "1" if keep == "nothing" else f"{ratio:.2f} ({low:.2f}-{high:.2f})"
            cells = [case["P"], case["V"], keep, units["blocks"], units["embedding"], measured, gap, time_cell]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main():
    """Run all cases, print the table, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent.parent / "results" / "pipeline.json")
    options = parser.parse_args()
    results = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        for ranks, rounds in CASES:
            mp.spawn(worker, (ranks, rounds, options, free_port(), path), nprocs=ranks)
            results.append({"P": ranks, "V": rounds, "kept": json.loads(path.read_text())})
    print(table(results))
    wrong = [
        (case["P"], case["V"], keep)
        for case in results
        for keep, row in case["kept"].items()
        if set(row["bytes"].values()) != {sum(row["formula_bytes"].values())} or row["left"]
    ]
    assert not wrong, f"bytes differ from the formula, or something is left, in {wrong}"
    record = {
        "date": str(date.today()),
        "cases": results,
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        **environment().model_dump(),
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
