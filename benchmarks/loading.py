"""Times loading a stored prompt, and saving it, with two checkouts of the package, in turn.

    python benchmarks/loading.py OTHER smollm2=codec qwen=codec-qwen [--tokens 2048] [--rounds 15] [--out FILE]

OTHER is the folder of another checkout (`git worktree add OTHER COMMIT`). Each checkout runs in a process of its own,
saves the prompt into a store of its own, and when it is told to loads it or saves it into a new store: one after the
other, each first in every second round. The ratio is this checkout's time over the other's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WORKER = """
import shutil, sys, time
import torch
torch.set_num_threads(int(sys.argv[4]))
import crosslayer
from crosslayer.corpus.domains import embedded_domains, split_domains
model, tokenizer = crosslayer.load_model(sys.argv[1])
codec, tokens = crosslayer.load_codec(sys.argv[2], model, tokenizer), int(sys.argv[3])
parts = {"text": {"speeches": 1}}
ids = split_domains(embedded_domains(["speeches"]), tokenizer, parts=parts, length=tokens + 1)["text"].ids
store = crosslayer.PromptStore(sys.argv[5], codec)
with torch.no_grad():
    cache = model(ids[:, :tokens], use_cache=True, logits_to_keep=1).past_key_values
store.save(ids[:, :tokens], cache)
print("ready", crosslayer.__file__, flush=True)
for line in sys.stdin:
    if line.strip() == "load":
        started = time.perf_counter()
        assert store.load(ids, model)[1] == tokens
        print(time.perf_counter() - started, flush=True)
    else:
        # a block that a store has is not coded again
        new = crosslayer.PromptStore(sys.argv[5] + "-new", codec)
        started = time.perf_counter()
        new.save(ids[:, :tokens], cache)
        print(time.perf_counter() - started, flush=True)
        shutil.rmtree(sys.argv[5] + "-new")
"""
WHAT = ("load", "save")


def started(root: Path, name: str, codec: str, tokens: int, threads: int, folder: str) -> subprocess.Popen:
    """Start a process that loads with the package of a checkout, and wait until it has stored the prompt."""
    command = [sys.executable, "-c", WORKER, name, codec, str(tokens), str(threads), folder]
    path = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(command, env=path, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = process.stdout.readline().split()
    if not ready or not ready[1].startswith(str(root)):
        raise SystemExit(f"{root} must be a checkout of the package, got {ready}")
    return process


def seconds_of(process: subprocess.Popen, what: str) -> float:
    """Let a process load or save its prompt once."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    """Print the ratio for each model."""
    from crosslayer.environment import environment
    from crosslayer.stats.times import paired_ratio

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("codecs", nargs="+", metavar="MODEL=FOLDER")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    roots, rows = [Path(__file__).resolve().parent.parent, given.other.resolve()], []
    for pair in given.codecs:
        name, _, codec = pair.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            stores = [f"{folder}/{index}" for index in range(2)]
            facts = name, str(Path(codec).resolve()), given.tokens, given.threads
            both = [started(root, *facts, store) for root, store in zip(roots, stores, strict=True)]
            times: dict[str, list[list[float]]] = {what: [[], []] for what in WHAT}
            for turn in range(given.rounds + 1):
                for what in WHAT:
                    for which in (0, 1) if turn % 2 else (1, 0):
                        seconds = seconds_of(both[which], what)
                        if turn:  # the first warms up
                            times[what][which].append(seconds)
            for process in both:
                process.kill()
        for what, (ours, others) in times.items():
            ratio = paired_ratio(ours, others)
            row = {"model": name, "tokens": given.tokens, "what": what, "seconds": [ours, others]}
            rows.append(row | {"ratio": ratio.model_dump()})
            print(name, given.tokens, "tokens:", what, ratio.text(3), "of", f"{sorted(others)[len(others) // 2]:.3f} s")
    if given.out:
        record = {"rows": rows, "threads": given.threads, "environment": environment().model_dump()}
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
