"""The head, cards and tables of a diagnosis, from its record alone."""

from crosslayer.output.page import Page, Table
from crosslayer.output.words import measured_on
from crosslayer.verbs.diagnose.curves import highest
from crosslayer.verbs.diagnose.figures import panels
from crosslayer.verbs.diagnose.record import TopToken
from crosslayer.verbs.diagnose.result import Diagnosis


def layout(record: Diagnosis) -> Page:
    """Return the parts of the page."""
    model, settings = record.model, record.settings
    text = measured_on(settings.sequences, settings.length, settings.text, settings.documents)
    carried = f" · {model.streams} residual streams" if model.streams > 1 else ""
    return Page(
        title=f"Diagnosis of {model.name}",
        subtitle=f"{model.class_}, {model.parameters / 1e6:.1f} M parameters, {model.layers} layers{carried} · {text}",
        cards=_cards(record),
        words=record.words,
        panels=panels(record),
        tables=_tables(record),
    )


def _cards(record: Diagnosis) -> list[tuple[str, str, str]]:
    verdict, sink = record.verdict, record.verdict.sink
    layer, peak = highest(record.measures.hidden_norm_ratio)
    note = f"of layer {sink.strongest}'s attention goes to the first token"
    cards = [
        ("Strongest sink", f"{sink.strongest_share:.0%}", note),
        ("Hidden-state peak", f"{peak:.3g}×", f"the median norm, entering layer {layer}"),
    ]
    whole, rest = verdict.neighbours.map_similarity, verdict.neighbours.map_similarity_without_first
    if whole is not None and rest is not None:
        note = "mean cosine in the top half, with and without the first column"
        cards.append(("Neighbouring maps", f"{whole:.2f} → {rest:.2f}", note))
    for least in verdict.redundancy.attention[:1]:
        note = f"cos(x, x + Attn(x)) = {least.similarity:.3f}"
        cards.append(("Redundant attention", f"layer {least.layer}", note))
    if verdict.cache is not None and verdict.cache.by_depth.followers and verdict.cache.by_depth.kept:
        kept = sorted(verdict.cache.by_depth.kept, key=lambda entry: entry.share)
        note = f"would stay with superblocks ({' · '.join(entry.title for entry in kept)}); unproven until retrofitted"
        cards.append(("Candidate KV cache", " · ".join(f"{entry.share:.0%}" for entry in kept), note))
    return cards


def _tables(record: Diagnosis) -> list[Table]:
    """Return the top tokens of each layer, and the facts of the model."""
    tokens = []
    for layer, entries in enumerate(record.top_tokens):
        if entries:
            tokens.append([str(layer), [f"{_visible(entry)} {entry.share:.1%}" for entry in entries]])
    facts = record.model.model_dump(by_alias=True, exclude_none=True)
    masks = [mask or "no attention" for mask in record.model.masks]
    facts["masks"] = ", ".join(f"{masks.count(mask)} × {mask}" for mask in dict.fromkeys(masks))
    title = "Top tokens by layer (share of all attention that their most important occurrences receive)"
    rows = [[name.replace("_", " "), str(fact)] for name, fact in facts.items()]
    return [(title, ["layer", "tokens"], tokens), ("Model", ["fact", "value"], rows)]


def _visible(entry: TopToken) -> str:
    """Show white space in a token, and where the token is the first of the sequence."""
    if entry.token == "first token":
        return entry.token
    text = entry.token.replace("\n", "\\n").replace(" ", "␣")
    return f"{text} (first)" if entry.first else text
