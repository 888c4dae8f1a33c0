"""The model as lm-eval sees it: its class for Hugging Face models, with our progress, a batch that fits, evictions.

To be imported where lm-eval is needed, not before. On a GPU lm-eval finds its batch by trying until memory runs out; on
a CPU the process would be killed, so that the batch is counted (`cpu_batch`).

What an eviction policy keeps as a text goes on follows from the text, so that context and continuation in a single call
score as they would token by token. A policy that looks at where the prompt ends needs the context by itself.

Shapes: N continuations of a context, T tokens of the longest, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.eviction.eviction import Eviction, parse_eviction
from crosslayer.eviction.running import NewCache
from crosslayer.output.progress import Meter, Silent, Steps
from crosslayer.verbs.bench.memory import free_memory

CPU_TOKENS = 1024  # of a batch
LARGEST_BATCH = 64  # as lm-eval has it
LOGIT_BYTES = 12  # of a logit: as the model gives it, its log softmax, and what softmax needs on the way
AT_ONCE = 16  # continuations of a context
Request = tuple[Any, list[int], list[int]]  # texts, and the ids of context and continuation


def language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: int | str,
    progress: Meter,
    evict: str | None = None,
    new_cache: NewCache | None = None,
) -> "MeteredLM":
    """Return lm-eval's model of a causal LM; with `evict` it runs with that eviction already, and has `new_cache`."""
    tokenizer = copy.deepcopy(tokenizer)  # lm-eval gives one that lacks it a token for padding
    options = {"pretrained": model, "tokenizer": tokenizer, "batch_size": batch, "backend": "causal"}
    if evict is None or new_cache is None:
        lm = MeteredLM(**options)
    else:
        lm = EvictedLM(**options)
        lm.new_cache, lm.eviction = new_cache, parse_eviction(evict)
    lm.progress = progress
    return lm


def cpu_batch(length: int, vocabulary: int, free: int) -> int:
    """Return how many requests of a length in tokens make a batch on a CPU with `free` bytes of memory."""
    tokens = min(CPU_TOKENS, free // 4 // (LOGIT_BYTES * vocabulary))
    return max(1, min(LARGEST_BATCH, tokens // max(1, length)))


class _Counter:
    """Stands where lm-eval would cache answers, and counts them; of a text that is scored whole, its windows."""

    def __init__(self, meter: Steps, total: int):
        self.meter, self.total, self.done = meter, total, 0

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Count an answer."""
        self.count(kind != "loglikelihood_rolling")

    def count(self, answers: int) -> None:
        """Count so many answers; of equal requests a few are counted twice."""
        self.done = min(self.total, self.done + answers)
        self.meter.step(self.done, self.total)


_HFLM: Any = HFLM  # its decorator hides its type


class MeteredLM(_HFLM):
    """lm-eval's model, whose answers are those of lm-eval."""

    progress: Meter = Silent
    counter: _Counter
    requests = 0  # texts that were scored or continued
    shortened = 0  # of them without their beginning, for which positions were too few
    reduced = 0  # of them with tokens evicted before the last of them was read

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Answer requests, and count them."""
        with self._counting("scoring answers", len(requests)):
            return super().loglikelihood(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Answer requests, and count them."""
        with self._counting("generating answers", len(requests)):
            return super().generate_until(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Score whole texts, and count their windows."""
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]
        with self._counting("scoring windows of text", sum(-(-max(1, size) // self.max_length) for size in lengths)):
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

    @contextmanager
    def _counting(self, what: str, total: int) -> Iterator[None]:
        before = self.cache_hook
        with self.progress(what, total) as meter:
            self.counter = _Counter(meter, total)
            self.set_cache_hook(self.counter)  # type: ignore[arg-type]
            try:
                yield
            finally:
                self.set_cache_hook(before)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        self.count(requests)
        answers = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        self.counter.count(sum(texts is None for texts, _, _ in requests))  # windows, which are not cached
        return answers

    def count(self, requests: list[Any]) -> None:
        """Count requests that are scored, (texts, context, continuation) each."""
        longest = max((len(answer) for _, _, answer in requests), default=0)
        if longest > self.max_length:
            raise ValueError(f"an answer of {longest} tokens exceeds the {self.max_length} positions of the model")
        self.requests += len(requests)
        self.shortened += sum(len(context) + len(answer) > self.max_length + 1 for _, context, answer in requests)

    def _model_generate(self, context: Any, *arguments: Any, **options: Any) -> Any:
        self.requests += len(context)
        return super()._model_generate(context, *arguments, **options)

    def _batch_scheduler(self, pos: int, n_reordered_requests: Sequence[Any]) -> int:
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


class EvictedLM(MeteredLM):
    """A model that runs with eviction."""

    new_cache: NewCache
    eviction: Eviction

    def _model_generate(self, context: Tensor, *arguments: Any, **options: Any) -> Tensor:
        cache = self.new_cache()
        answers = super()._model_generate(context, *arguments, past_key_values=cache, **options)
        self.reduced += min(cache.reduced_texts(), len(context))  # beams are rows, too
        return answers

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return log likelihood, and whether it is the greedy one, of each continuation."""
        for _, context, answer in requests:
            read = len(context) if self.eviction.rule.window else min(len(context) + len(answer) - 1, self.max_length)
            self.reduced += self.eviction.takes_from(read)
        if not self.eviction.rule.window:
            return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        self.count(requests)
        by_context: dict[tuple[int, ...], list[int]] = {}
        for place, (_, context, _) in enumerate(requests):
            by_context.setdefault(tuple(context), []).append(place)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for context, places in by_context.items():
            for first in range(0, len(places), AT_ONCE):
                some = places[first : first + AT_ONCE]
                scores = self._after(context, [requests[place][2] for place in some])
                for place, score in zip(some, scores, strict=True):
                    answers[place] = score
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], score)
        return answers

    def _after(self, context: tuple[int, ...], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Read a context, let its tokens go, and score N continuations of it."""
        room = max(1, self.max_length + 1 - max(map(len, continuations)))
        prompt = torch.tensor([context[-room:]], device=self.device)
        targets = [torch.tensor(ids, device=self.device) for ids in continuations]
        padded = pad_sequence(targets, batch_first=True)  # (N, T)
        cache = self.new_cache()
        with torch.no_grad():
            logits = self.model(prompt, past_key_values=cache).logits[:, -1:]  # (1, 1, V)
            logits = logits.expand(len(targets), -1, -1)
            if padded.shape[1] > 1:
                cache.batch_repeat_interleave(len(targets))
                more = self.model(padded[:, :-1], past_key_values=cache).logits
                logits = torch.cat([logits, more], dim=1)  # (N, T, V)
        chances = logits.log_softmax(-1, dtype=torch.float32)
        scores = []
        for row, ids in zip(chances, targets, strict=True):
            row = row[: len(ids)]
            likelihood = row.gather(-1, ids[:, None]).sum()
            scores.append((float(likelihood), bool((row.argmax(-1) == ids).all())))
        return scores
