"""The costs of a training run: FLOPs, KV cache bytes, and memory.

The memory is a lower bound from shapes, so that a run that cannot fit is refused before it starts:

weights + gradients + optimizer states   4 bytes per parameter each; Adam has two states
+ rows of a step                         24 bytes per token
+ activations of a batch                 4 hidden states per layer (1 with checkpointing), logits twice
                                         (if the loss is computed in chunks: logits of one chunk)
"""

import json
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, TrainingArguments

from crosslayer.core.checkpointing import OLD_ARGUMENTS
from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.modeling import AT_ONCE
from crosslayer.machine import free_memory
from crosslayer.probe.model import evaluating
from crosslayer.training.arguments import step_sequences
from crosslayer.training.record import TrainedModel
from crosslayer.wiring.read import model_plan

PASSES = 3  # a backward pass costs two forward passes
# tokens of the longer sequence over which FLOPs are counted: they are linear in it, and counting runs the model
COUNTED = 128
FLOAT, ROW = 4, 24  # bytes: of a number in float32; of a token's id, position and label
# numbers; for a batch with more (4 GB in float32), the loss is computed in chunks
LOGITS = 2**30
ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")


def trained_model(model: PreTrainedModel, length: int) -> TrainedModel:
    """Return the properties and costs of a model, over sequences of `length` tokens.

    FLOPs are those of attention over all positions, masked or not. They are counted on two short sequences and
    extrapolated: linear layers cost each token the same, and attention grows linearly with the length.
    """
    plan = model_plan(model, length)
    longer = min(length, COUNTED)
    shorter = longer // 2
    flops = {}  # of a token in the forward pass, by the length of the sequence
    # the FLOP counter knows only this kernel
    with torch.no_grad(), evaluating(model), sdpa_kernel(SDPBackend.MATH):
        for count in (shorter, longer):
            with FlopCounterMode(display=False) as counter:
                model(torch.zeros(1, count, dtype=torch.long, device=model.device), use_cache=False)
            flops[count] = counter.get_total_flops() / count
    growth = (flops[longer] - flops[shorter]) / (longer - shorter)
    methods = model.config.cross_layer if isinstance(model.config, CrossLayerConfig) else []
    return TrainedModel(
        class_=type(model).__name__,
        methods=json.loads(json.dumps(methods)),  # tuples become lists, as in a record that is read again
        layers=model.config.get_text_config().num_hidden_layers,
        parameters=model.num_parameters(),
        flops_per_token=PASSES * (flops[longer] + growth * (length - longer)),
        kv_bytes_per_token=plan.kv_bytes / length,
        kv_read_bytes_per_token=plan.read_bytes / length,
        dtype=plan.dtype,
    )


def without_logits(config: Any, args: TrainingArguments, tokens: int) -> dict[str, bool]:
    """Return the arguments that make a model compute the loss of that many tokens in chunks, if logits are too large.

    Compiled models compute all logits at once, since recomputing chunks would break the graph.
    """
    ours = isinstance(config, CrossLayerConfig) and not args.torch_compile
    return {"skip_logits": True} if ours and tokens * config.vocab_size > LOGITS else {}


def check_memory(model: PreTrainedModel, args: TrainingArguments, length: int) -> None:
    """Refuse a run on sequences of `length` tokens that cannot fit into free memory.

    The model may be on the meta device; parameters that are on the device already are not counted again.
    """
    text = model.config.get_text_config()
    count = sum(parameter.numel() for parameter in model.parameters())
    allocated = sum(parameter.nbytes for parameter in model.parameters() if parameter.device.type == args.device.type)
    copies = 4 if args.optim in ADAM else 2
    # these move some of it to other memory; a bound that is too high would refuse runs that fit
    elsewhere = args.deepspeed or "offload" in str(args.fsdp)
    states = 0 if elsewhere else FLOAT * count * copies / (args.world_size if args.fsdp else 1)

    width = 2 if args.bf16 or args.fp16 else FLOAT
    checkpointing = "activation_checkpointing"
    states_per_layer = 1 if vars(args)[OLD_ARGUMENTS.get(checkpointing, checkpointing)] else 4
    tokens = length * args.train_batch_size
    predicted = 0 if args.use_liger_kernel else tokens  # tokens whose logits are in memory at once
    if without_logits(model.config, args, tokens):
        predicted = AT_ONCE
    batch = (
        tokens * states_per_layer * width * text.num_hidden_layers * text.hidden_size
        + predicted * 2 * FLOAT * text.vocab_size
        + length * ROW * step_sequences(args) // args.world_size
    )
    free = free_memory(args.device)
    if max(0, states - allocated) + batch > free:
        raise ValueError(
            f"training needs at least {states / 1e9:,.1f} GB for {count:,} parameters (weights, gradients, optimizer) "
            f"and {batch / 1e9:,.1f} GB for a batch of {args.train_batch_size:,} sequences of {length:,} tokens "
            f"({step_sequences(args):,} per step), but {free / 1e9:,.1f} GB are free; use a smaller model, batch or "
            "data.length"
        )
