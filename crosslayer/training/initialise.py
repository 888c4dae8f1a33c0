"""The model that a run starts from: an existing one, or a new one with paired initial weights.

Each tensor of a new one is drawn from hash(seed, its name), whatever other tensors the model has. So models with
different methods have identical values in all tensors that they have in common. The distribution of each tensor is the
model's own.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments, initialization

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.models.load import load_model
from crosslayer.training.costs import check_memory
from crosslayer.training.model_part import ModelPart
from crosslayer.training.recipe import Recipe


def new_model(part: ModelPart, length: int, tokenizer: PreTrainedTokenizerFast) -> CrossLayerForCausalLM:
    """Return a new model for sequences of `length` tokens, with weights not yet paired; on the meta device without."""
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return CrossLayerForCausalLM(part.config(length, len(tokenizer), **special))


def initial_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, args: TrainingArguments) -> PreTrainedModel:
    """Return the model that a run trains: `model.start`, or a new one with weights by seed and name.

    Raises:
        ValueError: an existing model cannot be trained in free memory, or the tokenizer has more tokens than it.
    """
    assert recipe.model is not None
    if recipe.model.start is None:
        model = new_model(recipe.model, recipe.data.length, tokenizer)
        initialise(model, recipe.seed)
        return model
    model, _ = load_model(recipe.model.start, dtype=torch.float32, device="cpu")  # Trainer moves it
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # type: ignore[operator, union-attr]
        raise ValueError(
            f"tokenizer: {recipe.tokenizer!r} has {len(tokenizer):,} tokens, more than the embeddings of "
            f"{recipe.model.start!r}; remove `tokenizer` to use the model's own"
        )
    check_memory(model, args, recipe.data.length)
    return model


def initialise(model: PreTrainedModel, seed: int) -> None:
    """Initialise every parameter of a model; the random state of the process does not change.

    Values are drawn in float32 on the CPU and then rounded, so that they are the same on any device and, up to
    rounding, in any dtype. A tied tensor is drawn under its first name. Initialise a model before wrapping it, since
    wrappers change names.
    """
    # a module's rule draws all its parameters in one stream, so that the second would depend on the first; here all but
    # the meant one are marked as done, as transformers marks weights that were loaded
    named = dict(model.named_parameters())
    meta = [name for name, parameter in named.items() if parameter.is_meta]
    if meta:
        raise ValueError(f"{meta[0]} is on the meta device; allocate the model before initializing it")
    try:
        for parameter in named.values():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=[]), torch.no_grad(), initialization.guard_torch_init_functions():
            for name, parameter in named.items():
                _draw(model, name, parameter, seed)
    finally:
        for parameter in named.values():
            del parameter._is_hf_initialized  # type: ignore[attr-defined]


def _draw(model: PreTrainedModel, name: str, parameter: nn.Parameter, seed: int) -> None:
    """Draw a single parameter as its module initializes it; the others are marked and do not change."""
    module = model.get_submodule(name.rpartition(".")[0])
    stored = parameter.data
    # NaN, so that a rule which forgets a parameter is found
    parameter.data = torch.full(stored.shape, math.nan, device="cpu")
    try:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        parameter._is_hf_initialized = False  # type: ignore[attr-defined]
        model._init_weights(module)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        first: Tensor = parameter.data
    finally:
        parameter.data = stored
    if first.isnan().any():
        raise ValueError(f"{name} is not initialized; set it where {type(module).__name__} resets its parameters")
    stored.copy_(first)
