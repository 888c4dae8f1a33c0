"""How what is lost comes back with text: KL to the original on unseen text, over tokens, for every way to recover.

    python benchmarks/recovery.py local RETROFIT OUT --tokens 2e5    # each changed layer is trained alone, and saved
    python benchmarks/recovery.py judge smollm2 fit:18432=small distillation:200704=healed/small/model …
    python benchmarks/recovery.py draw                               # docs/figures/recovery.svg from the results

Fits to more text are `crosslayer retrofit smollm2 --method JSON --calibration 393 --length 256 --calibration-text …`
with {"name": "drop", "attention": […], "compensation": "attention"} and a file each of novels, web pages and PEPs.

`judge` takes WAY:TOKENS=FOLDER, or WAY:TOKENS:SECONDS=FOLDER, and keeps the loss of each window, so that what is judged
later is paired with it. Windows are 16 of each embedded domain that nothing is fitted to, of 256 tokens: those by which
`crosslayer retrofit --windows 96 --length 256` judges.

Local: the original runs once over each batch of new text. Every layer without attention is then trained on the stream
that enters it there, towards what the original makes of it: W_c, MLP and norms, with gradients within that layer.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import crosslayer
from crosslayer.core.decoder.convert import convert_weights
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.domains import EMBEDDED, FITTED, embedded_domains, split_domains
from crosslayer.environment import environment
from crosslayer.judge.damage import Losses, logits_of, losses
from crosslayer.judge.rows import kl, perplexity
from crosslayer.output.chart import save_svg
from crosslayer.output.panel import Line, Panel
from crosslayer.stats.estimate import band
from crosslayer.verbs.retrofit.streams import Streams, layers_of

HERE = Path(__file__).parent
RESULTS, FIGURES = HERE / "results" / "recovery.json", HERE.parent / "docs" / "figures"
LENGTH, WINDOWS = 256, 16  # tokens of a window that judges; of each domain
ROW, ROWS = 1024, 2  # tokens of a row that is trained on; of a step
RATE = 3e-4
UNSEEN = [name for name in EMBEDDED if name not in FITTED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    local = verbs.add_parser("local")
    local.add_argument("retrofit")
    local.add_argument("out", type=Path)
    local.add_argument("--original", default="smollm2")
    local.add_argument("--tokens", type=float, default=2e5)
    local.add_argument("--text", nargs="*", default=[], help="files; by default embedded books, web and docs")
    judge = verbs.add_parser("judge")
    judge.add_argument("original")
    judge.add_argument("models", nargs="+", metavar="WAY:TOKENS[:SECONDS]=FOLDER")
    verbs.add_parser("draw")
    options = parser.parse_args()
    if options.verb == "local":
        train_locally(options)
    elif options.verb == "judge":
        judge_all(options)
    else:
        draw(json.loads(RESULTS.read_text()))


def train_locally(options: argparse.Namespace) -> None:
    """Train every layer whose attention is gone towards the original's layer, on the original's own streams."""
    original, tokenizer = crosslayer.load_model(options.original)
    retrofit: Any = crosslayer.load_model(options.retrofit)[0]
    plain: Any = convert_weights(original, []).model
    changed = [layer for layer, block in enumerate(layers_of(retrofit)) if block.self_attn is None]
    layers = [layers_of(retrofit)[layer].requires_grad_(True) for layer in changed]
    optimizer = torch.optim.AdamW([p for block in layers for p in block.parameters()], lr=RATE, weight_decay=0)
    rows = new_text(options, tokenizer)
    steps = len(rows) // ROWS
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.05)
    started = time.perf_counter()
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                streams = Streams(plain, retrofit, rows[step * ROWS : (step + 1) * ROWS], run_on="original")
                entering = boundaries(streams, max(changed))
            loss: Any = sum(lack(streams, layer, *entering[layer]) for layer in changed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for block in layers for p in block.parameters()], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            print(f"{step + 1} of {steps}: {loss.item() / len(changed):.4f} of the update is lacking", flush=True)
    print(f"{steps * ROWS * ROW:,} tokens in {time.perf_counter() - started:.0f} s")
    retrofit.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


def new_text(options: argparse.Namespace, tokenizer: Any) -> Tensor:
    """Return rows of text, (N, ROW), the domains in turns."""
    domains = {file: load_documents(TextSource(file)) for file in options.text} or embedded_domains(FITTED)
    parts = {"new": dict.fromkeys(domains, int(options.tokens) // (ROW * len(domains)))}
    by_domain = split_domains(domains, tokenizer, parts=parts, length=ROW)["new"].by_domain()
    return torch.stack([*by_domain.values()], dim=1).flatten(0, 1)


def boundaries(streams: Streams, highest: int) -> list[tuple[Tensor, Tensor]]:
    """Return the original's stream before and after each layer, up to the highest that is asked for."""
    states = [streams.after[0].clone()]
    for layer in range(highest + 1):
        streams.advance(layer)
        states.append(streams.after[0].clone())
    return list(pairwise(states))


