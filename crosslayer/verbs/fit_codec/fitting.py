"""Fits codecs of a model to calibration text, each for a number of bytes or for a KL."""

from typing import Self

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.codec.chain import BLOCK, Chain
from crosslayer.codec.codec import Codec
from crosslayer.codec.fingerprint import model_print, tokenizer_print
from crosslayer.codec.fit import BASIS, Calibration, calibrate, fit_chain_at, weighed, with_rate
from crosslayer.codec.format import HASH, HEAD
from crosslayer.codec.quality import coded, costs_and_sizes
from crosslayer.codec.states import CodedLayer
from crosslayer.corpus.windows import Windows

CLASSES = 30  # of channels, as a rule: each takes four bytes in the header of a block
# Of the codes' bytes, of what is measured beside. Where the exact first token and headers take most of a short prompt's
# bytes, a quarter of all would leave none for codes.
LEAST = 0.1
# Of a search for a KL, which is close enough within 10%: the 95% interval of 24 windows is about 20% to either side. A
# try runs the model over all windows that set the step.
TRIES, CLOSE = 5, 0.1
# Of the logarithm of KL over that of the bytes. From an eighth of the cache to a thirty-second it is 2.9 and 2.6 on
# SmolLM2, and from an eighth to a sixteenth 3.2 on Qwen and 2.8 on Gemma.
SLOPE = 2.5


class Fitting:
    """Fits codecs of a model, which share what its calibration text gave.

    Attributes:
        data: what forward passes over calibration text gave; there after `fit` or `weigh`.
        per_token: bytes of a token in the 16-bit cache.
        fixed: bytes of a token in a stored prompt that no step changes.
    """

    data: Calibration

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        shapes: list[CodedLayer],
        prompt: int,
    ):
        self.model, self.shapes, self.prompt = model, shapes, prompt
        self.prints = model_print(model), None if tokenizer is None else tokenizer_print(tokenizer)
        self.per_token = 2 * sum(shape.width for shape in shapes)
        header = HEAD.size + 2 * len(shapes) + 4 * CLASSES + HASH
        # a byte for the step, four for the token, a share of the exact first token, and of a block's header
        self.fixed = 1 + 4 + self.per_token / prompt + header / BLOCK

    def fit(self, ids: Tensor, step: Tensor, seed: int) -> Self:
        """Read calibration windows (N, T), and the prompts of windows (N, T) that set the step and count the bytes."""
        held_out = step[:, : self.prompt]
        return self.weigh(calibrate(self.model, self.shapes, ids, held_out, seed), ids)

    def weigh(self, data: Calibration, ids: Tensor) -> Self:
        """Let the metrics of a calibration say what errors cost in KL, by its windows (N, T)."""
        self.data = weighed(data, self.model, ids, BASIS * self.per_token - self.fixed)
        return self

    def codec(self, chain: Chain) -> Codec:
        """Return the codec of a chain."""
        return Codec(chain, *self.prints)

    def chain(self, share: float, base: Chain | None = None) -> Chain:
        """Return a chain for a share of the 16-bit cache, from one that was fitted for more bytes if there is one."""
        # one fit at `BASIS` also serves all smaller shares: with_rate only fits the classes of channels again
        if base is None or share > BASIS:
            base = fit_chain_at(self.data, max(share, BASIS) * self.per_token - self.fixed)
        return with_rate(base, self.data, share * self.per_token - self.fixed)

    def smaller(self, chain: Chain, part: float) -> Chain:
        """Return a chain for a part of another's bytes."""
        rate = chain.bytes_per_token(*self.data.held_out)
        return with_rate(chain, self.data, max(part * (rate + self.fixed) - self.fixed, LEAST * rate))

    def chain_at(self, kl: float, windows: Windows) -> Chain:
        """Return the chain at which storing a prompt costs a KL, on windows that nothing was fitted to."""
        share = BASIS
        base = chain = self.chain(share)
        for _ in range(TRIES):
            costs, _ = costs_and_sizes(self.model, windows, self.prompt, {"codec": coded(self.codec(chain))})
            cost = costs["codec"].means["kl"].mean()
            if abs(np.log(cost / kl)) < CLOSE:
                break
            # a byte of codes at least, and less than the whole cache
            share = float(np.clip(share * (cost / kl) ** (1 / SLOPE), (self.fixed + 1) / self.per_token, 0.9))
            chain = self.chain(share, base)
        return chain
