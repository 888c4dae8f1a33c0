"""What fewer bits of the KV cache cost on several models: bytes, and KL to the full cache.

    python benchmarks/kv_models.py [--models smollm2,gemma3,qwen] [--windows 6] [--text SOURCE …] [--json FILE]

KL in nats a token over the last 256 tokens of windows of 512, scored as a cache that fills token by token reads them;
the interval is that of the mean over the windows (bootstrap). Bytes are those of 2,048 tokens, as a share of the cache
in 16 bits. Models run in float32, one after another; those that FILE has from other runs stay in it.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch

from crosslayer import load_model, plan
from crosslayer.corpus.documents import TextSource, stream_documents
from crosslayer.corpus.domains import embedded_domains, split_domains
from crosslayer.environment import environment
from crosslayer.quantization.running import quantizing
from crosslayer.wiring.kv_bits import KINDS

LENGTH, CONTEXT, DRAWS = 512, 2048, 2000


@torch.no_grad()
def log_probabilities(model, window):
    """Return what a model says of the second half of a window (T,), (T / 2, V)."""
    return model(window[None], use_cache=False, logits_to_keep=LENGTH // 2 + 1).logits[0, :-1].log_softmax(-1)


def interval(values):
    """Return the 95 % bootstrap interval of the mean of some values."""
    values = torch.tensor(values)
    generator = torch.Generator().manual_seed(0)
    means = values[torch.randint(len(values), (DRAWS, len(values)), generator=generator)].mean(1)
    return means.quantile(torch.tensor([0.025, 0.975])).tolist()


def measured(name, domains, count):
    """Return the rows of a model by type."""
    model, tokenizer = load_model(name, dtype="float32")
    parts = {"windows": {domain: -(-count // len(domains)) for domain in domains}}
    windows = split_domains(domains, tokenizer, parts=parts, length=LENGTH)["windows"].ids[:count]
    exact = [log_probabilities(model, window) for window in windows]
    full, rows = plan(name, length=CONTEXT, dtype="bfloat16").stored_bytes, {}
    for bits, kind in KINDS.items():
        divergences = []
        with quantizing(model, bits):
            for window, before in zip(windows, exact, strict=True):
                gaps = before.exp() * (before - log_probabilities(model, window))
                divergences.append(float(gaps.sum(-1).mean()))
        stored = plan(name, length=CONTEXT, dtype="bfloat16", kv_dtype=kind).stored_bytes
        mean, ends = sum(divergences) / len(divergences), interval(divergences)
        rows[kind] = {"share": stored / full, "kl": mean, "interval": ends}
        rows[kind]["kl_by_window"] = divergences
        print(f"{name:8} {kind:5} {rows[kind]['share']:5.1%}  KL {mean:.5f} ({ends[0]:.5f}-{ends[1]:.5f})", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2,gemma3,qwen")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--text", action="append", help="a source of text, a domain each; default the embedded ones")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "kv_models.json")
    options = parser.parse_args()
    domains = embedded_domains()
    if options.text:
        domains = {Path(name).name.split(".")[0]: list(stream_documents(TextSource(name))) for name in options.text}
    rows = {name: measured(name, domains, options.windows) for name in options.models.split(",")}
    before = json.loads(options.json.read_text(encoding="utf-8"))["models"] if options.json.exists() else {}
    record = {"date": str(date.today()), "models": {**before, **rows}}
    record["environment"] = environment().model_dump()
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
