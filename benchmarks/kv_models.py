"""What a smaller KV cache costs on several models: fewer bits, and dropped attention; bytes, and KL to the full cache.

    python benchmarks/kv_models.py [--models smollm2,gemma3,qwen] [--windows 6] [--only ROW …] [--text SOURCE …]

KL in nats per token over the last 256 tokens of windows of 512, scored as a cache that fills token by token reads them;
the interval is that of the mean over the windows (bootstrap). Bytes are those of 2,048 tokens, as a share of the cache
in 16 bits. `drop70`: attention is dropped where it changes its input least (its cosine on the same windows), until at
most 70 % of the bytes are left, without any compensation. Models run in float32, one after another; rows that the file
has from other runs stay in it.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch

from crosslayer import diagnose, load_model, plan, what_if
from crosslayer.cache.running import smaller_cache
from crosslayer.corpus.documents import TextSource, stream_documents
from crosslayer.corpus.domains import embedded_domains, split_domains
from crosslayer.environment import environment
from crosslayer.wiring.kv_bits import KINDS

LENGTH, CONTEXT, DRAWS, KEPT = 512, 2048, 2000, 0.7
ROWS = (*KINDS.values(), "drop70")


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


def divergences(model, windows, exact):
    """Return the KL to the exact log-probabilities by window."""
    found = []
    for window, before in zip(windows, exact, strict=True):
        gaps = before.exp() * (before - log_probabilities(model, window))
        found.append(float(gaps.sum(-1).mean()))
    return found


def least_changing(model, windows, bytes_by_layer):
    """Return the layers whose attention changes its input least, until at most `KEPT` of the bytes are left."""
    similarity = diagnose(model, windows).attention_io_similarity  # (L,)
    left, dropped = sum(bytes_by_layer), []
    for layer in similarity.argsort()[::-1]:
        if left <= KEPT * sum(bytes_by_layer):
            break
        dropped.append(int(layer))
        left -= bytes_by_layer[layer]
    return sorted(dropped), left / sum(bytes_by_layer)


def measured(name, domains, count, only):
    """Return the rows of a model by type."""
    model, tokenizer = load_model(name, dtype="float32")
    parts = {"windows": {domain: -(-count // len(domains)) for domain in domains}}
    windows = split_domains(domains, tokenizer, parts=parts, length=LENGTH)["windows"].ids[:count]
    exact = [log_probabilities(model, window) for window in windows]
    whole, rows = plan(name, length=CONTEXT, dtype="bfloat16"), {}
    for bits, kind in KINDS.items():
        if kind in only:
            with smaller_cache(model, bits=bits):
                found = divergences(model, windows, exact)
            stored = plan(name, length=CONTEXT, dtype="bfloat16", kv_dtype=kind).stored_bytes
            rows[kind] = {"share": stored / whole.stored_bytes, "kl_by_window": found}
    if "drop70" in only:
        layers, share = least_changing(model, windows, whole.layer_bytes)
        with what_if(model, {"name": "drop", "attention": layers}):
            rows["drop70"] = {"share": share, "layers": layers, "kl_by_window": divergences(model, windows, exact)}
    for kind, row in rows.items():
        row["kl"] = mean = sum(row["kl_by_window"]) / len(row["kl_by_window"])
        row["interval"] = low, high = interval(row["kl_by_window"])
        print(f"{name:8} {kind:6} {row['share']:5.1%}  KL {mean:.5f} ({low:.5f}-{high:.5f})", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2,gemma3,qwen")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--text", action="append", help="a source of text, a domain each; default the embedded ones")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows to measure")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "kv_models.json")
    options = parser.parse_args()
    domains = embedded_domains()
    if options.text:
        domains = {Path(name).name.split(".")[0]: list(stream_documents(TextSource(name))) for name in options.text}
    models = json.loads(options.json.read_text(encoding="utf-8"))["models"] if options.json.exists() else {}
    for name in options.models.split(","):
        models[name] = models.get(name, {}) | measured(name, domains, options.windows, options.only)
    record = {"date": str(date.today()), "models": models}
    record["environment"] = environment().model_dump()
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
