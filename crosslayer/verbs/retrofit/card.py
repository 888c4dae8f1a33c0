"""The model card of a retrofit: README.md of its folder, from its record alone."""

from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from crosslayer.output.card import card, common_facts, use
from crosslayer.verbs.retrofit.result import Receipt
from crosslayer.verbs.retrofit.words import kl, ratio, sentences

LIMITS = """- The figures hold for the text they were measured on; other text, tasks and lengths can suffer more.
- Storing less is not reading less: a layer that borrows keys or values reads its lender's at every step.
- `crosslayer verify FOLDER` checks the files, the plan and that cached, padded and compiled runs agree.
- The licence is that of the original model."""


def model_card(record: Receipt, tokenizer: bool = True) -> str:
    """Return the card as Markdown; `tokenizer`: whether there is one beside the model."""
    versions = ", ".join(f"{name} {version}" for name, version in record.environment.versions.items() if version)
    body = [
        f"# {record.architecture.name}, rewired",
        *sentences(record),
        "## What it costs",
        _costs(record),
        "## Use",
        use(_form(record), tokenizer),
        "## Who reads from whom",
        f"```text\n{record.plan.diagram()}\n```",
        "## How it came about",
        _how(record),
        f"Seed {record.options.seed}. {versions}.",
        "## Limits",
        LIMITS,
    ]
    return card(_facts(record), "\n\n".join(body) + "\n")


def _form(record: Receipt) -> str:
    return "crosslayer" if record.architecture.is_ours else "hf"


def _facts(record: Receipt) -> dict[str, Any]:
    """Return what the hub reads of a card: among it the perplexity on each domain, as `model-index`."""
    name = record.architecture.name
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="text",
            dataset_name=domain.name,
            dataset_config=domain.name,  # results are told apart by it, not by the name
            metric_type="perplexity",
            metric_name="perplexity after the retrofit",
            metric_value=round(domain.perplexity_after, 4),
        )
        for domain in record.damage.domains
    ]
    index = ModelCardData(model_name=f"{name}, rewired", eval_results=results).to_dict()
    tags = ["crosslayer", *(entry["name"] for entry in record.methods)]
    return {**common_facts(_form(record)), **record.architecture.origin, "tags": tags, **index}


def _costs(record: Receipt) -> str:
    rows = [
        "| text | fitted to | perplexity before | after | ratio (95 %) | KL to the original, nats a token (95 %) |",
        "|---|---|---|---|---|---|",
    ]
    for domain in record.damage.domains:
        before, after = f"{domain.perplexity_before:.2f}", f"{domain.perplexity_after:.2f}"
        cells = [domain.name.replace("|", "\\|"), "yes" if domain.seen else "no", before, after, ratio(domain)]
        rows.append(f"| {' | '.join([*cells, kl(domain)])} |")
    return "\n".join(rows)


def _how(record: Receipt) -> str:
    """Return the command line, or the call from Python."""
    if record.command is not None:
        return f"```sh\n{record.command}\n```"
    texts, names = record.texts, [f"model: {record.architecture.name!r}", f"text: {_listed(record.texts.judged)}"]
    options = "".join(f", {name}={value!r}" for name, value in record.options.changed().items())
    if texts.fitted and set(texts.fitted) != set(texts.judged):
        names.append(f"calibration_text: {_listed(texts.fitted)}")
        options += ", calibration_text=calibration_text"
    return f"```python\n# {'; '.join(names)}\ncrosslayer.retrofit(model, text, tokenizer{options})\n```"


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
