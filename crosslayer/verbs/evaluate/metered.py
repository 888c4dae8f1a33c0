"""lm-eval's class for Hugging Face models with our progress; to be imported where lm-eval is needed, not before."""

import math
from collections.abc import Sequence
from typing import Any

import psutil
from lm_eval.models.huggingface import HFLM

from crosslayer.output.progress import Meter, Silent, Steps

CPU_TOKENS = 1024  # of a batch
LARGEST_BATCH = 64  # as lm-eval has it
LOGIT_BYTES = 12  # of a logit: as the model gives it, its log softmax, and what softmax needs on the way


def cpu_batch(length: int, vocabulary: int, free: int) -> int:
    """Return how many requests of a length in tokens make a batch on a CPU with `free` bytes of memory."""
    tokens = min(CPU_TOKENS, free // 4 // (LOGIT_BYTES * vocabulary))
    return max(1, min(LARGEST_BATCH, tokens // max(1, length)))


class _Counter:
    """Stands where lm-eval would cache answers, and counts them."""

    def __init__(self, meter: Steps, total: int):
        self.meter, self.total, self.done = meter, total, 0

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Count an answer."""
        self.count(1)

    def count(self, answers: int) -> None:
        """Count so many answers; of equal requests a few are counted twice."""
        self.done = min(self.total, self.done + answers)
        self.meter.step(self.done, self.total)


_HFLM: Any = HFLM  # its decorator hides its type


class MeteredLM(_HFLM):
    """lm-eval's model, whose answers are those of lm-eval."""

    progress: Meter = Silent
    requests = 0  # texts that were scored or continued
    shortened = 0  # requests whose beginning was cut off, since the model has too few positions
    windows: _Counter | None = None  # while windows of long texts are scored

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Answer requests, and count them."""
        with self.progress("scoring answers", len(requests)) as meter:
            return self._counted(meter, len(requests), super().loglikelihood, requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Answer requests, and count them."""
        with self.progress("generating answers", len(requests)) as meter:
            return self._counted(meter, len(requests), super().generate_until, requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Score whole texts, and count their windows."""
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]
        total = sum(max(1, math.ceil(length / self.max_length)) for length in lengths)
        with self.progress("scoring windows of text", total) as meter:
            self.windows = _Counter(meter, total)
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm=True)
            finally:
                self.windows = None

    def _counted(self, meter: Steps, total: int, answer: Any, requests: list[Any]) -> list[Any]:
        before = self.cache_hook
        self.set_cache_hook(_Counter(meter, total))  # type: ignore[arg-type]
        try:
            return answer(requests, disable_tqdm=True)
        finally:
            self.set_cache_hook(before)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        self.count(requests)
        answers = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        if self.windows is not None:
            self.windows.count(len(requests))
        return answers

    def count(self, requests: list[Any]) -> None:
        """Count requests that are scored, (texts, context, continuation) each.

        Raises:
            ValueError: an answer alone is longer than the model's positions, which lm-eval cannot score.

        """
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
        free = psutil.virtual_memory().available
        return cpu_batch(length, self.model.config.get_text_config().vocab_size, free)
