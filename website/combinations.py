"""Which methods combine: every pair is built and run.

`python website/combinations.py` writes the section *Combinations* of docs/methods/overview.md.
"""

import re
from itertools import combinations
from pathlib import Path

import torch

from crosslayer.core.method import Method
from crosslayer.core.methods import merge_plans, method_class, method_names, to_entry
from crosslayer.core.plan import STATES
from crosslayer.testing.tiny import build, close, config_of, steps, tokens

PAGE = Path(__file__).resolve().parent.parent / "docs" / "methods" / "overview.md"
# what this script writes of the page; all else there is written by hand, or by website/reference.py
SECTION = re.compile(r"(?<=<!-- website/combinations.py writes from here -->\n\n).*(?=\n<!-- to here -->\n)", re.DOTALL)
LAYERS = 6
HEAD = f"""\
Every pair of methods, built with the options of each method's example at {LAYERS} layers. ✓ means that the model builds
and that its logits with a KV cache equal those without. A letter gives the reason why a pair fails; with other
options, such as groups that do not overlap, it may still work. Methods that mix states are applied in list order,
so the order of two of them matters.

`python website/combinations.py` writes this section, and a test compares it with the code.
"""
REASONS = {
    "A": ("Both replace the residual stream.", "A model has one way to add up the outputs of its layers."),
    "B": (
        "Both change the same state.",
        "They name different sources for the keys or values of a layer, or combine several sources in different ways.",
    ),
    "C": ("The source is dropped.", "One removes the attention of a layer whose states the other reads."),
    "D": ("Too few values are left.", "One changes layers' own values; the other leaves too few of them."),
    "E": (
        "Tokens are chosen.",
        "One lets layers choose tokens; the other gives such a layer a window or the states of several layers.",
    ),
}


def collision(first: str, second: str) -> str | None:
    """Return why two methods exclude one another, in both orders; None where they work together, with a cache too."""
    entries = [to_entry(method_class(name).example(LAYERS)) for name in (first, second)]
    refused = [_refused(entries), _refused(entries[::-1])]
    assert (refused[0] is None) == (refused[1] is None), f"{first}, {second}: {refused}"
    if refused[0] is None:
        model, ids = build(config_of(entries)), tokens(length=6)
        with torch.no_grad():
            close(steps(model, ids, [4, 1, 1])[0], model(ids, use_cache=False).logits, f"{first}, {second}: cached")
    return refused[0]


def _refused(entries: list[dict]) -> str | None:
    try:
        config_of(entries)
    except ValueError as error:
        return str(error)
    return None


def reason(first: str, second: str) -> str:
    """Return the letter in `REASONS` that explains why two methods exclude one another."""
    methods = [method_class(name).example(LAYERS) for name in (first, second)]
    if all(type(method).residual is not Method.residual for method in methods):
        return "A"
    plans = [method.plan(LAYERS) for method in methods]
    if not all(plan.attends(layer) for plan in plans for layer in range(LAYERS)):
        return "C"
    if any(type(method).choice is not Method.choice for method in methods):
        return "E"
    if any(all(plan.sources(state)[n] != n for plan in plans) for state in STATES for n in range(LAYERS)):
        return "B"
    merge_plans(methods, LAYERS)  # the plans agree, so what is refused is how states are mixed
    return "D"


def section() -> str:
    """Return the section: a table of all pairs, and the refused pairs by reason."""
    names = method_names()
    refused = {pair: reason(*pair) for pair in combinations(names, 2) if collision(*pair) is not None}
    rows = [f"| | {' | '.join(f'`{name}`' for name in names[1:])} |", "|---" * len(names) + "|"]
    for index, first in enumerate(names[:-1]):
        cells = [""] * index + [refused.get((first, second), "✓") for second in names[index + 1 :]]
        rows.append(f"| `{first}` | {' | '.join(cells)} |")
    for letter, (title, text) in REASONS.items():
        rows += ["", f"**{letter}. {title}** {text}", ""]
        for name in names:
            others = [f"`{second}`" for (first, second), why in refused.items() if (first, why) == (name, letter)]
            rows += [f"- `{name}` with {', '.join(others)}"] if others else []
    return "\n".join([HEAD, *rows, ""])


def main() -> None:
    """Write the section into its page."""
    written = section()
    text, found = SECTION.subn(lambda _: written, PAGE.read_text(encoding="utf-8"))
    assert found == 1, f"{PAGE} must have the two comments between which the section stands, once"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
