"""Asks candidates and the original the same questions: KL, hidden numbers, tasks, bytes of the cache, times.

Shapes: B batch, T tokens of a window, V vocabulary, S tokens in a cache.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.cache.running import NewCache
from crosslayer.core.transformers_versions import CACHE
from crosslayer.corpus.windows import Windows
from crosslayer.judge.candidate import Candidate
from crosslayer.judge.clock import Load, Run, random_ids, run, steps_in_turns, too_large
from crosslayer.judge.damage import Losses, losses
from crosslayer.judge.hidden import Sample
from crosslayer.judge.report import ALL, Detail, JudgedModel, Row
from crosslayer.judge.retrieval import NEW_TOKENS, found_in, responses
from crosslayer.judge.rows import cache_rows, peak_row, retrieval_rows, time_rows, window_rows
from crosslayer.judge.tasks.harness import Tasks, quiet, score
from crosslayer.judge.tasks.summary import group_rows, task_rows
from crosslayer.models.load import load_model, model_facts
from crosslayer.output.progress import progress
from crosslayer.probe.model import evaluating, positions
from crosslayer.stats.times import StepTime


@dataclass
class Judge:
    """What candidates are compared on.

    Attributes:
        original: the model that all candidates are compared with.
        windows: evaluation text, for KL.
        tokenizer: of the original, for hidden numbers and tasks.
        catches: whether a candidate that fails is noted, and the others are measured; otherwise it raises. `measure`
            catches, since one of many candidates that fails must not cost the others their rows.
        failed: by candidate, why it could not be measured.
    """

    original: PreTrainedModel
    windows: Windows | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    catches: bool = True
    failed: dict[str, str] = field(default_factory=dict)
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)
    _found: dict[tuple[str | None, tuple[Sample, ...]], list[bool] | None] = field(default_factory=dict)
    _shape: torch.Size = torch.Size()  # of the original's logits, (B, T, V)
    _details: dict[str, dict[str, Detail]] = field(default_factory=dict)  # by candidate, for a report

    def kl(self, candidates: Sequence[Candidate], doing: str = "measuring KL") -> dict[str, Losses]:
        """Return losses and KL by window of those candidates that do not fail; the original runs once for all.

        `doing` is what a progress meter shows.
        """
        assert self.windows is not None
        untried = [candidate for candidate in candidates if candidate.name not in self.failed]
        runs = {candidate.name: partial(self._logits, candidate) for candidate in untried}
        return losses(partial(self._logits, ORIGINAL), runs, self.windows, doing)

    def damage(self, candidates: Sequence[Candidate], seed: int = 0, doing: str = "measuring KL") -> list[Row]:
        """Return what those candidates that do not fail cost on the windows; `seed` is that of the bootstrap."""
        rows = []
        for name, of_candidate in self.kl(candidates, doing).items():
            rows += window_rows(name, of_candidate, seed)
        return rows

    def answers(
        self, candidate: Candidate | None, samples: Sequence[Sample], new_tokens: int = NEW_TOKENS, batch: int = 1
    ) -> list[str] | None:
        """Return the answers of a candidate, or of the original, to samples with hidden numbers; None if it fails."""
        assert self.tokenizer is not None
        tokenizer = self.tokenizer
        doing = f"asking {candidate.name if candidate else 'the original'}"
        options: dict[str, Any] = {"new_tokens": new_tokens, "batch": batch, "doing": doing}
        return self.asked(candidate, lambda model, cache: responses(model, tokenizer, samples, cache, **options))

    def found(self, candidate: Candidate | None, samples: Sequence[Sample]) -> list[bool] | None:
        """Return whether a candidate, or the original, finds the number of each sample; None if it fails.

        Each is asked the same samples once.
        """
        key = (None if candidate is None else candidate.name, tuple(samples))
        if key not in self._found:
            texts = self.answers(candidate, samples)
            self._found[key] = None if texts is None else found_in(texts, samples)
        return self._found[key]

    def retrieval(self, candidates: Sequence[Candidate], samples: Sequence[Sample]) -> list[Row]:
        """Return the shares of hidden numbers that the candidates find that do not fail; no rows without samples."""
        if not samples:
            return []
        original = self.found(None, samples)
        rows = []
        for candidate in candidates:
            found = self.found(candidate, samples)
            if found is not None:
                rows += retrieval_rows(candidate.name, samples, found, original)
        return rows

    def task_results(
        self, candidate: Candidate | None, tasks: Tasks, limit: int | None, batch: int | str = "auto", **scoring: Any
    ) -> Any:
        """Return what lm-eval returns of a candidate, or of the original; None if it fails.

        `scoring` are further options of `score`. The candidate's details then have counts of its requests.
        """
        from crosslayer.judge.tasks.lm import language_model

        def ask(model: PreTrainedModel, new_cache: NewCache | None) -> Any:
            scores = candidate is None or candidate.scores
            assert self.tokenizer is not None
            # Such a cache (a user's class, stored prompts) need not know padding, so its texts are read one by one.
            size = batch if scores else 1
            lm = language_model(model, self.tokenizer, size, new_cache, scores)
            started = time.perf_counter()
            results = score(lm, tasks, limit=limit, **scoring)
            if candidate is not None:
                seconds = round(time.perf_counter() - started, 3)
                counts = {"requests": lm.requests, "shortened": lm.shortened, "reduced": lm.reduced, "seconds": seconds}
                self._details.setdefault(candidate.name, {}).update(counts)
            return results

        with quiet():
            return self.asked(candidate, ask)

    def tasks(
        self, candidates: Sequence[Candidate], tasks: Tasks, limit: int | None, original: Any = None
    ) -> list[Row]:
        """Return the scores of each candidate, with the original's on the same items, or other `task_results`."""
        original = original or self.task_results(None, tasks, limit)
        rows = []
        for candidate in candidates:
            results = self.task_results(candidate, tasks, limit)
            if results is not None:
                scored = task_rows(candidate.name, results, original)
                rows += [*group_rows(tasks.groups, scored, results), *(metric.row for metric in scored)]
        return rows

    def step(self, candidate: Candidate, load: Load) -> StepTime | None:
        """Time decoding steps of a candidate and the original alternately.

        None if one of them has too few positions, or there is too little memory.
        """
        models = [self.model_of(candidate), self.original]
        if load.context > min(map(positions, models)) or too_large(models, load) is not None:
            return None
        # The memory that is needed is an estimate, so it may run out all the same.
        with progress("timing a decoding step", 0), suppress(torch.OutOfMemoryError):
            time = steps_in_turns(models, load, random_ids(models, load))
            return StepTime(context=load.context, batch=load.batch, time=time)
        return None

    def runs(
        self,
        candidates: Sequence[Candidate],
        load: Load,
        ids: Tensor,
        repeats: int,
        static: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> dict[str, list[tuple[Run, Run]]]:
        """Return runs at a load: pairs (candidate, original) that do not fail, the first of them a warm-up.

        Original and candidates take turns, and the order alternates, so that both of a pair see the same load of the
        machine. `ids` (B, S) are prompt and new tokens, `repeats` pairs follow the warm-up, and `tick` is called after
        each; with `static` a static cache is run too.
        """
        pairs: dict[str, list[tuple[Run, Run]]] = {candidate.name: [] for candidate in candidates}
        for repeat in range(-1, repeats):
            running = [candidate for candidate in candidates if candidate.name not in self.failed]
            order: list[Candidate | None] = [None, *running]
            results: dict[Candidate | None, Run] = {}
            for candidate in order[:: 1 if repeat % 2 == 0 else -1]:
                result = self.asked(candidate, lambda model, new_cache: run(model, load, ids, new_cache, static))
                if result is not None:
                    results[candidate] = result
            for candidate in running:
                if candidate in results:
                    pairs[candidate.name].append((results[candidate], results[None]))
            tick()
        # A candidate that failed in a later pair has no rows at all: its earlier pairs would look like a whole result.
        return {name: runs for name, runs in pairs.items() if name not in self.failed}

    def at_load(
        self,
        candidates: Sequence[Candidate],
        load: Load,
        ids: Tensor,
        repeats: int,
        scope: str = ALL,
        static: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> list[Row]:
        """Return the bytes of caches, times and peak memory of each candidate at a load, from `runs`.

        Without `repeats` there are bytes only, from the run that would warm up.
        """
        rows = []
        for name, (first, *pairs) in self.runs(candidates, load, ids, repeats, static, tick).items():
            rows += cache_rows(*first, candidate=name, scope=scope)
            if pairs:
                rows += time_rows(pairs, tuple(first[0].seconds), candidate=name, scope=scope)
                rows.append(peak_row(pairs, candidate=name, scope=scope))
        return rows

    def model_of(self, candidate: Candidate | None) -> PreTrainedModel:
        """Return the model that a candidate runs; one that is named is loaded once."""
        if candidate is None or candidate.model is None:
            return self.original
        if isinstance(candidate.model, PreTrainedModel):
            return candidate.model
        if candidate.name not in self._models:
            with progress(f"loading {candidate.name}", 0):
                options = {"dtype": self.original.dtype, "device": self.original.device}
                model, tokenizer = load_model(str(candidate.model), **options)
                # The same ids would be other text, and KL would compare predictions of different tokens.
                if self.tokenizer is not None and tokenizer.get_vocab() != self.tokenizer.get_vocab():
                    raise ValueError("its tokenizer differs from the original's, so their tokens cannot be compared")
                self._models[candidate.name] = model
        return self._models[candidate.name]

    def described(self, candidate: Candidate) -> JudgedModel:
        """Return a candidate's facts for a report."""
        failed = self.failed.get(candidate.name)
        # A model that could not be loaded would fail once more.
        facts = model_facts(self.model_of(candidate), candidate.name) if failed is None else None
        details = self._details.get(candidate.name, {})
        return JudgedModel(name=candidate.name, model=facts, engines=candidate.engines, failed=failed, details=details)

    def asked(self, candidate: Candidate | None, question: Callable[[PreTrainedModel, NewCache | None], Any]) -> Any:
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
            # A refusal is read by a user, who must know whose it is; other errors keep their kind and their place.
            if candidate is not None and not self.catches and isinstance(error, ValueError):
                raise ValueError(f"{candidate.name}: {error}") from error
            if candidate is None or not self.catches:
                raise
            # A cell of a table has room for a line.
            line = str(error).strip().splitlines()
            self.failed[candidate.name] = f"{type(error).__name__}: {line[0][:200] if line else 'no message'}"

    def _logits(self, candidate: Candidate, ids: Tensor) -> Tensor | None:
        """Return logits (B, T, V) of windows as a candidate would give them token by token; None once it has failed.

        Those of the original, which is asked first, have the shape that all others must have.
        """
        is_original = candidate is ORIGINAL
        with self._catching(None if is_original else candidate):
            model = self.model_of(candidate)
            ids = ids.to(model.device)
            with evaluating(model), candidate.running(model) as new_cache:
                if candidate.scores or new_cache is None:
                    logits = model(input_ids=ids, use_cache=False).logits
                else:
                    # A cache that is not known to the model acts only on what is read through it, one token at a time.
                    cache, by_token = new_cache(), []
                    for token in ids.split(1, dim=1):  # (B, 1)
                        by_token.append(model(input_ids=token, use_cache=True, **{CACHE: cache}).logits)
                    logits = torch.cat(by_token, dim=1)
            if is_original:
                self._shape = logits.shape
                return logits

            # Logits come from a candidate's own code: those of other positions, say, would give a KL like any other.
            if logits.shape[:-1] != self._shape[:-1]:
                raise ValueError(f"logits must have the shape {tuple(self._shape)}, got {tuple(logits.shape)}")
            if logits.shape[-1] != self._shape[-1]:
                common = min(logits.shape[-1], self._shape[-1])
                self._details.setdefault(candidate.name, {})["common_tokens"] = common
            if not logits.isfinite().all():
                raise ValueError("logits hold NaN or infinity")
            return logits
        return None


ORIGINAL = Candidate("original")
