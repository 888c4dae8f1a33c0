"""Asks candidates and the original the same questions: bytes of the cache, KL, hidden numbers, time of a step.

Shapes: B batch, T tokens of a window, V vocabulary, N windows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.core.decoder.caches import cache_bytes
from crosslayer.core.sixteen_bits import in_16_bits
from crosslayer.core.transformers_versions import CACHE
from crosslayer.corpus.windows import Windows
from crosslayer.eviction.cache import EvictionCache
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.hidden import Sample
from crosslayer.judge.losses import Losses, losses
from crosslayer.judge.retrieval import retrieved
from crosslayer.machine import seconds
from crosslayer.models.load import load_model
from crosslayer.output.progress import progress
from crosslayer.probe.intercept import evaluating

WARM_UP, STEPS = 2, 16  # decoding steps of a timed run: not counted, and counted
DEEPEST = 8  # objects within objects, in which a cache's tensors are counted


@dataclass
class Judge:
    """What candidates are compared on; the original is the first candidate of every question.

    Attributes:
        original: the model that all candidates are compared with.
        tokenizer: its tokenizer, None if it was given without one: then no numbers are hidden.
        windows: evaluation text.
        context: tokens after which the cache is counted and a step is timed.
        seed: of the hidden numbers.
        failed: by candidate, why it could not be measured.

    """

    original: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    windows: Windows
    context: int
    seed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)
    _shape: torch.Size = torch.Size()  # of the original's logits, (B, T, V)

    def kl(self, candidates: Sequence[Candidate]) -> dict[str, Losses]:
        """Return losses and KL by window of those candidates that do not fail; the original runs once for all."""
        runs = {one.name: self._guarded(one) for one in candidates}
        found = losses(self._original_logits, runs, self.windows, "measuring KL")
        return {name: own for name, own in found.items() if name not in self.failed}

    def held_bytes(self, candidate: Candidate | None) -> int | None:
        """Return the bytes that a cache holds after `context` tokens, a number counted as 16 bits at most."""

        def count(model: PreTrainedModel, new_cache: Callable[[], Cache] | None) -> int:
            return held_bytes(self._prompted(model, new_cache)[0])

        return self._asked(candidate, count)

    def retrieved(self, candidate: Candidate | None, samples: Sequence[Sample]) -> list[bool] | None:
        """Return whether a candidate finds the number of each sample."""
        assert self.tokenizer is not None
        doing = f"asking {candidate.name if candidate else 'the original'}"
        return self._asked(
            candidate, lambda model, new_cache: retrieved(model, self.tokenizer, samples, new_cache, doing)
        )

    def step_times(self, candidates: Sequence[Candidate], repeats: int) -> dict[str, list[tuple[float, float]]]:
        """Return seconds of a decoding step after `context` tokens, (candidate, original) of each repeat.

        Original and candidates take turns, and the order alternates, so that all see the same load of the machine.
        """
        pairs: dict[str, list[tuple[float, float]]] = {one.name: [] for one in candidates}
        with progress("timing a decoding step", repeats) as bar:
            for repeat in range(repeats):
                order: list[Candidate | None] = [None, *(one for one in candidates if one.name not in self.failed)]
                times = {one: self._asked(one, self._step_seconds) for one in order[:: 1 if repeat % 2 else -1]}
                original = times[None]
                for one in candidates:
                    own = times.get(one)
                    if own is not None and original is not None:
                        pairs[one.name].append((own, original))
                bar.step(repeat + 1, repeats)
        return {name: times for name, times in pairs.items() if times}

    def model_of(self, candidate: Candidate | None) -> PreTrainedModel:
        """Return the model that a candidate runs; one that is named is loaded once."""
        if candidate is None or candidate.model is None:
            return self.original
        if isinstance(candidate.model, PreTrainedModel):
            return candidate.model
        if candidate.name not in self._models:
            with progress(f"loading {candidate.name}", 0):
                own = {"dtype": self.original.dtype, "device": self.original.device}
                self._models[candidate.name] = load_model(str(candidate.model), **own)[0]
        return self._models[candidate.name]

    def _asked(self, candidate: Candidate | None, question: Callable[..., Any]) -> Any:
        """Return the answer to a question, asked of a model and the function that makes its cache; None if it fails."""
        if candidate is not None and candidate.name in self.failed:
            return None
        with self._catching(candidate), torch.no_grad():
            model = self.model_of(candidate)
            with evaluating(model), (candidate or ORIGINAL).running(model) as new_cache:
                return question(model, new_cache)
        return None

    @contextmanager
    def _catching(self, candidate: Candidate | None) -> Iterator[None]:
        """Note why a candidate fails, instead of raising; what is wrong with the original is raised."""
        try:
            yield
        except Exception as error:
            if candidate is None:
                raise
            line = str(error).strip().splitlines()
            self.failed[candidate.name] = f"{type(error).__name__}: {line[0][:200] if line else 'no message'}"

    def _guarded(self, candidate: Candidate) -> Callable[[Tensor], Tensor]:
        """Return the candidate's logits of windows; once it has failed, zeros of their shape, which are left out."""

        def run(ids: Tensor) -> Tensor:
            if candidate.name not in self.failed:
                with self._catching(candidate):
                    logits = self._logits(candidate, ids)
                    if logits.shape != self._shape:
                        raise ValueError(f"logits must have the shape {tuple(self._shape)}, got {tuple(logits.shape)}")
                    if not logits.isfinite().all():
                        raise ValueError("logits hold NaN or infinity")
                    return logits
            return torch.zeros(self._shape, device=self.original.device)

        return run

    def _original_logits(self, ids: Tensor) -> Tensor:
        with evaluating(self.original):
            logits = self.original(input_ids=ids.to(self.original.device), use_cache=False).logits
        self._shape = logits.shape
        return logits

    def _logits(self, candidate: Candidate, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) of windows as a candidate would give them token by token."""
        model = self.model_of(candidate)
        ids = ids.to(model.device)
        with evaluating(model), candidate.running(model) as new_cache:
            if candidate.scores or new_cache is None:
                return model(input_ids=ids, use_cache=False).logits
            cache, rows = new_cache(), []
            for token in ids.split(1, dim=1):  # (B, 1)
                rows.append(model(input_ids=token, use_cache=True, **{CACHE: cache}).logits)
            return torch.cat(rows, dim=1)

    def _prompted(self, model: PreTrainedModel, new_cache: Callable[[], Cache] | None) -> tuple[Cache, Tensor]:
        """Return the cache after a prompt of `context` tokens, and the token that follows, (1, 1)."""
        ids = self.windows.ids.flatten()
        ids = ids.repeat(-(-(self.context + 1) // len(ids)))[: self.context + 1][None].to(model.device)
        cache = DynamicCache(config=model.config) if new_cache is None else new_cache()
        model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return cache, ids[:, -1:]

    def _step_seconds(self, model: PreTrainedModel, new_cache: Callable[[], Cache] | None) -> float:
        """Return the median seconds of a decoding step."""
        cache, token = self._prompted(model, new_cache)
        times = []
        for _ in range(WARM_UP + STEPS):
            step = partial(model, input_ids=token, use_cache=True, **{CACHE: cache})
            times.append(seconds(step, model.device))
        return float(torch.tensor(times[WARM_UP:]).median())


ORIGINAL = Candidate("original")


def held_bytes(cache: Any) -> int:
    """Return the bytes of all tensors that a cache holds; a storage that several share counts once.

    Numbers of more than 16 bits count as 16, so that a share of the 16-bit cache is the same in every dtype. Tensors of
    modules, such as a codec's weights, are not counted: they are there once, whatever the number of tokens.
    """
    if isinstance(cache, EvictionCache):  # it refers to the run that it is of
        return cache_bytes(cache, sixteen=True) + cache.overhead_bytes()
    sizes: dict[int, int] = {}
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            is_float = value.is_floating_point()
            size = in_16_bits(storage.nbytes(), value.element_size()) if is_float else storage.nbytes()
            sizes[storage.data_ptr()] = size
        elif depth < DEEPEST and not isinstance(value, torch.nn.Module) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mapping):
                inner = list(value.values())
            elif isinstance(value, list | tuple | set):
                inner = list(value)
            else:
                inner = list(getattr(value, "__dict__", {}).values())
                inner += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
            for one in inner:
                visit(one, depth + 1)

    visit(cache, 0)
    return sum(size for pointer, size in sizes.items() if pointer)
