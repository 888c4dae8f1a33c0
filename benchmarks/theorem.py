"""Theorem 3.1 of UniAttn with 1,000 samples, as its paper has, and every cut-off of the pseudo-inverse.

    python benchmarks/theorem.py                                # 1,000 samples of 128 tokens, in 1 and in 8 groups
    python benchmarks/theorem.py --length 720 --groups 1        # more positions than inputs; an hour on a core

One superblock, layers 18-21 of SmolLM2. Layer 19's W_c for every cut-off: what it leaves of E for each token, on
samples and on windows that it has not seen. Then all three W_c bottom-up, and the model's perplexity on those windows;
"oracle" is the cut-off that is best on these very windows, an optimistic bound.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from streams import Upper
from torch import Tensor

import crosslayer
from crosslayer.core.decoder.convert import convert_weights
from crosslayer.core.methods import load_method
from crosslayer.corpus.documents import TextSource, load_documents
from crosslayer.corpus.windows import split
from crosslayer.environment import environment
from crosslayer.judge.damage import compare

RESULTS = Path(__file__).parent / "results" / "theorem.json"
BLOCK = (18, 19, 20, 21)
CUTOFFS = (1e-13, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
KEPT = 12  # batches whose tokens are looked at singly
FLOAT32 = torch.finfo(torch.float32).eps
Step = tuple[Tensor, Tensor]  # the normed input and the stream after attention, of every window


class Block:
    """Both models in the block, for a set of windows."""

    def __init__(self, model: Any, ids: Tensor, groups: int = 1):
        method = load_method({"name": "uniattn", "superblocks": [BLOCK]})
        self.plain = Upper(convert_weights(model, []).model, BLOCK[0], ids.shape[1])
        self.converted = Upper(convert_weights(model, [method]).model, BLOCK[0], ids.shape[1])
        self.entering: list[Tensor] = []
        self.wanted: dict[int, list[Tensor]] = {layer: [] for layer in BLOCK[1:]}  # after attention, of some batches
        self.groups, self.count = groups, len(ids)
        self.zeros = torch.zeros(groups, ids.shape[1], model.config.hidden_size, dtype=torch.float64)
        self.sums = {layer: self.zeros.clone() for layer in BLOCK[1:]}  # the same, in groups of windows, (G, T, C)
        started = time.perf_counter()
        for number, batch in enumerate(ids.split(2)):
            stream = self.plain.below(batch)
            self.entering.append(stream)
            for layer in BLOCK:
                seen, stream = after_attention(self.plain, layer, stream, {})
                if layer in self.wanted:
                    self.sums[layer][self.group(number)] += seen[1].double().sum(0)
                    if len(self.wanted[layer]) < KEPT:
                        self.wanted[layer].append(seen[1])
        print(f"{len(ids)} windows, {time.perf_counter() - started:.0f} s", flush=True)

    def group(self, batch: int) -> int:
        """Return the group of a batch of two windows."""
        return 2 * batch * self.groups // self.count

    def means(
        self, layer: int, below: tuple[list[Tensor], list[dict]], groups: int
    ) -> tuple[Tensor, Tensor, list[Step]]:
        """Return X̄ and Ē, (groups · T, C), of a layer whose W_c is zero, and what the first batches have there."""
        x, stream, members, kept = self.zeros.clone(), self.zeros.clone(), torch.zeros(self.groups, 1, 1), []
        for number, (entering, carry) in enumerate(zip(*below, strict=True)):
            step, _ = after_attention(self.converted, layer, entering, carry)
            group = self.group(number)
            members[group] += len(entering)
            x[group] += step[0].double().sum(0)
            stream[group] += step[1].double().sum(0)
            if len(kept) < KEPT:
                kept.append(step)
        parts = (sums.unflatten(0, (groups, -1)).sum(1) for sums in (x, self.sums[layer] - stream, members))
        x, error, members = parts
        return (x / members).flatten(0, 1), (error / members).flatten(0, 1), kept

    def leader(self) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Return streams and carries behind the leader."""
        pairs = [self.converted.layer(BLOCK[0], stream, {}) for stream in self.entering]
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


