"""KL of a stored prompt by the distance from the prompt: at the first token after it, the next seven, and so on.

    crosslayer fit-codec smollm2 --share 0.125 --out codec-8
    python benchmarks/codec_positions.py smollm2 codec-8 codec-16 [--prompts 640,80] [--json FILE]

The text is four windows each of science, speeches and code, which the codec is not fitted to.
"""

import argparse
import json
from copy import deepcopy
from datetime import date
from pathlib import Path

import torch

import crosslayer
from crosslayer.cache.running import prefill
from crosslayer.codec.quality import coded, continued
from crosslayer.corpus.domains import embedded_domains, split_domains
from crosslayer.environment import environment
from crosslayer.probe.model import evaluating
from crosslayer.stats.bootstrap import Bootstrap

TEXTS, WINDOWS, AFTER = ("science", "speeches", "code"), 4, 128
RANGES = {"all": (0, 128), "1": (0, 1), "2-8": (1, 8), "9-32": (8, 32), "33-128": (32, 128)}  # tokens after the prompt


@torch.no_grad()
def kl_by_position(model, way, ids, prompt):
    """Return the KL of each token after the prompt, (N, AFTER), of windows (N, T)."""
    found = []
    with evaluating(model):
        for row in ids:
            before, after = row[None, :prompt], row[None, prompt : prompt + AFTER]
            cache = prefill(model, before)
            exact = continued(model, deepcopy(cache), after)
            found.append((exact.exp() * (exact - continued(model, way(cache, before)[0], after))).sum(-1))
    return torch.stack(found).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("codecs", nargs="+", type=Path, help="folders of fit-codec")
    parser.add_argument("--prompts", default="640,80", help="tokens of the stored prompts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = crosslayer.load_model(options.model)
    prompts = [int(prompt) for prompt in options.prompts.split(",")]
    parts, domains = {"judged": dict.fromkeys(TEXTS, WINDOWS)}, embedded_domains(TEXTS)
    windows = split_domains(domains, tokenizer, parts=parts, length=max(prompts) + AFTER, seed=1)["judged"]
    bootstrap, rows = Bootstrap(windows.documents), []
    for prompt in prompts:
        for folder in options.codecs:
            kl = kl_by_position(model, coded(crosslayer.load_codec(folder)), windows.ids, prompt)
            means = {name: bootstrap.mean(kl[:, start:end].mean(1)) for name, (start, end) in RANGES.items()}
            rows.append({"codec": folder.name, "prompt": prompt, "kl": {n: m.model_dump() for n, m in means.items()}})
            print(folder.name, prompt, {name: mean.text(5) for name, mean in means.items()}, flush=True)
    if options.json is not None:
        record = {"date": str(date.today()), "model": options.model, "environment": environment().model_dump()}
        options.json.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
