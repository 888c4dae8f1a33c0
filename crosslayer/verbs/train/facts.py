"""What a training run costs, from its model and its machine: FLOPs, bytes of keys and values, speed of matrices."""

import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.models.load import resolve_dtype
from crosslayer.probe.intercept import evaluating
from crosslayer.verbs.bench.costs import attentions
from crosslayer.verbs.bench.machine import seconds
from crosslayer.verbs.train.record import TrainedModel
from crosslayer.wiring.read import read_plan

PASSES = 3  # a backward pass costs two forward passes
COUNTED = 128  # tokens of the longer sequence over which FLOPs are counted
ROWS, MANY_ROWS = 1024, 8192  # of the square matrices whose product is timed: on a CPU, on an accelerator


def trained_model(model: PreTrainedModel, length: int) -> TrainedModel:
    """Return what is trained, and what it costs over sequences of `length` tokens."""
    plan = read_plan(model, length)
    with evaluating(model):
        elements = sum(layer.read(length) for layer in attentions(model))
    dtype = resolve_dtype(plan.dtype, model.device)
    assert isinstance(dtype, torch.dtype)
    methods = model.config.cross_layer if isinstance(model, CrossLayerForCausalLM) else []
    return TrainedModel(  # pyright: ignore[reportCallIssue]
        class_=type(model).__name__,
        methods=[dict(entry) if isinstance(entry, dict) else {"name": entry} for entry in methods],
        layers=model.config.get_text_config().num_hidden_layers,
        parameters=model.num_parameters(),
        flops_per_token=PASSES * _forward_flops(model, length),
        kv_bytes_per_token=plan.stored_bytes / length,
        kv_read_bytes_per_token=elements * dtype.itemsize / length,
        dtype=plan.dtype,
    )


def matrix_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large product of square matrices, the median of five."""
    rows = ROWS if device.type == "cpu" else MANY_ROWS
    left = torch.full((rows, rows), 0.5, device=device, dtype=dtype)
    right = left.clone()
    times = [seconds(lambda: left @ right, device) for _ in range(6)]
    return 2 * rows**3 / statistics.median(times[1:])  # the first is slower


def _forward_flops(model: PreTrainedModel, length: int) -> float:
    """Return the FLOPs of a token in a forward pass over a sequence, attention without its mask.

    They are counted over short sequences and continued: maps cost every token the same, attention as much more as the
    sequence is longer.
    """
    longer = min(length, COUNTED)
    shorter = longer // 2
    of_token = {count: _counted(model, count) / count for count in (shorter, longer)}
    growth = (of_token[longer] - of_token[shorter]) / (longer - shorter)
    return of_token[longer] + growth * (length - longer)


def _counted(model: PreTrainedModel, count: int) -> int:
    """Return the FLOPs of a forward pass over so many tokens; by plain products, since others have no count."""
    ids = torch.zeros(1, count, dtype=torch.long)
    with torch.no_grad(), evaluating(model), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    return counter.get_total_flops()
