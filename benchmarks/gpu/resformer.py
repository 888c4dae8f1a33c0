"""Sinks, value drains and entropy while models of 20M parameters train: vanilla, ResFormer and SVFormer.

    python benchmarks/gpu/resformer.py --tokens FILE.npy --json FILE [--dry-run]
    python benchmarks/gpu/resformer.py --prepare FOLDER --tokens FILE.npy

The title of arXiv 2410.17897 says that value residuals alleviate attention concentration. All variants see the same
batches in the same order and start from the same seed. `--prepare` makes the tokens: a BPE of 8,192 entries trained on
the texts of a folder (.txt or .txt.xz), then up to ten million tokens of its documents in random order.
"""

import lzma
import math
import random
from pathlib import Path

import numpy as np
import torch
from common import TINY, arguments, build, save, seconds

from crosslayer.verbs.diagnose.sequence import measure_sequence

SHAPE = {
    "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
VARIANTS = {
    "vanilla": [],
    "resformer, learnable": [{"name": "resformer", "mode": "learnable"}],
    "svformer": ["svformer"],
    "resformer, identity": [{"name": "resformer", "mode": "identity"}],
}
MEASURES = ("sink_rate", "first_token_share", "value_norm_ratio", "hidden_norm_ratio", "entropy")
MOST = 10_000_000


def prepare(folder: Path, file: Path) -> None:
    """Train a BPE on the texts of a folder and write their tokens as uint16."""
    from tokenizers import ByteLevelBPETokenizer

    texts = []
    for path in sorted(folder.glob("*.txt*")):
        raw = path.read_bytes()
        raw = lzma.decompress(raw) if path.suffix == ".xz" else raw
        texts.append([part.strip() for part in raw.decode().split("<|doc|>") if part.strip()])
    pieces = [
        document[start : start + 20000]
        for documents in texts
        for document in documents
        for start in range(0, len(document), 20000)
    ]
    random.Random(0).shuffle(pieces)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(pieces[:1000], vocab_size=SHAPE["vocab_size"], special_tokens=["<|doc|>"])
    ids: list[int] = []
    for piece in pieces:
        ids += [0, *tokenizer.encode(piece).ids]
        if len(ids) >= MOST:
            break
    np.save(file, np.array(ids[:MOST], dtype=np.uint16))


def windows(tokens: np.ndarray, length: int, held_out: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows (N, T) to train on, shuffled, and those held out; all begin with token 0, as after a BOS token."""
    count = len(tokens) // (length - 1)
    table = torch.from_numpy(tokens[: count * (length - 1)].astype(np.int64).reshape(count, length - 1))
    table = torch.nn.functional.pad(table, (1, 0))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return table[order[held_out:]], table[order[:held_out]]


@torch.no_grad()
def measured(model, held_out, device) -> dict:
    """Return loss and the measures (L,) averaged over held-out windows."""
    model.eval()
    ids = held_out.to(device)
    loss = model.forward(ids, labels=ids, use_cache=False).loss.item()  # not compiled, as what probes see
    rows = [measure_sequence(model, ids).measures for ids in held_out[:8]]
    names = [name for name in MEASURES if name in rows[0]]
    return {"loss": loss, **{name: np.mean([row[name] for row in rows], axis=0).tolist() for name in names}}


def train(model, table, held_out, steps, batch, device, record_at) -> list[dict]:
    """Train with AdamW and a cosine schedule; return what was measured, by step."""
    if device == "cuda":
        model.compile()  # a step of this size is mostly launches
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    warmup, history = max(1, steps // 20), []
    for step in range(steps + 1):
        if step in record_at:
            history.append({"step": step, **measured(model, held_out, device)})
        if step == steps:
            return history
        rate = min(1, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rate
        model.train()
        rows = torch.arange(step * batch, (step + 1) * batch) % len(table)
        ids = table[rows].to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    raise AssertionError


def main():
    """Train every variant; write the file after each."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=Path, help="uint16 tokens, .npy; --dry-run draws some at random")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make --tokens from the texts of a folder")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of the texts")
    options = parser.parse_args()
    if options.prepare:
        prepare(options.prepare, options.tokens)
        return
    device = "cpu" if options.dry_run else "cuda"
    shape, length, steps, batch = (TINY, 32, 4, 2) if options.dry_run else (SHAPE, 512, 1500, 64)
    if options.dry_run:
        tokens = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint16)
    else:
        tokens = np.load(options.tokens, allow_pickle=False)
    table, held_out = windows(tokens, length, held_out=16, seed=options.seed)
    record_at = {0, steps} | {step for step in (50, 100, 200, 400, 800) if step < steps}
    record = {"seed": options.seed, "shape": shape, "length": length, "steps": steps, "batch": batch}
    record |= {"tokens": len(tokens), "rows": {}}
    for name, methods in VARIANTS.items():
        model = build(shape, methods, device, torch.float32, options.seed)
        kept: list[list[dict]] = []
        taken = seconds(
            lambda m=model, k=kept: k.append(train(m, table, held_out, steps, batch, device, record_at)), device
        )
        record["rows"][name] = {"seconds": taken, "history": kept[0]}
        print(name, taken, kept[0][-1]["loss"], flush=True)
        save(options.json, record)


if __name__ == "__main__":
    main()
