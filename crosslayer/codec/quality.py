"""What a stored cache costs: the exact model reads a prompt, and continues a text on the cache that was stored.

    KL(exact ‖ stored) in nats per token, teacher-forced over the tokens after the prompt

Likewise for numbers hidden in a text: the text is stored, and the question comes after it. All ways to store a cache
read the same windows and texts.

Shapes: N windows, T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.cache.kv_cache import held_bytes
from crosslayer.cache.running import prefill, quantized_cache
from crosslayer.codec.codec import Codec
from crosslayer.core.transformers_versions import CACHE
from crosslayer.corpus.windows import Windows
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.damage import NO_TARGET, Losses, compare, gathered
from crosslayer.judge.hidden import Sample, prompt_ids
from crosslayer.judge.retrieval import found_in, responses
from crosslayer.output.progress import progress
from crosslayer.probe.model import evaluating

Way = Callable[[Cache, Tensor], tuple[Cache, int]]  # from a cache and its tokens (1, T) to what is read back, its bytes


@torch.no_grad()
def costs_and_sizes(
    model: PreTrainedModel, windows: Windows, prompt: int, ways: Mapping[str, Way]
) -> tuple[dict[str, Losses], dict[str, list[int]]]:
    """Return what each way costs on each window, of `prompt` tokens and more, and the bytes that it stores."""
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    sizes: dict[str, list[int]] = {name: [] for name in ways}
    with evaluating(model), progress("measuring stored caches", len(windows)) as bar:
        for done, window in enumerate(windows.ids.to(model.device), 1):
            before, after = window[None, :prompt], window[None, prompt:]
            targets = torch.cat([after[0, 1:], torch.tensor([NO_TARGET], device=window.device)])  # (T,)
            cache = prefill(model, before)
            original = continued(model, deepcopy(cache), after)
            for name, way in ways.items():
                read_back, size = way(cache, before)
                costs[name].append(compare(original, continued(model, read_back, after), targets))
                sizes[name].append(size)
            bar.step(done, len(windows))
    return {name: gathered(of_windows, windows) for name, of_windows in costs.items()}, sizes


@torch.no_grad()
def numbers_found(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample], ways: Mapping[str, Way]
) -> dict[str, list[bool]]:
    """Return whether the model finds the number of each sample on the cache that each way gives back for its text."""
    texts: dict[str, list[str]] = {name: [] for name in ways}
    with evaluating(model), progress("asking for hidden numbers", len(samples)) as bar:
        for done, sample in enumerate(samples, 1):
            ids = prompt_ids(tokenizer, sample.prompt)
            length = len(prompt_ids(tokenizer, sample.text.rpartition("\n")[0]))  # the question follows
            before = torch.tensor([ids[:length]], device=model.device)
            cache = prefill(model, before)
            for name, way in ways.items():
                held, _ = way(deepcopy(cache), before)
                texts[name] += responses(model, tokenizer, [sample], lambda held=held: held)
            bar.step(done, len(samples))
    return {name: found_in(answers, samples) for name, answers in texts.items()}


def exact(cache: Cache, ids: Tensor) -> tuple[Cache, int]:
    """Store a cache as it is."""
    return cache, held_bytes(cache).sixteen


def coded(codec: Codec) -> Way:
    """Return the way of a codec, in one file with all that belongs to it."""

    def way(cache: Cache, ids: Tensor) -> tuple[Cache, int]:
        data = codec.encode(cache, ids)
        layer: Any = cache.layers[0]
        return codec.decode(data, layer.keys.device, layer.keys.dtype), len(data)

    return way


def rounded(model: PreTrainedModel, bits: str) -> Way:
    """Return the way of a quantized cache of this package, such as 4 or fp8."""

    def way(cache: Cache, ids: Tensor) -> tuple[Cache, int]:
        quantized = quantized_cache(model, bits)
        layers: list[Any] = list(cache.layers)
        for index, layer in enumerate(layers):
            quantized.update(layer.keys, layer.values, index)
        return quantized, held_bytes(quantized).sixteen

    return way


class StoredCache(DynamicCache):
    """A cache that is stored once: a second call reads what `way` gives back for the tokens of the first.

    Its rows have no padding. The tokens are not known, so `way` gets zeros for them.
    """

    def __init__(self, way: Way, config: PreTrainedConfig):
        super().__init__(config=config)
        self.way: Way | None = way

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store what the cache holds before the tokens of a second call are added."""
        if self.way is not None and layer_idx == 0 and self.get_seq_length():
            way, self.way = self.way, None
            rows, columns = len(key_states), self.get_seq_length()
            self.layers = way(self, torch.zeros(rows, columns, dtype=torch.int64))[0].layers
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def stored(name: str, way: Way) -> Candidate:
    """Return the candidate whose prompts are stored before they are continued, for tasks."""
    return Candidate(name, around=lambda model: nullcontext(lambda: StoredCache(way, model.config)), scores=False)


def continued(model: PreTrainedModel, cache: Cache, ids: Tensor) -> Tensor:
    """Return the log-probabilities (T, V) of tokens (1, T) behind a cache, which takes them in."""
    return model(ids, use_cache=True, **{CACHE: cache}).logits[0].float().log_softmax(-1)
