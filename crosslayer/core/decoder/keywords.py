"""Keyword arguments of the decoder's `forward`: unknown ones are refused, since a misspelled one would do nothing."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from transformers.utils.generic import TransformersKwargs

LOSS = ("num_items_in_batch", "ignore_index", "shift_labels", "skip_logits")  # options of the loss
LEAKED = ("tokenizer", "assistant_tokenizer")  # arguments of `generate`, which passes them on to `forward`
# arguments that layers pass on to the attention function: transformers' own, continuous batching's and vLLM's
PASSED_ON = frozenset(
    [*TransformersKwargs.__annotations__, "attention_instances", "read_index", "write_index", "block_table",
     "logits_indices", "logits_processor_args"]
)  # fmt: skip


def check_keywords(forward: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuse unknown keyword arguments.

    Raises:
        TypeError: a name is unknown; the message suggests the closest known one.
    """
    for name in names:
        if name in PASSED_ON:
            continue
        named = [key for key in inspect.signature(forward).parameters if key not in ("self", "kwargs")]
        close = difflib.get_close_matches(name, [*named, *LOSS, *sorted(PASSED_ON)], 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(named)}"
        raise TypeError(f"{forward.__qualname__}() has no argument {name!r}; {hint}")
