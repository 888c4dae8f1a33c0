"""The cross-layer decoder, registered with transformers' Auto classes on import."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.decoder.modeling import CrossLayerForCausalLM, CrossLayerForSequenceClassification, CrossLayerModel

AutoConfig.register("crosslayer", CrossLayerConfig, exist_ok=True)
AutoModel.register(CrossLayerConfig, CrossLayerModel, exist_ok=True)
AutoModelForCausalLM.register(CrossLayerConfig, CrossLayerForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(CrossLayerConfig, CrossLayerForSequenceClassification, exist_ok=True)

__all__ = ["CrossLayerConfig", "CrossLayerForCausalLM", "CrossLayerForSequenceClassification", "CrossLayerModel"]
