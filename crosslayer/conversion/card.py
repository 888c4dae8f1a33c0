"""The model card of a retrofit: README.md of its folder, from its record alone."""

from crosslayer.conversion.record import RetrofitRecord
from crosslayer.conversion.words import sentences

OURS = "CrossLayerForCausalLM"  # all other classes open without this package
LIMITS = """- The figures hold for the text they were measured on; other text, tasks and lengths can suffer more.
- Storing less is not reading less: a layer that borrows keys or values reads its lender's at every step.
- `crosslayer verify FOLDER` checks the files, the plan and that cached, padded and compiled runs agree.
- The licence is that of the original model."""


def model_card(record: RetrofitRecord) -> str:
    """Return the card as Markdown."""
    tags = ", ".join(["crosslayer", *(entry["name"] for entry in record.methods)])
    header = ["---", "library_name: transformers", f"tags: [{tags}]", "---"]
    versions = ", ".join(f"{name} {version}" for name, version in record.environment.versions.items() if version)
    body = [
        f"# {record.architecture.name}, rewired",
        *sentences(record),
        "## Use",
        _use(record),
        "## How it came about",
        _how(record),
        f"Seed {record.options.seed}. {versions}.",
        "## Limits",
        LIMITS,
    ]
    return "\n".join(header) + "\n\n" + "\n\n".join(body) + "\n"


def _use(record: RetrofitRecord) -> str:
    lines = ["from transformers import AutoModelForCausalLM", 'model = AutoModelForCausalLM.from_pretrained("FOLDER")']
    if record.architecture.retrofit_class == OURS:
        lines.insert(0, "import crosslayer  # registers the model class")
    return "\n".join(["```python", *lines, "```"])


def _how(record: RetrofitRecord) -> str:
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
