"""Models that train on the same batches, and what is measured inside them on the way, in parts of a few minutes.

    python benchmarks/gpu/training_dynamics.py EXPERIMENT --tokens FILE.npy --json FILE [--seconds 220] [--dry-run]
    python benchmarks/gpu/training_dynamics.py EXPERIMENT --tokens FILE.npy --prepare FOLDER [--most 20000000]

resformer: sinks, value drains and entropy in vanilla, ResFormer and SVFormer; the title of arXiv 2410.17897 says that
value residuals alleviate attention concentration. equation7: ResFormer's Eq. 7 (mode identity), NeuTRENO and vanilla,
150M tokens; like those before, of 24M parameters. attnres: norms of outputs and gradients over depth in vanilla and
Attention Residuals (arXiv 2603.15031), 24 layers × 384 and 60M tokens. depth: the connections that
docs/results/depth.md compares at 0.46M and 2.1M parameters, at 24M, with a learning rate that stays constant after the
warm-up and a held-out loss every 100 steps, so that speedups can be read.

All variants begin with the same seed and see the same rows in the same order. A run that is not through after
--seconds leaves a checkpoint beside FILE, and the next call continues from it. `--prepare` makes the tokens: a BPE of
8,192 entries trained on the texts of a folder (.txt or .txt.xz), then up to --most tokens of its documents in random
order; `epochs` in the record says how often they were read.
"""

import json
import lzma
import math
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import TINY, arguments, build, resumed, save
from safetensors.torch import load_file, save_file

from crosslayer.probe.depth import output_norms
from crosslayer.verbs.diagnose.sequence import measure_sequence

