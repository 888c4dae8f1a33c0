"""The samples as a dataset for the LM Evaluation Harness (lm-eval), which loads this file for its YAML files.

lm-eval calls `needles` with the contents of `--metadata` and `--model_args`, as for its own RULER tasks. These include
the name of the model, whose tokenizer determines the length of a text.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from crosslayer.judge.hidden import Samples, string_match
from crosslayer.models.load import load_tokenizer
from crosslayer.verbs.needles.result import NeedlesSettings

NAMES = ("tokenizer", "pretrained", "model")  # model arguments; the first that is set names the tokenizer


def needles(
    length: int,
    depths: list[int] | tuple[int, ...] = (0, 25, 50, 75, 100),
    keys: int = 4,
    samples: int = 20,
    new_tokens: int = 32,
    seed: int = 0,
    **arguments: Any,  # of the model and of lm-eval, not checked here
) -> dict[str, Any]:
    """Return the data set of a task, {"test": N rows}: `input`, `gen_prefix`, `outputs`, `length`, `depth`, `tokens`.

    Args:
        length: tokens of prompt and answer, set by the task's YAML file.
        depths: in percent; set with `--metadata '{"depths": [50]}'`, like the options below.
        keys: needles in a text.
        samples: rows per depth.
        new_tokens: the same as in `generation_kwargs` of the YAML file.
        seed: seed of all random choices.
        arguments: `tokenizer`, `pretrained` or `model`: a model's name; `tokenizer` may also be a loaded tokenizer.

    Raises:
        ValueError: an option is wrong, or there is no tokenizer.
    """
    from datasets import Dataset

    names = [arguments[name] for name in NAMES if arguments.get(name)]
    options = NeedlesSettings(
        lengths=(length,), depths=tuple(depths), keys=keys, samples=samples, new_tokens=new_tokens, batch=1, seed=seed
    )
    if not names:
        raise ValueError("needles needs a tokenizer: set pretrained=… or tokenizer=… in --model_args or --metadata")
    tokenizer = names[0] if isinstance(names[0], PreTrainedTokenizerBase) else load_tokenizer(str(names[0]))
    generator, rows = Samples(tokenizer, options.keys, options.new_tokens, options.seed), []
    for depth in options.depths:
        for index in range(options.samples):
            sample = generator.sample(length, depth, index)
            row = {"input": sample.text, "gen_prefix": sample.prefix, "outputs": [sample.value]}
            rows.append({**row, "length": length, "depth": depth, "tokens": sample.tokens})
    return {"test": Dataset.from_list(rows)}


def process_results(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the score of a row's answer: RULER's `string_match`, 0 or 1."""
    return {"string_match": string_match(results[0], row["outputs"])}
