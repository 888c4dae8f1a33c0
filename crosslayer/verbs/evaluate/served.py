"""lm-eval's class for vLLM, with counts; import it only where lm-eval and vLLM are needed."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import vllm
from transformers import AutoModelForCausalLM
from vllm.platforms import current_platform

from crosslayer.models.load import model_facts
from crosslayer.models.pair import Loadable
from crosslayer.output.record import ModelFacts
from crosslayer.verbs.evaluate.result import EvaluateSettings
from crosslayer.verbs.serve.engine import Served, starting

# A batch size: vLLM gets all requests at once. With "auto", lm-eval would divide by the time of a bar, which is hidden.
ALL = 2**31
# Read before the version is replaced below, since vLLM looks up its own here.
DEVICE = current_platform.device_type
version = importlib.metadata.version
# lm-eval asks for the version of a distribution "vllm", here and later; that for CPUs has another name
with patch.object(importlib.metadata, "version", lambda name: vllm.__version__ if name == "vllm" else version(name)):
    from lm_eval.models.vllm_causallms import VLLM


_VLLM: Any = VLLM  # its decorator hides its type


class ServedLM(_VLLM):
    """lm-eval's model in vLLM, with counts; its answers are unchanged."""

    requests = 0  # texts that were scored or continued
    shortened = 0  # requests truncated on the left, because they exceed the model's positions

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        # vLLM scores a text as a prompt, after which it always generates a token.
        longest = self.max_length - 1
        for _, context, answer in requests:
            if len(answer) >= longest:
                raise ValueError(f"vLLM scores answers of at most {longest - 1} tokens, got one of {len(answer)}")
            self.shortened += len(context) + len(answer) > longest
        self.requests += len(requests)
        return super()._loglikelihood_tokens(requests, disable_tqdm=True)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        """Answer requests, and count them."""
        self.requests += len(requests)
        return super().generate_until(requests, disable_tqdm=True)


@contextmanager
def served_model(source: Loadable, served: Served, settings: EvaluateSettings) -> Iterator[tuple[ServedLM, ModelFacts]]:
    """Start vLLM with a model, and end it behind the `with`; gives lm-eval's model, and what is known of it."""
    asked = "auto" if source.dtype is None else str(source.dtype).removeprefix("torch.")
    batch = ALL if settings.batch == "auto" else settings.batch
    with starting(served):
        lm = ServedLM(served.source, dtype=asked, batch_size=batch, seed=settings.seed)
    try:
        # Its parameters are only counted, so it needs no memory.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(source.config)
        dtype = str(lm.model.llm_engine.model_config.dtype).removeprefix("torch.")
        yield lm, model_facts(model, source.name).model_copy(update={"dtype": dtype, "device": DEVICE})
    finally:
        lm.model.llm_engine.engine_core.shutdown()