SHAPE = {
    "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
INSIDE = ("sink_rate", "first_token_share", "value_norm_ratio", "hidden_norm_ratio", "entropy", "token_similarity")
OUTPUTS = ("attention_output_norm", "mlp_output_norm", "attention_gradient_norm", "mlp_gradient_norm")
LENGTH, BATCH = 512, 64


@dataclass(frozen=True)
class Experiment:
    """Variants of a shape, the steps of `BATCH` rows of `LENGTH` tokens that each takes, and what is measured."""

    variants: dict[str, list]
    steps: int
    rate: float = 2e-3
    shape: dict | None = None
    outputs: bool = False
    constant: bool = False  # the rate after the warm-up
    every: int = 0  # also evaluate the held-out loss alone after each so many steps; 0: never


EXPERIMENTS = {
    "resformer": Experiment(
        {
            "vanilla": [],
            "resformer, learnable": [{"name": "resformer", "mode": "learnable"}],
            "svformer": ["svformer"],
            "resformer, identity": [{"name": "resformer", "mode": "identity"}],
        },
        steps=1500,
    ),
    "equation7": Experiment(
        {
            "vanilla": [],
            "resformer, identity (Eq. 7)": [{"name": "resformer", "mode": "identity"}],
            "neutreno": ["neutreno"],
        },
        steps=4578,  # 150M tokens
    ),
    "attnres": Experiment(
        {"vanilla": [], "attnres": ["attnres"], "attnres, 8 blocks": [{"name": "attnres", "block": 6}]},
        steps=1831,  # 60M tokens
        shape={**SHAPE, "num_hidden_layers": 24},
        outputs=True,
    ),
    "depth": Experiment(
        {
            "vanilla": [],
            "attnres, blocks of 2": [{"name": "attnres", "block": 2}],
            "mudd": ["mudd"],
            "denseformer": ["denseformer"],
            "resformer, learnable": ["resformer"],
            "hyper-connections (mHC)": ["hyper_connections"],
        },
        steps=1831,  # 60M tokens
        constant=True,
        every=100,
    ),
}


def prepare(folder: Path, file: Path, most: int) -> None:
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
        if len(ids) >= most:
            break
    np.save(file, np.array(ids[:most], dtype=np.uint16))


def windows(tokens: np.ndarray, length: int, held_out: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows (N, T) to train on, shuffled, and those held out; all begin with token 0, as after a BOS token."""
    count = len(tokens) // (length - 1)
    table = torch.from_numpy(tokens[: count * (length - 1)].astype(np.int64).reshape(count, length - 1))
    table = torch.nn.functional.pad(table, (1, 0))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return table[order[held_out:]], table[order[:held_out]]


@torch.no_grad()
def held_out_loss(model, held_out, device) -> float:
    """Return the loss on held-out windows, of the model as probes see it: not compiled."""
    model.eval()
    ids = held_out.to(device)
    return model.forward(ids, labels=ids, use_cache=False).loss.item()


def measured(model, held_out, device, outputs: bool) -> dict:
    """Return loss and the measures (L,) averaged over held-out windows."""
    loss = held_out_loss(model, held_out, device)
    with torch.no_grad():
        rows = [measure_sequence(model, ids).measures for ids in held_out[:8]]
    names = [name for name in INSIDE if name in rows[0]]
    if outputs:
        rows = [{**row, **output_norms(model, ids)} for row, ids in zip(rows, held_out[:8], strict=True)]
        names += OUTPUTS
        model.zero_grad(set_to_none=True)
    return {"loss": loss, **{name: np.mean([row[name] for row in rows], axis=0).tolist() for name in names}}


class Training:
    """A variant in training, which can stop after any step and continue from its checkpoint."""

    def __init__(self, model, experiment: Experiment, checkpoint: Path, device: str):
        self.model, self.experiment, self.checkpoint, self.device = model, experiment, checkpoint, device
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=experiment.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
        )
        self.step, self.seconds, self.history = 0, 0.0, []
        if device == "cuda":
            model.compile()  # a step of this size is mostly launches
        if checkpoint.exists():
            self.load()

    def run(self, table, held_out, batch: int, record_at: set[int], until: float) -> bool:
        """Train to the last step, or until a time; return whether it is through."""
        steps = self.experiment.steps
        while True:
            new = not self.history or self.history[-1]["step"] < self.step
            if new and self.step in record_at:
                outputs = self.experiment.outputs
                self.history.append({"step": self.step, **measured(self.model, held_out, self.device, outputs)})
            elif new and self.experiment.every and self.step % self.experiment.every == 0:
                self.history.append({"step": self.step, "loss": held_out_loss(self.model, held_out, self.device)})
            if self.step >= steps:
                return True
            if time.monotonic() > until:
                return False
            started = time.monotonic()
            self.take(table, batch, steps)
            self.seconds += time.monotonic() - started

    def take(self, table, batch: int, steps: int) -> None:
        """Take a step: warm-up over a twentieth of all, then a cosine to a tenth of the rate, or a constant one."""
        warmup = max(1, steps // 20)
        decay = 1 if self.experiment.constant else 0.55 + 0.45 * math.cos(math.pi * self.step / steps)
        rate = min(1, (self.step + 1) / warmup) * decay
        for group in self.optimizer.param_groups:
            group["lr"] = self.experiment.rate * rate
        self.model.train()
        rows = torch.arange(self.step * batch, (self.step + 1) * batch) % len(table)
        ids = table[rows].to(self.device, non_blocking=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def save(self) -> None:
        """Write weights, moments and history."""
        tensors = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"{key}/{name}": value.contiguous() for key, value in state.items()}
            tensors[f"weight/{name}"] = parameter.detach().contiguous()
        metadata = {"step": self.step, "seconds": self.seconds, "history": self.history}
        save_file(tensors, self.checkpoint, metadata={"run": json.dumps(metadata)})

    def load(self) -> None:
        """Continue where a checkpoint was written."""
        from safetensors import safe_open

        with safe_open(self.checkpoint, "pt") as file:
            run = json.loads(file.metadata()["run"])
        self.step, self.seconds, self.history = run["step"], run["seconds"], run["history"]
        for key, value in load_file(self.checkpoint, device=self.device).items():
            kind, _, name = key.partition("/")
            parameter = self.parameters[name]
            if kind == "weight":
                parameter.data.copy_(value)
            else:
                value = value.cpu() if kind == "step" and self.device == "cpu" else value
                self.optimizer.state.setdefault(parameter, {})[kind] = value


def main():
    """Train the variants of an experiment one after another, as far as the time goes; write the file after each."""
    parser = arguments(__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--tokens", type=Path, help="uint16 tokens, .npy; --dry-run draws some at random")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make --tokens from the texts of a folder")
    parser.add_argument("--most", type=int, default=20_000_000, help="tokens that --prepare makes at most")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of the texts")
    parser.add_argument("--seconds", type=float, default=220, help="stop after this time, with a checkpoint")
    options = parser.parse_args()
    if options.prepare:
        prepare(options.prepare, options.tokens, options.most)
        return
    until = time.monotonic() + options.seconds
    experiment, length, batch = EXPERIMENTS[options.experiment], LENGTH, BATCH
    shape, device = experiment.shape or SHAPE, "cpu" if options.dry_run else "cuda"
    if options.dry_run:
        experiment = replace(experiment, steps=4, every=min(experiment.every, 2))
        layers = 12 if options.experiment == "attnres" else 4
        shape, length, batch = {**TINY, "num_hidden_layers": layers}, 32, 2
        tokens = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint16)
    else:
        tokens = np.load(options.tokens, allow_pickle=False)
    table, held_out = windows(tokens, length, held_out=16, seed=options.seed)
    steps = experiment.steps
    record_at = {0, steps} | {step for step in (50, 100, 200, 400, 800, 1500, 3000) if step < steps}
    record = resumed(options.json, seed=options.seed, shape=shape, length=length, steps=steps, batch=batch)
    record |= {"tokens": len(tokens), "epochs": steps * batch / len(table)}
    for name, methods in experiment.variants.items():
        if name in record["rows"]:
            continue
        model = build(shape, methods, device, torch.float32, options.seed)
        checkpoint = options.json.with_name(f"{options.json.stem}-checkpoint.safetensors")
        training = Training(model, experiment, checkpoint, device)
        if not training.run(table, held_out, batch, record_at, until):
            training.save()
            print(f"{name}: step {training.step} of {steps}; call again to continue", flush=True)
            return
        checkpoint.unlink(missing_ok=True)
        record["rows"][name] = {"seconds": training.seconds, "history": training.history}
        print(name, training.seconds, training.history[-1]["loss"], flush=True)
        save(options.json, record)


if __name__ == "__main__":
    main()
