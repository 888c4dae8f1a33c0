"""lm-eval's class for Hugging Face models, with progress, a batch size that fits in CPU memory, and eviction.

Import it only where lm-eval is needed. On a GPU lm-eval finds its batch size by trying until memory runs out; on a CPU
that would kill the process, so the batch size is computed (`cpu_batch`).

What most eviction policies keep depends only on the text so far, so scoring context and continuation in a single call
gives the same result as token by token. A policy that evicts at the end of the prompt needs the context by itself.

Shapes: N continuations of a context, T tokens of the longest, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.cache.eviction import Eviction
from crosslayer.cache.kv_cache import SmallerKVCache
from crosslayer.cache.running import NewCache
from crosslayer.core.transformers_versions import CACHE
from crosslayer.machine import free_memory
from crosslayer.output.progress import Steps, progress

CPU_TOKENS = 1024  # tokens in a batch
LARGEST_BATCH = 64  # lm-eval's default
# Per logit in float32: the logit, its log softmax, and a temporary of softmax.
LOGIT_BYTES = 12
# Of the same context, scored at once: each of them has a copy of the context's cache.
CONTINUATIONS = 16
Request = tuple[Any, list[int], list[int]]  # texts, and the ids of context and continuation


def language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: int | str,
    new_cache: NewCache | None = None,
    scores: bool = True,
) -> "JudgedLM":
    """Wrap a causal LM for lm-eval; if there is a `new_cache`, the model already runs with such caches.

    `batch` may be "auto"; `scores` says whether the cache also has its effect if a text is scored without a cache.
    """
    # lm-eval adds a padding token if there is none, and the caller's tokenizer must not change.
    tokenizer = copy.deepcopy(tokenizer)
    lm = JudgedLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, backend="causal")
    if new_cache is not None:
        empty = new_cache()
        lm.new_cache, lm.apart = new_cache, not scores
        lm.eviction = empty.eviction if isinstance(empty, SmallerKVCache) else None
    return lm


def cpu_batch(length: int, vocabulary: int, free: int) -> int:
    """Return the batch size for requests of `length` tokens on a CPU with `free` bytes of memory."""
    # A quarter of what is free, since other processes and the model's activations need memory too.
    tokens = min(CPU_TOKENS, free // 4 // (LOGIT_BYTES * vocabulary))
    return max(1, min(LARGEST_BATCH, tokens // max(1, length)))


@dataclass
class _Counter:
    """Replaces lm-eval's cache of answers to count them; for texts scored as a whole, counts windows."""

    steps: Steps
    total: int
    done: int = 0

    def add_partial(self, request_type: str, request: Any, answer: Any) -> None:
        """Count an answer."""
        self.count(request_type != "loglikelihood_rolling")

    def count(self, answers: int) -> None:
        """Count some answers; a few equal requests are counted twice."""
        # So that a meter never shows more than all.
        self.done = min(self.total, self.done + answers)
        self.steps.step(self.done, self.total)


_HFLM: Any = HFLM  # its decorator hides its type


