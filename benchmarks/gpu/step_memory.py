"""Peak memory of a 7B training step with and without Attention Residuals, without a GPU and without data.

    python benchmarks/gpu/step_memory.py [--tokens 4096] [--dry-run] [--json FILE]

Forward and backward pass run on tensors that have shapes and no memory, in bfloat16, and torch's tracker counts what
would be allocated: parameters, gradients, activations. The optimizer's state, the same for all, is left out.
"""

import argparse
import json
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers.initialization import no_init_weights

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM

SHAPE = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
TINY = {**SHAPE, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
BLOCKS = 8
METHODS = {
    "plain": lambda layers: [],
    "attnres": lambda layers: ["attnres"],
    "attnres, 8 blocks": lambda layers: [{"name": "attnres", "block": max(1, 2 * layers // BLOCKS)}],
}


def peak(shape: dict, methods: list, tokens: int, checkpointing: bool) -> int:
    """Return the peak memory of a forward and a backward pass over one sequence, in bytes."""
    tracker = MemTracker()
    with FakeTensorMode(), no_init_weights(), tracker:
        torch.set_default_dtype(torch.bfloat16)
        model = CrossLayerForCausalLM(CrossLayerConfig(**shape, cross_layer=methods)).train()
        torch.set_default_dtype(torch.float32)
        tracker.track_external(model)
        if checkpointing:
            model.activation_checkpointing_enable()
        ids = torch.zeros(1, tokens, dtype=torch.long)
        masks = dict.fromkeys(model.config.layer_types)
        model(ids, labels=ids, attention_mask=masks, use_cache=False, skip_logits=True).loss.backward()
        by_device = tracker.get_tracker_snapshot("peak")
    return by_device[torch.device("cpu")]["Total"]


def rows(shape: dict, tokens: int, names: Iterable[str] = METHODS) -> list[dict]:
    """Return the peak of methods, with and without checkpointing, and what it is more than the plain decoder's."""
    result = []
    source = 2 * tokens * shape["hidden_size"]
    for checkpointing in (False, True):
        plain = None
        for name in names:
            used = peak(shape, METHODS[name](shape["num_hidden_layers"]), tokens, checkpointing)
            plain = used if plain is None else plain
            row = {"method": name, "checkpointing": checkpointing, "peak_bytes": used}
            result.append({**row, "ratio": used / plain, "more_in_sources": (used - plain) / source})
    return result


def main():
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent.parent / "results" / "step_memory.json")
    options = parser.parse_args()
    shape, tokens = (TINY, 64) if options.dry_run else (SHAPE, options.tokens)
    table = rows(shape, tokens)
    print("| method | checkpointing | peak | of the plain decoder's | more, in sources |\n|---|---|---|---|---|")
    for row in table:
        used = f"{row['peak_bytes'] / 1e9:.2f} GB | {row['ratio']:.3f} | {row['more_in_sources']:+.1f}"
        print(f"| {row['method']} | {row['checkpointing']} | {used} |")
    record = {"date": str(date.today()), "torch": torch.__version__, "shape": shape, "tokens": tokens, "rows": table}
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
