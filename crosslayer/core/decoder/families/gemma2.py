"""Gemma 2: norms with a gain of 1 + weight, also on each sublayer's update; embeddings times √C; capped scores."""

import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from crosslayer.core.decoder.families import Family, ModelType

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SCORES = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


class ScaledEmbedding(nn.Embedding):
    """Embeddings times √C, rounded to the dtype of the weights, as in Gemma's training."""

    def __init__(self, count: int, width: int, padding: int | None):
        super().__init__(count, width, padding)
        # Python's numbers, which a model on the meta device has too, and no checkpoint needs to hold
        scale = width**0.5
        self.scales = {dtype: torch.tensor(scale, dtype=dtype, device="cpu").item() for dtype in FLOATS}

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled embeddings (B, T, C) of ids (B, T)."""
        return super().forward(input) * self.scales[self.weight.dtype]


FAMILY = Family(
    norm=Gemma2RMSNorm,
    gain_offset=1.0,
    post_norms=True,
    embedding=ScaledEmbedding,
    supports=("vllm",),
    model_types={
        "gemma2": ModelType(
            ("attention_bias", "sliding_window", "layer_types", *SCORES), renamed={"hidden_activation": "hidden_act"}
        )
    },
)
