"""A codec fitted to a tiny model, and caches of that model."""

from functools import cache

import torch
from transformers import DynamicCache, PreTrainedModel

from crosslayer.codec.codec import Codec
from crosslayer.codec.fingerprint import model_print
from crosslayer.codec.fit import Calibration, calibrate, fit_chain
from crosslayer.codec.states import read_shapes
from crosslayer.core.transformers_versions import CACHE
from tests.helpers.tiny import CAUSAL, VOCABULARY, tiny


def random_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@cache
def calibrated(family: str = "llama") -> tuple[PreTrainedModel, Calibration]:
    model = tiny(family, **CAUSAL[family]).float()
    shapes = read_shapes(model)
    return model, calibrate(model, shapes, random_ids(12, 60), random_ids(2, 60, 1))


@cache
def fitted(family: str = "llama", step: float = 0.02) -> tuple[PreTrainedModel, Codec]:
    model, calibration = calibrated(family)
    return model, Codec(fit_chain(calibration, step), model_print(model))


@torch.no_grad()
def cache_of(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None) -> DynamicCache:
    """Return the cache of tokens (B, S)."""
    cache = DynamicCache(config=model.config)
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
    model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: cache})
    return cache
