"""What a retrofit's folder has for others: its card and evaluation results."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

from crosslayer.judge.report import ALL
from crosslayer.output.card import LIBRARIES, card, use
from crosslayer.verbs.retrofit.page import damage_table, sentences
from crosslayer.verbs.retrofit.result import RetrofitReport
from crosslayer.verbs.retrofit.run import DEFAULTS

EVAL_RESULTS = Path(".eval_results", "crosslayer.yaml")  # where the hub reads them
LIMITS = """- The figures hold for the text they were measured on; other text, tasks and lengths may lose more.
- A smaller cache does not mean fewer reads: a layer that shares keys or values reads its source's at every step.
- `crosslayer verify FOLDER` checks the files, the plan, and that cached, padded and compiled runs agree.
- The license is that of the original model."""


def write_card(record: RetrofitReport, folder: Path, tokenizer: bool) -> None:
    """Write README.md, and evaluation results on datasets of the hub; `tokenizer`: whether the folder holds one."""
    (folder / "README.md").write_text(model_card(record, tokenizer), encoding="utf-8")
    entries = []
    for row in record.rows_of("perplexity", candidate=record.candidate):
        # a dataset of the hub is OWNER/NAME, often with a configuration, and a split; other texts have no name there
        domain = row.scope
        names = domain.split("/")
        if len(names) not in (3, 4):
            continue
        note = f"perplexity of {record.of('KL', domain).n} windows of {record.settings.length} tokens"
        before = f"{row.original:.4f} before the retrofit"
        entries.append(
            EvalResultEntry(
                dataset_id="/".join(names[:2]),
                task_id=names[2] if len(names) == 4 else "default",
                value=round(row.value or 0.0, 4),
                notes=f"{note} of the split {names[-1]}; {before}",
            )
        )
    if entries:
        (folder / EVAL_RESULTS).parent.mkdir()
        text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
        (folder / EVAL_RESULTS).write_text(text, encoding="utf-8")


def model_card(record: RetrofitReport, tokenizer: bool) -> str:
    """Return the card as Markdown; `tokenizer`: whether the folder holds one."""
    form = "crosslayer" if record.architecture.retrofit_class == "CrossLayerForCausalLM" else "hf"
    versions = ", ".join(f"{name} {version}" for name, version in record.environment.versions.items() if version)
    _, head, rows = damage_table(record)
    costs = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]

    # the command that made the model; without one, the Python call, with a comment on what it was given
    if record.command is not None:
        how = f"```sh\n{record.command}\n```"
    else:
        given = record.settings.changed(DEFAULTS)
        options = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        names = {"model": [record.architecture.name], "text": record.judged}
        if record.fitted and set(record.fitted) != set(record.judged):
            names["calibration_text"] = record.fitted
            options.append("calibration_text=calibration_text")
        comment = "; ".join(f"{name}: {', '.join(map(repr, values))}" for name, values in names.items())
        call = f"crosslayer.retrofit({', '.join(['model', 'text', 'tokenizer', *options])})"
        how = f"```python\n# {comment}\n{call}\n```"

    body = [
        f"# {record.architecture.name}, converted",
        *sentences(record),
        "## What it costs",
        "\n".join(f"| {' | '.join(line)} |" for line in costs),
        "## Use",
        use(form, tokenizer),
        "## Which layers share",
        f"```text\n{record.plan.diagram()}\n```",
        "## How it was made",
        how,
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
            dataset_name=row.scope,
            dataset_config=row.scope,  # the Hub identifies results by it, not by the name
            metric_type="perplexity",
            metric_name="perplexity after the retrofit",
            metric_value=round(row.value or 0.0, 4),
        )
        for row in record.rows_of("perplexity", candidate=record.candidate)
        if row.scope != ALL
    ]
    index = ModelCardData(model_name=f"{record.architecture.name}, converted", eval_results=results).to_dict()
    tags = ["crosslayer", *(entry["name"] for entry in record.methods)]
    loaded_by = {"library_name": LIBRARIES[form], "pipeline_tag": "text-generation"}
    return {**loaded_by, **record.architecture.origin, "tags": tags, **index}
