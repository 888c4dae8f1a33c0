"""Theorem 3.1 of UniAttn as its paper has it: 1,000 samples, more positions than inputs, every cut-off.

    python benchmarks/theorem.py                 # about half an hour on one core
    python benchmarks/theorem.py --samples 100   # quicker

One superblock, layers 18-21 of SmolLM2. Layer 19's W_c for every cut-off: what it leaves of E for each token, on
samples and on windows that it has not seen. Then all three W_c bottom-up, and the model's perplexity on those windows.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from streams import Upper
from torch import Tensor

import crosslayer
from crosslayer.environment import environment
from crosslayer.method import load_method
from crosslayer.retrofit.convert import convert
from crosslayer.retrofit.damage import compare
from crosslayer.text import TextSource, load_documents, split

RESULTS = Path(__file__).parent / "results" / "theorem.json"
BLOCK = (18, 19, 20, 21)
CUTOFFS = (1e-13, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
KEPT = 12  # batches whose tokens are looked at one by one
FLOAT32 = torch.finfo(torch.float32).eps
Step = tuple[Tensor, Tensor]  # the normed input and the stream after attention, of every window


class Block:
    """Both models in the block, for one set of windows."""

    def __init__(self, model: Any, ids: Tensor):
        method = load_method({"name": "uniattn", "superblocks": [BLOCK]})
        self.plain = Upper(convert(model, []).model, BLOCK[0], ids.shape[1])
        self.made = Upper(convert(model, [method]).model, BLOCK[0], ids.shape[1])
        self.entering: list[Tensor] = []
        self.wanted: dict[int, list[Tensor]] = {layer: [] for layer in BLOCK[1:]}  # after attention, of some batches
        self.sums = dict.fromkeys(BLOCK[1:], torch.zeros(()))  # the same, over all windows, (T, C)
        started = time.perf_counter()
        for batch in ids.split(2):
            stream = self.plain.below(batch)
            self.entering.append(stream)
            for layer in BLOCK:
                seen, stream = after_attention(self.plain, layer, stream, {})
                if layer in self.wanted:
                    self.sums[layer] = self.sums[layer] + seen[1].double().sum(0)
                    if len(self.wanted[layer]) < KEPT:
                        self.wanted[layer].append(seen[1])
        self.count = len(ids)
        print(f"{len(ids)} windows, {time.perf_counter() - started:.0f} s", flush=True)

    def means(
        self, layer: int, streams: list[Tensor], carries: list[dict[str, Any]]
    ) -> tuple[Tensor, Tensor, list[Step]]:
        """Return X̄ and Ē, (T, C), of a layer whose W_c is zero, and what the first batches have there."""
        x, stream, kept = torch.zeros(()), torch.zeros(()), []
        for entering, carry in zip(streams, carries, strict=True):
            step, _ = after_attention(self.made, layer, entering, carry)
            x, stream = x + step[0].double().sum(0), stream + step[1].double().sum(0)
            if len(kept) < KEPT:
                kept.append(step)
        return x / self.count, (self.sums[layer] - stream) / self.count, kept

    def leader(self) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Return streams and carries behind the leader."""
        pairs = [self.made.layer(BLOCK[0], stream, {}) for stream in self.entering]
        return [stream for stream, _ in pairs], [carry for _, carry in pairs]


def after_attention(upper: Upper, number: int, stream: Tensor, carry: dict[str, Any]) -> tuple[Step, Tensor]:
    """Run a layer; return its normed input and the stream after attention, and its output."""
    layer, seen = upper.layers[number], {}
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda _, args, out: seen.update(normed=out)),
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: seen.update(stream=args[0])),
    ]
    result, _ = upper.layer(number, stream, carry)
    for hook in hooks:
        hook.remove()
    return (seen["normed"], seen["stream"]), result


def left(weight: Tensor, steps: list[Step], wanted: list[Tensor]) -> float:
    """Return the root mean square over tokens of E − X W, over that of E."""
    after = before = 0.0
    for (x, stream), want in zip(steps, wanted, strict=True):
        error = want - stream
        after += float((error - x @ weight.float()).double().square().sum())
        before += float(error.double().square().sum())
    return (after / before) ** 0.5


def bottom_up(block: Block, cutoff: float) -> list[Tensor]:
    """Fit every W_c of the block."""
    streams, carries = block.leader()
    weights = []
    for layer in BLOCK[1:]:
        weight = block.made.layers[layer].compensation.weight
        weight.zero_()
        x, error, _ = block.means(layer, streams, carries)
        weight.copy_((torch.linalg.pinv(x, rtol=cutoff) @ error).T)
        weights.append(weight.clone())
        streams = [block.made.layer(layer, s, c)[0] for s, c in zip(streams, carries, strict=True)]
    return weights


def ratio(block: Block, ids: Tensor, weights: list[Tensor] | None) -> dict[str, float]:
    """Return the perplexity ratio and KL with these W_c, None: zero."""
    rows = []
    for layer, weight in zip(BLOCK[1:], weights or [torch.zeros(())] * 3, strict=True):
        block.made.layers[layer].compensation.weight.copy_(weight)
    entering = torch.cat(block.entering)
    for number, window in enumerate(ids):
        stream = entering[number : number + 1]
        rows.append(compare(block.plain.logits(stream), block.made.logits(stream), window))
    before, after, kl = torch.tensor(rows).mean(0).tolist()
    return {"ratio": float(torch.tensor(after - before).exp()), "kl": kl}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--length", type=int, default=720)
    parser.add_argument("--windows", type=int, default=24)
    args = parser.parse_args()
    model, tokenizer = crosslayer.load_model("smollm2")
    parts = {"judged": args.windows, "samples": args.samples}
    texts = split(load_documents(TextSource()), tokenizer, parts=parts, length=args.length)
    fitted, judged = Block(model, texts["samples"].ids), Block(model, texts["judged"].ids)
    sweep, first = [], BLOCK[1]
    x, error, samples = fitted.means(first, *fitted.leader())
    _, _, unseen = judged.means(first, *judged.leader())
    values = torch.linalg.svdvals(x)
    for cutoff in (*CUTOFFS, FLOAT32 * max(x.shape)):
        weight = torch.linalg.pinv(x, rtol=cutoff) @ error
        row = {
            "cutoff": cutoff,
            "rank": int((values > cutoff * values[0]).sum()),
            "samples": left(weight, samples, fitted.wanted[first]),
            "judged": left(weight, unseen, judged.wanted[first]),
        }
        print(row, flush=True)
        sweep.append(row)
    models = {"none": ratio(judged, texts["judged"].ids, None)}
    print("none", models["none"], flush=True)
    best = min(sweep, key=lambda row: row["judged"])["cutoff"]
    for name, cutoff in (("float32", FLOAT32 * args.length), ("float64", 2.2e-16 * args.length), ("best", best)):
        models[name] = {"cutoff": cutoff, **ratio(judged, texts["judged"].ids, bottom_up(fitted, cutoff))}
        print(name, models[name], flush=True)
        found = {"sweep": sweep, "models": models, "settings": vars(args), "environment": environment()}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