def bottom_up(block: Block, groups: int, cutoff: float) -> list[Tensor]:
    """Fit every W_c of the block."""
    streams, carries = block.leader()
    weights = []
    for layer in BLOCK[1:]:
        weight = block.converted.layers[layer].compensation.weight
        weight.zero_()
        x, error, _ = block.means(layer, (streams, carries), groups)
        weight.copy_((torch.linalg.pinv(x, rtol=cutoff) @ error).T)
        weights.append(weight.clone())
        streams = [block.converted.layer(layer, s, c)[0] for s, c in zip(streams, carries, strict=True)]
    return weights


def ratio(block: Block, ids: Tensor, weights: list[Tensor] | None) -> dict[str, float]:
    """Return the perplexity ratio and KL with these W_c, None: zero."""
    rows = []
    for layer, weight in zip(BLOCK[1:], weights or [torch.zeros(())] * 3, strict=True):
        block.converted.layers[layer].compensation.weight.copy_(weight)
    entering = torch.cat(block.entering)
    for number, window in enumerate(ids):
        stream = entering[number : number + 1]
        original, own = block.plain.logits(stream).log_softmax(-1), block.converted.logits(stream)
        rows.append(compare(original[:-1], own[:-1], window[1:]))
    means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    return {"ratio": math.exp(means["after"] - means["before"]), "kl": means["kl"]}


def swept(fitted: Block, judged: Block, groups: int) -> list[dict[str, Any]]:
    """Return what the first follower's W_c leaves of E, by cut-off."""
    first, rows = BLOCK[1], []
    x, error, samples = fitted.means(first, fitted.leader(), groups)
    _, _, unseen = judged.means(first, judged.leader(), 1)
    values = torch.linalg.svdvals(x)
    for cutoff in (*CUTOFFS, FLOAT32 * max(x.shape)):
        weight = torch.linalg.pinv(x, rtol=cutoff) @ error
        row = {
            "cutoff": cutoff,
            "rank": int((values > cutoff * values[0]).sum()),
            "samples": left(weight, samples, fitted.wanted[first]),
            "judged": left(weight, unseen, judged.wanted[first]),
        }
        print({key: f"{value:.4g}" for key, value in row.items()}, flush=True)
        rows.append(row)
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--groups", type=int, nargs="*", default=[1, 8], help="v; each divides the largest")
    parser.add_argument("--windows", type=int, default=32, help="that are judged")
    args = parser.parse_args()
    model, tokenizer = crosslayer.load_model("smollm2")
    parts = {"judged": args.windows, "samples": args.samples}
    texts = split(load_documents(TextSource()), tokenizer, parts=parts, length=args.length)
    judged, fitted = Block(model, texts["judged"].ids), Block(model, texts["samples"].ids, max(args.groups))
    results: dict[str, Any] = {"none": ratio(judged, texts["judged"].ids, None)}
    print("none", results["none"], flush=True)
    for groups in args.groups:
        sweep = swept(fitted, judged, groups)
        oracle, models = min(sweep, key=lambda row: row["judged"])["cutoff"], {}  # picked on what it is judged on
        size = max(groups * args.length, model.config.hidden_size)
        for name, cutoff in (("float64", 2.2e-16 * size), ("float32", FLOAT32 * size), ("oracle", oracle)):
            weights = bottom_up(fitted, groups, cutoff)
            models[name] = {"cutoff": cutoff, **ratio(judged, texts["judged"].ids, weights)}
            print(groups, name, models[name], flush=True)
        results[f"v = {groups}"] = {"sweep": sweep, "models": models}
        report = {**results, "settings": vars(args), "environment": environment().model_dump()}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
