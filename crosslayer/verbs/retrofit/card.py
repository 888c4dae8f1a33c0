"""The model card of a retrofit: README.md of its folder, from its record alone."""

from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from crosslayer.output.card import card, common_facts, use
from crosslayer.verbs.retrofit.page import damage_table
from crosslayer.verbs.retrofit.result import RetrofitReport
from crosslayer.verbs.retrofit.run import DEFAULTS
from crosslayer.verbs.retrofit.sentences import sentences

LIMITS = """- The figures hold for the text they were measured on; other text, tasks and lengths may lose more.
- A smaller cache does not mean fewer reads: a layer that shares keys or values reads its source's at every step.
- `crosslayer verify FOLDER` checks the files, the plan, and that cached, padded and compiled runs agree.
- The license is that of the original model."""


def model_card(record: RetrofitReport, tokenizer: bool = True) -> str:
    """Return the card as Markdown; `tokenizer`: whether the folder holds one."""
    form = "crosslayer" if record.takes_shim else "hf"
    versions = ", ".join(f"{name} {version}" for name, version in record.environment.versions.items() if version)
    body = [
        f"# {record.architecture.name}, converted",
        *sentences(record),
        "## What it costs",
        _costs(record),
        "## Use",
        use(form, tokenizer),
        "## Which layers share",
        f"```text\n{record.plan.diagram()}\n```",
        "## How it was made",
        _how(record),
        f"Seed {record.settings.seed}. {versions}.",
        "## Limits",
        LIMITS,
    ]
    return card(_facts(record, form), "\n\n".join(body) + "\n")


def _facts(record: RetrofitReport, form: str) -> dict[str, Any]:
    """Return the card's metadata for the Hub, with the perplexity on each domain as `model-index`."""
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="text",
            dataset_name=domain.name,
            dataset_config=domain.name,  # the Hub identifies results by it, not by the name
            metric_type="perplexity",
            metric_name="perplexity after the retrofit",
            metric_value=round(domain.perplexity_after, 4),
        )
        for domain in record.damage.domains
    ]
    index = ModelCardData(model_name=f"{record.architecture.name}, converted", eval_results=results).to_dict()
    tags = ["crosslayer", *(entry["name"] for entry in record.methods)]
    return {**common_facts(form), **record.architecture.origin, "tags": tags, **index}


def _costs(record: RetrofitReport) -> str:
    _, head, rows = damage_table(record)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _how(record: RetrofitReport) -> str:
    """Return the command or the Python call that made the model."""
    if record.command is not None:
        return f"```sh\n{record.command}\n```"
    options = [f"{name}={value!r}" for name, value in record.settings.changed(DEFAULTS).items()]
    names = {"model": [record.architecture.name], "text": record.judged}
    if record.fitted and set(record.fitted) != set(record.judged):
        names["calibration_text"] = record.fitted
        options.append("calibration_text=calibration_text")
    comment = "; ".join(f"{name}: {', '.join(map(repr, values))}" for name, values in names.items())
    call = f"crosslayer.retrofit({', '.join(['model', 'text', 'tokenizer', *options])})"
    return f"```python\n# {comment}\n{call}\n```"
