"""What a training run costs, from its model and its machine: FLOPs, bytes of keys and values, and memory.

Of memory it is the least, from shapes alone, so that what cannot fit is said and not tried:

weights + gradients + states of the optimizer   4 bytes a parameter each; Adam has two states
+ rows of a step                                24 bytes a token
+ activations of a batch                        4 hidden states a layer (1 with checkpointing), logits twice
                                                (of a batch without them: of as many tokens as have them at once)
"""

import statistics
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, TrainingArguments

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.decoder.modeling import AT_ONCE
from crosslayer.core.transformers_versions import OLD_ARGUMENTS
from crosslayer.models.load import resolve_dtype
from crosslayer.probe.intercept import evaluating
from crosslayer.verbs.bench.costs import attentions
from crosslayer.verbs.bench.machine import seconds
from crosslayer.verbs.bench.memory import free_memory
from crosslayer.verbs.train.arguments import step_sequences
from crosslayer.verbs.train.recipe import Recipe
from crosslayer.verbs.train.record import TrainedModel
from crosslayer.wiring.read import read_plan

PASSES = 3  # a backward pass costs two forward passes
COUNTED = 128  # tokens of the longer sequence over which FLOPs are counted
ROWS, MANY_ROWS = 1024, 8192  # of the square matrices whose product is timed: on a CPU, on an accelerator
FLOAT, ROW = 4, 24  # bytes: of a number in float32; of a token's id, position and label
LOGITS = 2**30  # numbers; a batch that has more goes without them
ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")


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
    of_token = {}
    with torch.no_grad(), evaluating(model), sdpa_kernel(SDPBackend.MATH):  # plain products; others have no count
        for count in (shorter, longer):
            with FlopCounterMode(display=False) as counter:
                model(torch.zeros(1, count, dtype=torch.long), use_cache=False)
            of_token[count] = counter.get_total_flops() / count
    growth = (of_token[longer] - of_token[shorter]) / (longer - shorter)
    return of_token[longer] + growth * (length - longer)


def without_logits(config: Any, args: TrainingArguments, tokens: int) -> dict[str, bool]:
    """Return what asks a model for the loss of that many tokens without logits of all of them, where those are many.

    Compiled models make all logits: the graph breaks where parts are recomputed.
    """
    ours = isinstance(config, CrossLayerConfig) and not args.torch_compile
    return {"skip_logits": True} if ours and tokens * config.vocab_size > LOGITS else {}


def check_room(model: PreTrainedModel, recipe: Recipe, args: TrainingArguments) -> None:
    """Refuse a run that cannot fit into what is free.

    The model may be on the meta device; where it has memory, that is taken already and not counted. With Muon matrices
    have one state of the optimizer instead of two.
    """
    text, length = model.config.get_text_config(), recipe.data.length
    count = sum(parameter.numel() for parameter in model.parameters())
    there = sum(parameter.nbytes for parameter in model.parameters() if parameter.device.type == args.device.type)
    copies = 2 if args.optim not in ADAM else 3 if recipe.optimizer.name == "muon" else 4
    elsewhere = args.deepspeed or "offload" in str(args.fsdp)  # which lay some of it in other memory
    states = 0 if elsewhere else FLOAT * count * copies / (args.world_size if args.fsdp else 1)
    width = 2 if args.bf16 or args.fp16 else FLOAT
    checkpointing = "activation_checkpointing"
    kept = 1 if vars(args)[OLD_ARGUMENTS.get(checkpointing, checkpointing)] else 4
    tokens = length * args.train_batch_size
    judged = AT_ONCE if without_logits(model.config, args, tokens) else 0 if args.use_liger_kernel else tokens
    batch = (
        tokens * kept * width * text.num_hidden_layers * text.hidden_size
        + judged * 2 * FLOAT * text.vocab_size
        + length * ROW * step_sequences(args) // args.world_size
    )
    free = free_memory(args.device)
    if max(0, states - there) + batch > free:
        raise ValueError(
            f"training takes at least {states / 1e9:,.1f} GB for {count:,} parameters (weights, gradients, optimizer) "
            f"and {batch / 1e9:,.1f} GB for {args.train_batch_size:,} sequences of {length:,} tokens at once, "
            f"{step_sequences(args):,} in a step; {free / 1e9:,.1f} GB are free here: use a smaller model or batch, or "
            "a smaller data.length"
        )
