"""Time to first token with shared softmax maps, and with the other ways to share or drop, at 8B shape.

    python benchmarks/gpu/uniattn.py --json FILE [--dry-run]

UniAttn shares maps in blocks of four layers (the method's example); CLA shares keys and values of the same layers, and
drop removes the attention of those that share. *eager* keeps a map until its last reader; *eager, recomputed* builds it
again from the shared queries and keys, as SDPA does without a map. Each way runs in turns with the plain decoder under
the same attention, with weights drawn at random; peaks are of one prompt, above the weights.
"""

from collections.abc import Callable

import torch
from common import SHAPE_8B, TINY, arguments, build, freed, in_turns, peak_bytes, resumed, save
from steps import prompt

from crosslayer.core.decoder.attention import CrossLayerAttention
from crosslayer.core.methods import method_class, to_entry


def methods(layers: int) -> dict[str, list]:
    """Return the ways to share or drop by name, all with the same groups of layers."""
    shared = method_class("uniattn").example(layers)
    groups = [list(group) for group in shared.superblocks]
    readers = [layer for group in groups for layer in group[1:]]
    return {
        "uniattn, blocks of 4": [to_entry(shared)],
        "cla, the same groups": [{"name": "cla", "groups": groups}],
        "drop, the same readers": [{"name": "drop", "attention": readers}],
    }


def attend(model, way: str) -> None:
    """Set how a model attends: "sdpa", "eager", or "eager, recomputed"."""
    model.set_attn_implementation(way.split(",")[0])
    for module in model.modules():
        if isinstance(module, CrossLayerAttention):
            module.shares_map = way == "eager" and module.has_map_readers


def peak(call: Callable[[], object], device: str) -> int | None:
    """Return the most memory that a call takes above what is allocated before it, None on a CPU."""
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    peak_bytes(device)
    call()
    most = peak_bytes(device)
    return None if most is None else most - before


def main():
    """Measure the shortest prompts first, for all methods; write the file after each row."""
    options = arguments(__doc__).parse_args()
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    shape, lengths, pairs = SHAPE_8B, (2048, 4096, 8192), 5
    if options.dry_run:
        shape, lengths, pairs = {**TINY, "num_hidden_layers": 12}, (64, 128), 2
    record = resumed(options.json, shape=shape)
    plain = build(shape, [], device, dtype)
    for name, entries in methods(shape["num_hidden_layers"]).items():
        model = build(shape, entries, device, dtype)
        for module in model.modules():
            if isinstance(module, CrossLayerAttention):
                module.has_map_readers = module.shares_map
        ways = ("sdpa", "eager", "eager, recomputed") if name.startswith("uniattn") else ("sdpa", "eager")
        for length in lengths:
            ids = torch.randint(0, shape["vocab_size"], (1, length), device=device)
            for way in ways:
                key = f"{name}, {length} tokens, {way}"
                if key in record["rows"]:
                    continue
                attend(model, way)
                plain.set_attn_implementation(way.split(",")[0])
                pair = {"plain": plain, name: model}
                row = in_turns({one: lambda m=m, i=ids: prompt(m, i, device) for one, m in pair.items()}, pairs)
                for one, m in pair.items():
                    row[one]["peak_bytes"] = peak(lambda m=m, i=ids: prompt(m, i, device), device)
                record["rows"][key] = row
                print(key, row, flush=True)
                save(options.json, record)
        del model
        freed(device)


if __name__ == "__main__":
    main()
