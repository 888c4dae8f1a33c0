"""The card of an exported model: that of its source, with another way to use it."""

import re
from collections.abc import Mapping
from typing import Any

from crosslayer.output.card import card, common_facts, parted, use

USE = re.compile(r"## Use\n.*?(?=\n## |\Z)", re.DOTALL)


def export_card(source: str | None, title: str, to: str, origin: Mapping[str, Any], tokenizer: bool) -> str:
    """Return the card as Markdown.

    Args:
        source: the card of what was exported, None where there is none.
        title: the head and first lines where there is no card.
        to: the form.
        origin: what is known of where the model comes from; what a source's card says goes before.
        tokenizer: whether there is one beside the model.

    """
    facts, body = parted(source or "")
    note = f"Written by `crosslayer export --to {to}`: it opens without crosslayer."
    section = f"## Use\n\n{note}\n\n{use(to, tokenizer)}\n"
    body = body or title
    body = USE.sub(lambda _: section, body, count=1) if USE.search(body) else f"{body.rstrip()}\n\n{section}"
    return card({"tags": ["crosslayer"], **origin, **facts, **common_facts(to)}, body)
