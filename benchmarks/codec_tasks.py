"""Task scores on stored prompts: each context is stored with a codec before its last token is read.

    crosslayer fit-codec smollm2 --share 0.125 --out codec-8
    python benchmarks/local_tasks.py DATA TASKS
    python benchmarks/codec_tasks.py smollm2 codec-8 codec-16 --tasks TASKS [--limit 200] [--json FILE]

Prints the score of each codec and its paired change from the original, with a 95% interval. The original is scored by
the same calls, with a cache that is stored exactly.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

import crosslayer
from crosslayer.codec.quality import coded, exact, stored
from crosslayer.environment import environment
from crosslayer.judge.judge import Judge
from crosslayer.judge.tasks.harness import read_tasks

NAMES = ("pubmedqa", "boolq", "sciq", "lambada_openai")  # with long contexts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("codecs", nargs="+", type=Path, help="folders of fit-codec")
    parser.add_argument("--tasks", type=Path, required=True, help="a folder written by local_tasks.py")
    parser.add_argument("--names", default=",".join(NAMES))
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    tasks = read_tasks([f"{name}_local" for name in options.names.split(",")], options.tasks, allow_code=True)
    model, tokenizer = crosslayer.load_model(options.model)
    candidates, ids = [], {}
    for folder in options.codecs:
        codec = crosslayer.load_codec(folder)
        codec.check(model, tokenizer)
        candidates.append(stored(folder.name, coded(codec)))
        ids[folder.name] = codec.id.hex()
    judge = Judge(model, tokenizer=tokenizer, catches=False)
    own = judge.task_results(stored("original", exact), tasks, options.limit)  # by the same calls as the codecs
    rows = judge.tasks(candidates, tasks, options.limit, own)
    for row in rows:
        print(f"{row.candidate}: {row.scope} {row.quantity} {row.original:.4f} → {row.value:.4f}, {row.change_text()}")
    if options.json is not None:
        record = {
            "date": str(date.today()),
            "model": options.model,
            "codecs": ids,
            "limit": options.limit,
            "seconds": round(time.perf_counter() - started),
            "environment": environment().model_dump(),
            "rows": [row.model_dump(mode="json") for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