class JudgedLM(_HFLM):
    """lm-eval's model with progress and counts, and with a smaller cache if there is a `new_cache`.

    Without one its answers are those of lm-eval's own class.
    """

    counter: _Counter
    is_rolling = False  # whether whole texts are scored
    requests = 0  # texts that were scored or continued
    shortened = 0  # requests truncated on the left, because they exceed the model's positions
    reduced = 0  # requests with tokens evicted before their last token was read
    new_cache: NewCache | None = None
    eviction: Eviction | None = None
    apart = False  # whether a context is read by itself, its last token too, so that answers come from the cache

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Answer requests, and count them."""
        with self._counting("scoring answers", len(requests)):
            return super().loglikelihood(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Answer requests, and count them."""
        with self._counting("generating answers", len(requests)):
            return super().generate_until(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Score whole texts, and count their windows.

        lm-eval puts BOS before each first window, also where the tokenizer did (Gemma, Llama 3); here it comes once.
        """
        self.is_rolling = True
        try:
            lengths = [len(self.tok_encode(request.args[0])) for request in requests]
            windows = sum(-(-max(1, size) // self.max_length) for size in lengths)
            with self._counting("scoring windows of text", windows):
                return super().loglikelihood_rolling(requests, disable_tqdm=True)
        finally:
            self.is_rolling = False

    def tok_encode(self, string: str, *arguments: Any, **options: Any) -> list[int]:
        """Return the ids of a text; of a whole text that is to be scored without the tokenizer's BOS."""
        # Twice BOS raised the perplexity of one text from 9.99 to 11.09.
        ids = super().tok_encode(string, *arguments, **options)
        return ids[1:] if self.is_rolling and ids[:1] == [self.prefix_token_id] else ids

    @contextmanager
    def _counting(self, what: str, total: int) -> Iterator[None]:
        before = self.cache_hook
        with progress(what, total) as meter:
            self.counter = _Counter(meter, total)
            self.set_cache_hook(self.counter)  # type: ignore[arg-type]
            try:
                yield
            finally:
                self.set_cache_hook(before)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return the log likelihood of each continuation, and whether it is the greedy one."""
        # lm-eval would stop at an assertion without a word.
        longest = max((len(answer) for _, _, answer in requests), default=0)
        if longest > self.max_length:
            raise ValueError(f"answers must fit into {self.max_length} positions, got one of {longest} tokens")
        self.requests += len(requests)
        self.shortened += sum(len(context) + len(answer) > self.max_length + 1 for _, context, answer in requests)
        if self.eviction is not None:
            for _, context, answer in requests:
                # The last token of an answer is only predicted, not read.
                read = len(context) if self.apart else min(len(context) + len(answer) - 1, self.max_length)
                self.reduced += self.eviction.evicts_from(read)
        if not self.apart:
            answers = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
            # Windows of a whole text have no texts of their own, and lm-eval does not cache their answers.
            self.counter.count(sum(texts is None for texts, _, _ in requests))
            return answers

        # Requests with the same context (the choices of a question) share its cache, which is filled once for 16.
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, _) in enumerate(requests):
            by_context.setdefault(tuple(context), []).append(index)
        answers = [(0.0, False)] * len(requests)
        for context, indices in by_context.items():
            for first in range(0, len(indices), CONTINUATIONS):
                chunk = indices[first : first + CONTINUATIONS]
                scores = self._after(context, [requests[index][2] for index in chunk])
                for index, score in zip(chunk, scores, strict=True):
                    answers[index] = score
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], score)
        return answers

    def _model_generate(self, context: Any, *arguments: Any, **options: Any) -> Any:
        self.requests += len(context)
        if self.new_cache is None:
            return super()._model_generate(context, *arguments, **options)
        cache, _ = self._read_before_last(context)
        answers = super()._model_generate(context, *arguments, **{CACHE: cache}, **options)
        if isinstance(cache, SmallerKVCache):
            # Texts that have lost tokens, in any layer; beams are rows of the cache too.
            lost = {row for group in cache.groups for row, seen in enumerate(group.seen) if group.held[row] < seen}
            self.reduced += min(len(lost), len(context))
        return answers

    def _batch_scheduler(self, pos: int, n_reordered_requests: Sequence[Any]) -> int:
        # lm-eval keeps the first size for later batches of a schedule; computed anew, it follows their length.
        if self.device.type != "cpu":
            return super()._batch_scheduler(pos, n_reordered_requests)
        return self._detect_batch_size(n_reordered_requests, pos)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        if self.device.type != "cpu":
            return super()._detect_batch_size(requests, pos)
        length = self.max_length
        if requests:
            _, context, continuation = requests[pos]
            length = min(length, len(context) + len(continuation))
        vocabulary = self.model.config.get_text_config().vocab_size
        return cpu_batch(length, vocabulary, int(free_memory(self.device)))

    def _read_before_last(self, context: Tensor) -> tuple[Any, Tensor]:
        """Return a cache, and the tokens (B, T) that are still to be read: all, or the last if that is read apart."""
        assert self.new_cache is not None
        cache = self.new_cache()
        if not self.apart or context.shape[1] == 1:
            return cache, context
        self.model(context[:, :-1], use_cache=True, **{CACHE: cache})
        return cache, context[:, -1:]

    def _after(self, context: tuple[int, ...], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Read a context, evict its tokens, and score N continuations of it."""
        longest = max(1, self.max_length + 1 - max(map(len, continuations)))
        prompt = torch.tensor([context[-longest:]], device=self.device)
        targets = [torch.tensor(ids, device=self.device) for ids in continuations]
        padded = pad_sequence(targets, batch_first=True)  # (N, T)
        with torch.no_grad():
            cache, rest = self._read_before_last(prompt)
            logits = self.model(rest, use_cache=True, **{CACHE: cache}).logits[:, -1:]  # (1, 1, V)
            logits = logits.expand(len(targets), -1, -1)
            # The first token of each continuation is predicted by the context; only later ones need another pass.
            if padded.shape[1] > 1:
                cache.batch_repeat_interleave(len(targets))
                more = self.model(padded[:, :-1], use_cache=True, **{CACHE: cache}).logits
                logits = torch.cat([logits, more], dim=1)  # (N, T, V)
        log_probabilities = logits.log_softmax(-1, dtype=torch.float32)
        scores = []
        for padded_chances, ids in zip(log_probabilities, targets, strict=True):
            chances = padded_chances[: len(ids)]  # (T, V), without the padding on the right
            likelihood = chances.gather(-1, ids[:, None]).sum()
            scores.append((float(likelihood), bool((chances.argmax(-1) == ids).all())))
        return scores
