"""lm-eval's class for a model whose cached tokens go; to be imported where lm-eval is needed, not before.

What a policy keeps as a text goes on follows from the text, so that context and continuation in a single call score as
they would token by token. A policy that looks at where the prompt ends needs the context by itself.

Shapes: N continuations of a context, T tokens of the longest, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crosslayer.eviction.eviction import Eviction
from crosslayer.eviction.running import NewCache
from crosslayer.verbs.evaluate.metered import MeteredLM

AT_ONCE = 16  # continuations of a context
Request = tuple[Any, list[int], list[int]]  # texts, and the ids of context and continuation


class EvictedLM(MeteredLM):
    """A model that runs with eviction."""

    new_cache: NewCache
    eviction: Eviction
    reduced = 0  # requests for which tokens went before the last of them was read

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
        if self.windows is not None:
            self.windows.count(len(requests))
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
