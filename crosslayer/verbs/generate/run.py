"""Generates text from a prompt, optionally as a stream, and reports speed and KV cache size."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from crosslayer.cache.kv_cache import SmallerKVCache, held_bytes
from crosslayer.cache.running import CacheOptions
from crosslayer.core.decoder.configuration import CrossLayerConfig
from crosslayer.core.transformers_versions import CACHE
from crosslayer.environment import quiet_transformers
from crosslayer.models.load import public_name, ready_model
from crosslayer.models.pair import causal_config
from crosslayer.output.formatting import Shown
from crosslayer.output.progress import progress
from crosslayer.output.record import Frozen, Options, Seed
from crosslayer.probe.model import evaluating, positions, unwrapped
from crosslayer.wiring.kv_bits import REFERENCE_DTYPE, parse_kv_bits
from crosslayer.wiring.read import model_plan

COLDEST, HOTTEST = 0.001, 1000.0  # temperatures; divided by less, logits overflow


class Sampling(Options):
    """The options of sampling; temperature 0 is greedy."""

    max_new_tokens: int = Field(ge=1)
    temperature: float
    seed: Seed

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise ValueError(f"`temperature` must be 0 (greedy) or {COLDEST}-{HOTTEST}, got {self.temperature}")
        return self


class Continuation(Shown, Frozen):
    """A prompt and its continuation without special tokens, with speed and KV cache size."""

    model: str
    prompt: str
    text: str
    new_tokens: int
    seconds: float
    tokens_per_second: float
    cache_bytes: int = Field(description="allocated, in the dtype of the run")
    kv_share: float | None = Field(description="of the original's 16-bit cache; None if no plan counts that")
    kv_bits: str | None = Field(description="bits of the KV cache; None: not quantized")
    cached_tokens: int = Field(description="of the prompt and the continuation, whose last token is never read")
    quantized_tokens: int = Field(description="of the cached ones, in the layer with most; short texts have none")

    def sentences(self) -> list[str]:
        """Return an empty line, which ends the text printed piece by piece, and how many tokens are quantized."""
        if self.kv_bits is None:
            return [""]
        about = parse_kv_bits(self.kv_bits).about
        if not self.quantized_tokens:
            return ["", f"Nothing is quantized: the text has {self.cached_tokens} tokens ({about})."]
        return ["", f"{self.quantized_tokens} of {self.cached_tokens} cached tokens are quantized ({about})."]

    def headline(self) -> dict[str, Any]:
        """Return the model's name and the figures."""
        return self.model_dump(exclude={"prompt", "text"})


