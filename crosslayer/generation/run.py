"""Generate text as a stream, and say how fast it was and what the cache held."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from crosslayer.decoder.caches import cache_bytes
from crosslayer.environment import quiet_transformers
from crosslayer.output.manifest import positions

COLDEST, HOTTEST = 0.001, 1000.0  # temperatures; logits divided by less overflow


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy.

    Raises:
        ValueError: the temperature is neither 0 nor from `COLDEST` to `HOTTEST`.

    """

    new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise ValueError(f"temperature {self.temperature} cannot be used; use 0 (greedy) or {COLDEST} to {HOTTEST}")


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    sampling: Sampling | None = None,
    chat: bool = False,
) -> dict[str, float]:
    """Print the continuation of a prompt on stdout as it comes; return new tokens, seconds and bytes of the cache.

    Args:
        model: a causal LM.
        tokenizer: its tokenizer.
        prompt: the text to continue, or with `chat` what the user says.
        sampling: how tokens are chosen.
        chat: put the prompt into the tokenizer's chat template.

    Raises:
        ValueError: the prompt is empty or too long, the model is no causal LM, or there is no chat template.

    """
    sampling = sampling or Sampling()
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"generate needs a causal LM; {type(model).__name__} is none")
    ids = _prompt_ids(tokenizer, prompt, chat)
    size = model.config.get_text_config().vocab_size
    if int(ids.max()) >= size:
        raise ValueError(
            f"token id {int(ids.max())} is not in the model's vocabulary of {size}: the tokenizer is another model's"
        )
    room = positions(model) - ids.shape[1]
    if room < sampling.new_tokens:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens; with {sampling.new_tokens} new ones it is above the model's "
            f"{positions(model)} positions"
        )
    chosen = {"do_sample": True, "temperature": sampling.temperature} if sampling.temperature else {"do_sample": False}
    ids, cache = ids.to(model.device), DynamicCache(config=model.config)
    torch.manual_seed(sampling.seed)
    started = time.perf_counter()
    with quiet_transformers():
        found = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=sampling.new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),  # type: ignore[arg-type]
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            num_beams=1,  # whatever the folder's generation_config.json says
            num_return_sequences=1,
            cache_implementation=None,
            return_dict_in_generate=False,
            tokenizer=tokenizer,
            **chosen,
        )
    seconds, count = time.perf_counter() - started, found.shape[1] - ids.shape[1]
    figures = {"new_tokens": count, "seconds": round(seconds, 3), "tokens_per_second": round(count / seconds, 2)}
    return {**figures, "cache_bytes": cache_bytes(cache)}


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> Tensor:
    """Return the prompt's ids (1, T)."""
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text to continue")
    if not chat:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    elif tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; use --no-chat")
    else:
        turns = [{"role": "user", "content": prompt}]
        found = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = found["input_ids"]  # type: ignore[index, call-overload]
    assert isinstance(ids, Tensor)
    if not ids.shape[1]:
        raise ValueError("the tokenizer makes no tokens of the prompt; give another text")
    return ids
