"""A stock class of transformers: Llama where that can hold the model, or the first other family that can."""

import copy
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from crosslayer.core.decoder import CrossLayerConfig, CrossLayerForCausalLM
from crosslayer.core.decoder.weights import FAMILIES, from_config
from crosslayer.core.transformers_versions import attention_that_caps
from crosslayer.environment import quiet_transformers
from crosslayer.verbs.export.layers import Left, left, renumbered


def stock_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of a stock class with the same logits, which shares its weights; for what `refusal` lets pass."""
    if not isinstance(model, CrossLayerForCausalLM):
        return model
    config, _ = stock_config(plain_config(model.config))
    assert config is not None
    if model.config.num_local_experts is not None:
        config._experts_implementation = model.config._experts_implementation
    with no_init_weights():
        stock = AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=attention_that_caps(config)
        )
    stock.load_state_dict(renumbered(model.state_dict(), left(model.config)), strict=True, assign=True)
    stock.tie_weights()
    stock.generation_config = copy.deepcopy(model.generation_config)
    return stock.to(model.device).eval()


def write(model: PreTrainedModel, folder: Path) -> None:
    """Write config, generation config and weights of a stock model into a folder."""
    with quiet_transformers():
        model.save_pretrained(folder)


def plain_config(config: CrossLayerConfig) -> CrossLayerConfig:
    """Return the config without methods, of the layers that are left."""
    layers: list[Left] = left(config)
    kinds = config.layer_types
    assert kinds is not None
    changes = {
        "cross_layer": [],
        "num_hidden_layers": len(layers),
        "layer_types": [kinds[layer.number] for layer in layers],
    }
    return CrossLayerConfig(**{**config.to_dict(), **changes})


def stock_config(plain: CrossLayerConfig) -> tuple[PreTrainedConfig | None, str | None]:
    """Return the config of the first family that can hold a model, or why none can: what Llama says."""
    reasons = []
    for family in FAMILIES:
        try:
            return from_config(plain, family), None
        except ValueError as error:
            reasons.append(str(error))
    return None, f"no stock class can hold it: {reasons[0]}"
