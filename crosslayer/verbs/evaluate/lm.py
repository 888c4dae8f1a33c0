"""The model as lm-eval sees it: its own class for Hugging Face models, with our progress and a batch that fits a CPU.

lm-eval finds its batch on a GPU by trying until memory runs out. On a CPU nothing runs out in time: the process is
killed. There the batch is counted instead: so many requests as hold 1,024 tokens, fewer where their logits would
take more than a quarter of the memory that is free (`metered.cpu_batch`).
"""

import copy
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.eviction.eviction import parse_eviction
from crosslayer.eviction.running import NewCache
from crosslayer.output.progress import Meter


def language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: int | str,
    progress: Meter,
    evict: str | None = None,
    new_cache: NewCache | None = None,
) -> Any:
    """Return lm-eval's model of a causal LM that is loaded.

    Args:
        model: the causal LM.
        tokenizer: its own.
        batch: requests at once, or "auto".
        progress: shows how many requests are answered.
        evict: what its cache evicts; the model runs with that eviction already.
        new_cache: makes caches for it.

    """
    from crosslayer.verbs.evaluate.metered import MeteredLM

    tokenizer = copy.deepcopy(tokenizer)  # lm-eval gives one that lacks it a token for padding
    if evict is None or new_cache is None:
        lm = MeteredLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, backend="causal")
    else:
        from crosslayer.verbs.evaluate.evicted import EvictedLM

        lm = EvictedLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, backend="causal")
        lm.new_cache, lm.eviction = new_cache, parse_eviction(evict)
    lm.progress = progress
    return lm
