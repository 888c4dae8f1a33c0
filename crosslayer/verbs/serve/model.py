"""Our decoder within vLLM's Transformers backend; only vLLM imports this module.

vLLM runs the decoder of `crosslayer.core.decoder` as it stands, with its own linear layers, norms and attention in it.
Tokens of all requests stand in one row; attention alone looks across them, and it is vLLM's. What layers lend to each
other are states of the new tokens, as without a cache.
"""

from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.logger import init_logger  # type: ignore[import-not-found]
from vllm.model_executor.layers.attention import Attention  # type: ignore[import-not-found]
from vllm.model_executor.models.transformers import (  # type: ignore[import-not-found]
    VLLM_ATTN_ATTR,
    TransformersForCausalLM,
)
from vllm.model_executor.models.utils import maybe_prefix  # type: ignore[import-not-found]

from crosslayer.core.decoder.attention import CrossLayerAttention
from crosslayer.verbs.serve.caches import cache_source, not_saved, not_servable, untried

logger = init_logger(__name__)
ATTENTION = "crosslayer_vllm"  # the name of vLLM's attention as our decoder calls it
OVERRIDDEN = "_patch_config", "_create_attention_instances"
for name in OVERRIDDEN:
    if not hasattr(TransformersForCausalLM, name):
        raise ImportError(f"vLLM's Transformers backend has no {name}, which crosslayer overrides: use another release")
vllm_attention = ALL_ATTENTION_FUNCTIONS["vllm"]


def _attention(module: Any, query: Tensor, *others: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """Return vLLM's attention, (T, H·D), in the shape of other attention functions, (B, T, H, D)."""
    out, _ = vllm_attention(module, query, *others, **options)
    batch, _, new, size = query.shape
    return out.view(batch, new, -1, size), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: vLLM's attention knows the requests, whose tokens stand in one row."""


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _no_mask)


class CrossLayerForCausalLM(TransformersForCausalLM):
    """The model that vLLM builds for our architecture."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        reason = not_servable(config) or self._unsupported(vllm_config)
        if reason is not None:
            raise ValueError(f"vLLM cannot serve this crosslayer model: {reason}")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        waste = not_saved(config)
        if waste is not None:
            logger.warning_once(waste)

    @staticmethod
    def _unsupported(vllm_config: Any) -> str | None:
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        flags = {
            "tensor-parallel-size": str(parallel.tensor_parallel_size),
            "pipeline-parallel-size": str(parallel.pipeline_parallel_size),
            "kv-cache-dtype": cache.cache_dtype,
        }
        flags |= {"quantization": ""} if vllm_config.quant_config is not None else {}
        flags |= {"kv-sharing-fast-prefill": ""} if cache.kv_sharing_fast_prefill else {}
        flags |= {"enable-lora": ""} if vllm_config.lora_config is not None else {}
        found = untried(flags)
        return None if found is None else found[1]

    def _patch_config(self) -> None:
        """Let the decoder call vLLM's attention by our name."""
        super()._patch_config()
        self.config._attn_implementation = ATTENTION

    def _create_attention_instances(self, prefix: str = "") -> None:
        """Give each layer that attends vLLM's attention, with its own cache or that of the layer that it reads.

        The backend's own method has a cache for every layer, and expects attention in every layer.
        """
        config, parallel = self.config, self.parallel_config
        names: dict[int, str] = {}
        for number, layer in enumerate(self.model.layers):
            module: CrossLayerAttention | None = layer.self_attn
            source = cache_source(config, number)
            if module is None or source is None:
                continue
            names[number] = maybe_prefix(prefix, f"model.layers.{number}.self_attn.{VLLM_ATTN_ATTR}")
            attention = Attention(
                num_heads=self.model_config.get_num_attention_heads(parallel),
                head_size=module.head_dim,
                scale=module.scaling,
                num_kv_heads=self.model_config.get_num_kv_heads(parallel),
                cache_config=self.cache_config,
                quant_config=self.quant_config,
                logits_soft_cap=config.attn_logit_softcapping,
                per_layer_sliding_window=module.sliding_window,
                prefix=names[number],
                kv_sharing_target_layer_name=None if source == number else names[source],
            )
            setattr(module, VLLM_ATTN_ATTR, attention)