def generate(
    model: PreTrainedModel | str | Path,
    prompt: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
    kv_bits: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    write: Callable[[str], Any] | None = None,
) -> Continuation:
    """Generate text from a prompt.

    Args:
        model: hub name, local folder, smollm2, qwen or gemma3. In Python also a loaded model.
        prompt: the text to continue, or with `chat` the user's message.
        tokenizer: in Python, tokenizer of a loaded model.
        max_new_tokens: maximum number of tokens to generate.
        temperature: sampling temperature; 0 is greedy.
        seed: seed of sampling. In Python the state of torch's own generator is restored.
        chat: apply the tokenizer's chat template to the prompt.
        kv_bits: bits of the KV cache: 8, 4, 3, 2, fp8, or by layer, such as 8@0-11,4@12-29.
        dtype: float32, bfloat16, …; default: float32 on a CPU. In Python only if `model` is a name or path.
        device: cpu, cuda, …; default: the GPU if there is one. In Python only if `model` is a name or path.
        write: in Python, called with each new piece of text.

    Raises:
        ValueError: the prompt is empty or too long, the model cannot be loaded or is not a causal LM, there is no
            tokenizer or chat template, or an option is wrong.
    """
    model = unwrapped(model)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text to continue")
    causal_config("generate", model)
    loaded, own_tokenizer = ready_model(model, tokenizer, dtype=dtype, device=device)
    if own_tokenizer is None:
        raise ValueError("a loaded model needs its tokenizer; pass tokenizer=…")
    ids = _prompt_ids(loaded, own_tokenizer, prompt, chat, max_new_tokens)  # (1, T)
    streamer = None if write is None else _Pieces(own_tokenizer, write)
    started = time.perf_counter()
    smaller = CacheOptions(kv_bits=kv_bits)
    with evaluating(loaded), smaller.running(loaded) as new_cache, progress("generating", 0):
        cache = DynamicCache(config=loaded.config) if new_cache is None else new_cache()
        new = _continue(loaded, own_tokenizer, ids.to(loaded.device), cache, sampling, streamer)
    seconds = time.perf_counter() - started
    # against the 16-bit cache of the model without methods, after as many tokens
    plain, kv_share = loaded.config, None
    if isinstance(plain, CrossLayerConfig):
        plain = CrossLayerConfig(**(plain.to_dict() | {"cross_layer": None}))
    with suppress(ValueError):  # a plan does not count every model
        whole = model_plan(plain, cache.get_seq_length(), REFERENCE_DTYPE).stored_bytes
        kv_share = round(held_bytes(cache).sixteen / whole, 4)
    return Continuation(
        model=smaller.named(public_name(model)),
        prompt=prompt,
        text=str(own_tokenizer.decode(new, skip_special_tokens=True)),
        new_tokens=len(new),
        seconds=round(seconds, 3),
        tokens_per_second=round(len(new) / seconds, 2),
        cache_bytes=held_bytes(cache).allocated,
        kv_share=kv_share,
        kv_bits=kv_bits,
        cached_tokens=int(cache.get_seq_length()),
        quantized_tokens=cache.quantized_tokens() if isinstance(cache, SmallerKVCache) else 0,
    )


class _Pieces(TextStreamer):
    """Streams new text without the prompt and special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], Any]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write text that will not change any more."""
        if text:
            self.write(text)


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    cache: Cache,
    sampling: Sampling,
    streamer: TextStreamer | None,
) -> Tensor:
    """Return the new tokens (N,) after a prompt (1, T), generated with the cache."""
    options: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:
        options = {"do_sample": True, "temperature": sampling.temperature}
    devices = [model.device] if model.device.type == "cuda" else []
    # The generator is restored, since in Python the caller may use it.
    with quiet_transformers(), torch.random.fork_rng(devices):
        torch.manual_seed(sampling.seed)
        sequences = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            use_cache=True,  # trainers save configs with False, and then `generate` would read all at every step
            **{CACHE: cache},
            max_new_tokens=sampling.max_new_tokens,
            streamer=streamer,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            num_beams=1,  # overrides the folder's generation_config.json, like the two below
            num_return_sequences=1,
            cache_implementation=None,
            return_dict_in_generate=False,
            tokenizer=tokenizer,
            **options,
        )  # (1, T + N)
    return sequences[0, ids.shape[1] :]


def _prompt_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool, new_tokens: int
) -> Tensor:
    """Return the prompt's ids (1, T), which the model can read, and which leave positions for the new tokens."""
    if not chat:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    elif tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; leave `chat` out")
    else:
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = inputs["input_ids"]  # type: ignore[index, call-overload]
    assert isinstance(ids, Tensor)
    if not ids.shape[1]:
        raise ValueError("the tokenizer turns the prompt into no tokens; give another text")

    # Without this check the embedding fails with an index error, on a GPU in a way that ends the process.
    largest, size = int(ids.max()), model.config.get_text_config().vocab_size
    if largest >= size:
        raise ValueError(
            f"token id {largest} is not in the model's vocabulary of {size} tokens; use the model's own tokenizer"
        )
    if ids.shape[1] + new_tokens > positions(model):
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens, which with {new_tokens} new ones exceeds the model's "
            f"{positions(model)} positions"
        )
    return ids
