"""What is wrong with a model's files, in one line. Imports no modeling code, which `plan` does without."""

import re
import traceback
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

from crosslayer.environment import quiet_transformers

# far more than any model has; a config makes lists of this length, so a hostile number would fill the memory
MOST_LAYERS = 4096
SENTENCE = 200  # characters of a library's error that are shown


def check_layers(values: Mapping[str, Any]) -> None:
    """Refuse a number of layers that no model has, before a config makes lists of this length.

    `values` are the fields of a config.json, which may contain nested configs.
    """
    for part in (values, *(part for part in values.values() if isinstance(part, Mapping))):
        count = part.get("num_hidden_layers")
        if count is not None and not (isinstance(count, int) and 1 <= count <= MOST_LAYERS):
            raise ValueError(f"num_hidden_layers must be a whole number from 1 to {MOST_LAYERS}, got {count}")


@contextmanager
def one_line_errors(name: str):
    """Turn whatever a loader raises about a source into a single line."""
    try:
        with quiet_transformers():
            yield
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
        # what our own code raised is a sentence already
        if modules[-1].startswith("crosslayer"):
            reason = str(error)
        elif "does not appear to have a file" in text and "safetensors" in text:
            reason = "it has no safetensors weights; pickled weights are not loaded"
        # transformers advises to set trust_remote_code, which would run code of the model's author
        elif "trust_remote_code" in text:
            reason = (
                "it needs code from its folder or repository, which crosslayer never runs; try `crosslayer serve` if "
                "vLLM supports the model, or the folder that it was exported from"
            )
        # of a library's message only the first sentence: the rest is advice for its own callers
        else:
            reason = re.split(r"\. (?=[A-Z])", text)[0]
            reason = reason if len(reason) <= SENTENCE else f"{reason[:SENTENCE]} …"
        raise ValueError(f"{name!r} cannot be loaded: {reason}") from error