def lack(streams: Streams, layer: int, entering: Tensor, wanted: Tensor) -> Tensor:
    """Return the squared distance of a layer's output to the wanted one, relative to the layer's update."""
    output, _ = streams._run(streams.layers_after[layer], layer, entering, {})
    return ((output - wanted).square().sum(-1) / (wanted - entering).square().sum(-1)).mean()


@torch.no_grad()
def judge_all(options: argparse.Namespace) -> None:
    """Measure models on the same windows, and keep the losses of each."""
    original, tokenizer = crosslayer.load_model(options.original)
    parts = {"evaluation": dict.fromkeys(UNSEEN, WINDOWS)}
    windows = split_domains(embedded_domains(UNSEEN), tokenizer, parts=parts, length=LENGTH)["evaluation"]
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for named in options.models:
        name, folder = named.split("=", 1)
        way, tokens, *seconds = name.split(":")
        model, _ = crosslayer.load_model(folder)
        measured = losses(logits_of(original), {name: logits_of(model)}, windows)[name]
        known[f"{way}:{tokens}"] = {
            "way": way,
            "tokens": int(tokens),
            "seconds": float(seconds[0]) if seconds else None,
            "domains": list(measured.domains),
            "documents": list(measured.documents),
            **{key: np.round(values, 6).tolist() for key, values in measured.means.items()},
            "environment": environment().model_dump(),
        }
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        print("\n".join(table(known)[-1:]), flush=True)
    print("\n".join(table(known)))


def table(known: dict[str, Any]) -> list[str]:
    """Return the lines of a table: KL and perplexity ratio by domain, and the KL less that of the first row."""
    lines = [
        f"| way, tokens | {' | '.join(UNSEEN)} | KL on all | minus the first |",
        "|---" * (len(UNSEEN) + 3) + "|",
    ]
    first = losses_of(known[next(iter(known))])
    for row in known.values():
        shown = [f"× {perplexity(losses_of(row, name)).change.text()}" for name in UNSEEN]
        own = losses_of(row)
        shown += [kl(own).change.text(), kl(own, first).change.text(signed=True)]
        lines.append(f"| {row['way']}, {row['tokens']:,} | {' | '.join(shown)} |")
    return lines


def losses_of(row: dict[str, Any], domain: str | None = None) -> Losses:
    """Return the losses on a domain, or on all, whose documents are told apart."""
    chosen = [number for number, name in enumerate(row["domains"]) if domain in (name, None)]
    means = {key: np.array(row[key])[chosen] for key in ("before", "after", "kl")}
    documents = [1000 * UNSEEN.index(row["domains"][i]) + row["documents"][i] for i in chosen]
    return Losses(means, tuple(documents))


def draw(known: dict[str, Any]) -> None:
    """Draw the KL on unseen text over the tokens that each way has read."""
    lines = []
    for way in dict.fromkeys(row["way"] for row in known.values()):
        rows = sorted((row for row in known.values() if row["way"] == way), key=lambda row: row["tokens"])
        cost = [kl(losses_of(row)).change for row in rows]
        lines.append(Line(way, [float(row["tokens"]) for row in rows], *band(cost)))
    sentence = "On science, speeches and code, which nothing was fitted to or trained on. Bands: 95%, over windows."
    panel = Panel(
        "recovery", "What comes back with text", sentence, "tokens read", "KL (nats per token)", lines, log_x=True
    )
    save_svg(panel, FIGURES)


if __name__ == "__main__":
    main()
