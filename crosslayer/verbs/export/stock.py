"""Conversion to a stock class of transformers: Llama if it can hold the model, or the first other family that can."""

import copy

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.decoder.convert import from_config
from crosslayer.core.transformers_versions import attention_that_caps
from crosslayer.verbs.export.layers import remaining_layers, renumbered


def stock_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of a stock class with the same logits and weights; `no_stock_class` must accept the model."""
    if not isinstance(model, CrossLayerForCausalLM):
        return model
    config = stock_config(model.config)
    if model.config.num_local_experts is not None:
        config._experts_implementation = model.config._experts_implementation
    with no_init_weights():
        stock = AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=attention_that_caps(config)
        )
    stock.load_state_dict(renumbered(model.state_dict(), remaining_layers(model.config)), strict=True, assign=True)
    stock.tie_weights()
    stock.generation_config = copy.deepcopy(model.generation_config)
    return stock.to(model.device).eval()


def stock_config(config: CrossLayerConfig) -> PreTrainedConfig:
    """Return the config of the first family that can hold the remaining layers of a model."""
    layers, types = remaining_layers(config), config.layer_types
    assert types is not None
    changes = {
        "cross_layer": [],
        "num_hidden_layers": len(layers),
        "layer_types": [types[layer.number] for layer in layers],
    }
    plain, reasons = CrossLayerConfig(**{**config.to_dict(), **changes}), []
    for model_type in plain.components.model_types:
        try:
            return from_config(plain, model_type)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"no stock class can hold it: {reasons[0] if reasons else f'family is {plain.family!r}'}")
