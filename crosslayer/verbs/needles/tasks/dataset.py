"""The samples as a data set of the LM Evaluation Harness (lm-eval), which finds this file beside its YAML files.

It calls `needles` with what `--metadata` and `--model_args` hold, as it does for its own RULER tasks: among that is
the name of the model, whose tokenizer says how long a text is.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from crosslayer.models.load import load_tokenizer
from crosslayer.verbs.needles.record import NeedlesSettings, string_match
from crosslayer.verbs.needles.sample import Samples

NAMES = ("tokenizer", "pretrained", "model")  # of model arguments, the first that is there counts


def needles(
    length: int,
    depths: list[int] | tuple[int, ...] = (0, 25, 50, 75, 100),
    keys: int = 4,
    samples: int = 20,
    new_tokens: int = 32,
    seed: int = 0,
    **arguments: Any,  # of the model, and of lm-eval itself: not ours to check
) -> dict[str, Any]:
    """Return the data set of a task, {"test": N rows}: `input`, `gen_prefix`, `outputs`, `length`, `depth`, `tokens`.

    Args:
        length: tokens of prompt and answer; the task's YAML file has it.
        depths: in per cent; by `--metadata '{"depths": [50]}'`, and the same for all that follow.
        keys: needles in a text.
        samples: rows of each depth.
        new_tokens: as `generation_kwargs` of the YAML file has it.
        seed: of all that is drawn.
        arguments: `tokenizer`, `pretrained` or `model` is a model's name, or the first a tokenizer that is loaded.

    Raises:
        ValueError: an option is wrong, or there is no tokenizer.

    """
    from datasets import Dataset

    given = [arguments[name] for name in NAMES if arguments.get(name)]
    options = NeedlesSettings(
        lengths=(length,), depths=tuple(depths), keys=keys, samples=samples, new_tokens=new_tokens, batch=1, seed=seed
    )
    if not given:
        raise ValueError("needles counts tokens: give pretrained=… or tokenizer=… in --model_args, or in --metadata")
    tokenizer = given[0] if isinstance(given[0], PreTrainedTokenizerBase) else load_tokenizer(str(given[0]))
    made, rows = Samples(tokenizer, options.keys, options.new_tokens, options.seed), []
    for depth in options.depths:
        for index in range(options.samples):
            sample = made.sample(length, depth, index)
            row = {"input": sample.text, "gen_prefix": sample.prefix, "outputs": [sample.value]}
            rows.append({**row, "length": length, "depth": depth, "tokens": sample.tokens})
    return {"test": Dataset.from_list(rows)}


def process_results(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the score of a row's answer: RULER's `string_match`, 0 or 1."""
    return {"string_match": string_match(results[0], row["outputs"])}
