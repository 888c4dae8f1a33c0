"""The model as lm-eval sees it: its own class for Hugging Face models, with our progress and a batch that fits a CPU.

lm-eval finds its batch on a GPU by trying until memory runs out. On a CPU nothing runs out in time: the process is
killed. There the batch is counted instead: so many requests as hold 1,024 tokens, fewer where their logits would
take more than a quarter of the memory that is free (`metered.cpu_batch`).
"""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crosslayer.output.progress import Meter


def language_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int | str, progress: Meter
) -> Any:
    """Return lm-eval's model of a causal LM that is loaded.

    Args:
        model: the causal LM.
        tokenizer: its own.
        batch: requests at once, or "auto".
        progress: shows how many requests are answered.

    """
    from crosslayer.evaluation.metered import MeteredLM

    lm = MeteredLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, backend="causal")
    lm.progress = progress
    return lm
