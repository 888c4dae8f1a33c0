"""The model that a run starts from: a new one or an existing one."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments

from crosslayer.core.decoder import CrossLayerForCausalLM
from crosslayer.models.load import load_model
from crosslayer.training.costs import check_memory
from crosslayer.training.initialise import initialise
from crosslayer.training.recipe import Recipe


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> CrossLayerForCausalLM:
    """Return the model of a recipe, with weights that are not paired; on the meta device without any."""
    assert recipe.model is not None
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return CrossLayerForCausalLM(recipe.model.config(recipe.data.length, len(tokenizer), **special))


def initial_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, args: TrainingArguments) -> PreTrainedModel:
    """Return the model that a run trains: `model.start`, or a new one with weights by seed and name.

    Raises:
        ValueError: an existing model cannot be trained in free memory, or the tokenizer has more tokens than it.
    """
    assert recipe.model is not None
    if recipe.model.start is None:
        model = new_model(recipe, tokenizer)
        initialise(model, recipe.seed)
        return model
    model, _ = load_model(recipe.model.start, dtype=torch.float32, device="cpu")  # Trainer moves it
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # type: ignore[operator, union-attr]
        raise ValueError(
            f"tokenizer: {recipe.tokenizer!r} has {len(tokenizer):,} tokens, more than {recipe.model.start!r} has "
            "embeddings; remove it to use the model's own"
        )
    check_memory(model, recipe, args)
    return model
