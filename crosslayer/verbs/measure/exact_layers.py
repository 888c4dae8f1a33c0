"""Which layers of a quantized cache to leave in 16 bits: those whose quantization alone costs the most KL.

KLs of single layers need not add up to that of the whole cache, so the choice is measured as a candidate of its own.
"""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from crosslayer.cache.running import checked_plan, stored_kinds
from crosslayer.judge.candidate import BITS, Candidate, candidate_of
from crosslayer.judge.judge import Judge
from crosslayer.judge.report import Row
from crosslayer.judge.rows import window_rows
from crosslayer.output.formatting import named_layers, ranges
from crosslayer.wiring.kv_bits import parse_kv_bits

# Windows on which layers are compared. Each layer costs a pass over them, and only their order counts: what the chosen
# layers save is measured on all windows.
FEW = 12
PRICE = "KL of a layer"


def quantizable(model: PreTrainedModel) -> list[int]:
    """Return the layers that a quantized cache quantizes: those that store keys or values of all tokens."""
    bits = parse_kv_bits("8")
    return [layer for layer, kind in enumerate(stored_kinds(checked_plan(model, None, bits), bits)) if kind]


def exact_layers(
    judge: Judge, candidates: Sequence[Candidate], count: int, seed: int = 0
) -> tuple[list[Candidate], list[Row]]:
    """Return another candidate for each quantized cache, with `count` layers exact, and the KL of each layer."""
    assert judge.windows is not None
    kinds = [candidate.name for candidate in candidates if candidate.name in BITS]
    layers = quantizable(judge.original)
    if count >= len(layers):
        raise ValueError(f"`exact_layers` must be below {len(layers)}, the layers that are quantized, got {count}")
    # Spread over all windows, so that every domain has some.
    few = judge.windows.take(range(0, len(judge.windows), -(-len(judge.windows) // FEW)))
    made: list[Candidate] = []
    rows: list[Row] = []
    for kind in kinds:
        alone = [candidate_of(f"{BITS[kind]}@{layer}", str(layer)) for layer in layers]
        # A judge of its own, whose failures do not mark the candidates of the command. A layer that fails raises, since
        # the order would be one of the others.
        by_layer = Judge(judge.original, few, judge.tokenizer, catches=False)
        for layer, losses in by_layer.kl(alone, f"measuring the KL of {kind} by layer").items():
            whole = window_rows(kind, losses, seed)[0]  # the KL of all windows
            rows.append(whole.model_copy(update={"quantity": PRICE, "scope": f"layer {layer}"}))
        exact = dearest(prices(rows)[kind], count)
        quantized = ranges(layer for layer in layers if layer not in exact).split(", ")
        text = ",".join(f"{BITS[kind]}@{part}" for part in quantized)
        made.append(candidate_of(text, f"{kind}, {named_layers(exact)} exact"))
    return made, rows


def prices(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return the KL of quantizing each layer alone, by candidate."""
    costs: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.quantity == PRICE:
            costs.setdefault(row.candidate, {})[int(row.scope.removeprefix("layer "))] = row.value or 0.0
    return costs


def dearest(costs: Mapping[int, float], count: int) -> list[int]:
    """Return the layers that cost the most."""
    return sorted(sorted(costs, key=lambda layer: costs[layer])[-count:])


def flags(costs: Mapping[int, float], kind: str, count: int) -> str:
    """Return vLLM's options that leave `count` layers of an fp8 cache in 16 bits; empty for other bits."""
    exact = dearest(costs, count)
    total = sum(costs.values())
    # The sum is zero where the windows are too short for tokens to be quantized.
    if kind != "fp8" or total <= 0:
        return ""
    skipped = " ".join(map(str, exact))
    share = sum(costs[layer] for layer in exact) / total
    return f"vLLM: --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers {skipped} ({share:.0%} of the layers' KL)"
