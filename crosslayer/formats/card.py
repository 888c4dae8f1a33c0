"""The card of an exported model: that of its source, with another way to use it."""

import re

USE = re.compile(r"## Use\n.*?(?=\n## |\Z)", re.DOTALL)
LIBRARY = re.compile(r"^library_name: .*$", re.MULTILINE)
# what opens a form, as the hub calls it, and how
LIBRARIES = {"hf": "transformers", "deci": "vllm", "gguf": "gguf"}
USES = {
    "hf": """```python
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("FOLDER")
```""",
    "deci": """```sh
vllm serve FOLDER --trust-remote-code  # for configuration_decilm.py, the class of the config
```""",
    "gguf": """```sh
llama-cli -m FOLDER/model.gguf
```""",
}
BARE = """---
library_name: transformers
tags: [crosslayer]
---

# {name}

{title}

## Use
"""


def export_card(source: str | None, name: str, title: str, to: str) -> str:
    """Return the card as Markdown.

    Args:
        source: the card of what was exported, None where there is none.
        name: how the model is called.
        title: its methods, with their options.
        to: the form.

    """
    text = BARE.format(name=name, title=title or "No methods.") if source is None else source
    note = f"Written by `crosslayer export --to {to}`: it opens without crosslayer."
    use = f"## Use\n\n{note}\n\n{USES[to]}\n"
    text = USE.sub(lambda _: use, text, count=1) if USE.search(text) else f"{text.rstrip()}\n\n{use}"
    return LIBRARY.sub(f"library_name: {LIBRARIES[to]}", text, count=1)
