"""A copy of the model in a dtype, and the plain pass with which every other way to run it is compared.

    |logits − logits of the plain pass| / std(logits of the plain pass), both in the same dtype

This is the largest difference in float32 and the root mean square in lower precisions.

Shapes: T tokens, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.cache.running import smaller_cache
from crosslayer.core.transformers_versions import CACHE
from crosslayer.models.load import DTYPES
from crosslayer.probe.measures import working
from crosslayer.probe.model import positions
from crosslayer.wiring.kv_bits import KvBits

TOKENS, FEWEST, SEED = 33, 16, 0
BEAMS, NEW = 3, 6  # beam search: beams, new tokens
# tokens that stay exact in a quantized cache, fewer than usual so that these few tokens are quantized
RECENT = 8
FEW = 12  # tokens of the slow checks: gradients, the prompt of beam search


@dataclass(frozen=True)
class Subject:
    """A copy of the model in a dtype, ids (1, T), and the logits (T, V) of the plain pass, in float32 or float64."""

    model: PreTrainedModel
    ids: Tensor
    dtype: str
    backend: str
    full: Tensor
    new_cache: Callable[[], Cache]
    bits: KvBits | None = None

    @property
    def exact(self) -> bool:
        """Whether rounding is too small to change the generated tokens."""
        return self.dtype in ("float32", "float64")

    def difference(self, logits: Tensor, full: Tensor | None = None) -> float:
        """Return the difference of logits (…, T, V) from those of the plain pass, in standard deviations of the latter.

        In lower precisions it is the root mean square, because the largest of a million rounding errors varies by a
        factor of three between ways of computing.
        """
        full = self.full if full is None else full
        gaps = working(logits).reshape(full.shape) - full  # (…, T, V) -> (T, V)
        distance = gaps.abs().max() if self.exact else gaps.square().mean().sqrt()
        return (distance / self.full.std()).item()

    def run_in_chunks(self, sizes: list[int], cache: Cache | None = None) -> Tensor:
        """Run the ids in chunks of `sizes` tokens through a cache; return logits (1, T, V)."""
        cache = self.new_cache() if cache is None else cache
        outputs = [self.model(chunk, **{CACHE: cache}, use_cache=True) for chunk in self.ids.split(sizes, 1)]
        return torch.cat([output.logits for output in outputs], 1)  # (1, size, V) each -> (1, T, V)


@contextmanager
def subject_of(
    model: PreTrainedModel, ids: Tensor, dtype: str, backend: str, bits: KvBits | None = None
) -> Iterator[Subject]:
    """Copy a model into a dtype and run the plain pass; buffers such as RoPE's keep their dtype.

    With `bits` it runs with a quantized KV cache inside the block, the plain pass too.
    """
    used = copy.deepcopy(model).eval().requires_grad_(True)
    # not `model.to`, which casts buffers too: RoPE's frequencies in bfloat16 would be off
    for parameter in used.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    # a model's own settings may sample, or stop early
    used.generation_config = GenerationConfig(
        num_beams=BEAMS,
        num_return_sequences=BEAMS,
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        # so that a score is the sum of the log probabilities
        length_penalty=0.0,
        pad_token_id=0,
    )
    dynamic = nullcontext(partial(DynamicCache, config=used.config))
    with dynamic if bits is None else smaller_cache(used, bits=bits) as new_cache:
        with torch.no_grad():
            full = used(ids, use_cache=False).logits[0]  # (1, T, V) -> (T, V)
        yield Subject(used, ids, dtype, backend, working(full), new_cache, bits)


def random_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Return random ids (1, T) without special tokens."""
    # beam search writes NEW tokens behind them
    config = model.config.get_text_config(decoder=True)
    count = min(TOKENS, positions(model) - NEW)
    if count < FEWEST:
        raise ValueError(f"verify needs {FEWEST + NEW} positions, but the model has {positions(model)}")
    special = {config.bos_token_id, config.pad_token_id}
    if tokenizer is not None:
        special.update(tokenizer.all_special_ids)
    ends = config.eos_token_id
    special.update(ends if isinstance(ends, list) else [ends])
    ordinary = torch.tensor([token for token in range(config.vocab_size) if token not in special])
    chosen = torch.randint(len(ordinary), (1, count), generator=torch.Generator().manual_seed(SEED))
    return ordinary[chosen].to(model.device)
