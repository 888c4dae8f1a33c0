"""What a run takes of memory at the least, from its shapes alone, so that what cannot fit is said and not tried.

weights + gradients + states of the optimizer   4 bytes a parameter each; Adam has two states
+ rows of a step                                24 bytes a token
+ activations of a batch                        4 hidden states a layer (1 with checkpointing), logits twice
                                                (of a batch without them: of as many tokens as have them at once)
"""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, TrainingArguments

from crosslayer.core.decoder import CrossLayerConfig
from crosslayer.core.decoder.modeling import AT_ONCE
from crosslayer.core.transformers_versions import OLD_ARGUMENTS
from crosslayer.verbs.bench.memory import free_memory
from crosslayer.verbs.train.resuming import step_sequences

FLOAT, ROW = 4, 24  # bytes: of a number in float32; of a token's id, position and label
LOGITS = 2**30  # numbers; a batch that has more goes without them
ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")


def without_logits(config: Any, args: TrainingArguments, tokens: int) -> dict[str, bool]:
    """Return what asks a model for the loss of that many tokens without logits of all of them, where those are many.

    Compiled models make all logits: the graph breaks where parts are recomputed.
    """
    ours = isinstance(config, CrossLayerConfig) and not args.torch_compile
    return {"skip_logits": True} if ours and tokens * config.vocab_size > LOGITS else {}


def check_room(
    model: nn.Module, config: PreTrainedConfig, args: TrainingArguments, length: int, muon: bool = False
) -> None:
    """Refuse a run that cannot fit into what is free.

    Args:
        model: on the meta device, or with memory; that is free no more, and is not counted.
        config: the model's.
        args: of the run.
        length: tokens of a sequence.
        muon: whether matrices have one state of the optimizer instead of two.

    Raises:
        ValueError: it does not fit; the message says what it would take, and what is free.

    """
    text = config.get_text_config()
    count = sum(parameter.numel() for parameter in model.parameters())
    there = sum(parameter.nbytes for parameter in model.parameters() if parameter.device.type == args.device.type)
    copies = 2 if args.optim not in ADAM else 3 if muon else 4
    elsewhere = args.deepspeed or "offload" in str(args.fsdp)  # which lay some of it in other memory
    states = 0 if elsewhere else FLOAT * count * copies / (args.world_size if args.fsdp else 1)
    width = 2 if args.bf16 or args.fp16 else FLOAT
    checkpointing = "activation_checkpointing"
    kept = 1 if vars(args)[OLD_ARGUMENTS.get(checkpointing, checkpointing)] else 4
    tokens = length * args.train_batch_size
    judged = AT_ONCE if without_logits(config, args, tokens) else 0 if args.use_liger_kernel else tokens
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
