"""The head, cards and tables of a diagnosis, from its record alone."""

from crosslayer.output.page import Page, Table
from crosslayer.output.words import measured_on
from crosslayer.verbs.diagnose.figures import highest, panels
from crosslayer.verbs.diagnose.record import CacheCandidates, TopToken
from crosslayer.verbs.diagnose.result import Diagnosis

Card = tuple[str, str, str]  # title, figure, explanation


def layout(record: Diagnosis) -> Page:
    """Return the parts of the page."""
    return Page(
        title=f"Diagnosis of {record.settings.model}",
        subtitle=subtitle(record),
        cards=cards(record),
        words=record.words,
        panels=panels(record),
        tables=tables(record),
    )


def subtitle(record: Diagnosis) -> str:
    """Return what was measured, on which text."""
    model, settings = record.model, record.settings
    text = measured_on(settings.sequences, settings.length, settings.text, settings.documents)
    carried = f" · {model.streams} residual streams" if model.streams > 1 else ""
    return f"{model.class_}, {model.parameters / 1e6:.1f} M parameters, {model.layers} layers{carried} · {text}"


def cards(record: Diagnosis) -> list[Card]:
    """Return the headline cards."""
    sink, neighbours, cache = record.verdict.sink, record.verdict.neighbours, record.verdict.cache
    layer, peak = highest(record.measures.hidden_norm_ratio)
    shown = [
        (
            "Strongest sink",
            f"{sink.strongest_share:.0%}",
            f"of layer {sink.strongest}'s attention goes to the first token",
        ),
        ("Hidden-state peak", f"{peak:.3g}×", f"the median norm, entering layer {layer}"),
    ]
    whole, rest = neighbours.map_similarity, neighbours.map_similarity_without_first
    if whole is not None and rest is not None:
        title, note = "Neighbouring maps", "mean cosine in the top half, with and without the first column"
        shown.append((title, f"{whole:.2f} → {rest:.2f}", note))
    if record.verdict.redundancy.attention:
        least = record.verdict.redundancy.attention[0]
        note = f"cos(x, x + Attn(x)) = {least.similarity:.3f}"
        shown.append(("Redundant attention", f"layer {least.layer}", note))
    return shown + (_cache_cards(cache) if cache is not None else [])


def _cache_cards(cache: CacheCandidates) -> list[Card]:
    """Return what would stay of the cache with superblocks by depth, from the least to the most, if there are any."""
    kept = sorted(cache.by_depth.kept, key=lambda entry: entry.share)
    if not cache.by_depth.followers or not kept:
        return []
    figure = " · ".join(f"{entry.share:.0%}" for entry in kept)
    named = " · ".join(entry.title for entry in kept)
    note = f"would stay with superblocks ({named}); unproven until retrofitted"
    return [("Candidate KV cache", figure, note)]


def tables(record: Diagnosis) -> list[Table]:
    """Return the tables below the figures: top tokens, settings."""
    tokens = []
    for layer, entries in enumerate(record.top_tokens):
        if entries:
            tokens.append([str(layer), [f"{_visible(entry)} {entry.share:.1%}" for entry in entries]])
    versions = record.environment.versions
    settings = {
        **record.model.model_dump(by_alias=True),
        **record.settings.model_dump(exclude_none=True),
        **{f"{package} version": version for package, version in versions.items()},
        **record.environment.machine.model_dump(),
        "seconds": f"{record.seconds:.1f}",
        "masks": _counted(record.model.masks),
    }
    rows: list[list[str | list[str]]] = [[key.replace("_", " "), str(entry)] for key, entry in settings.items()]
    title = "Top tokens by layer (share of all attention that their most important occurrences receive)"
    return [(title, ["layer", "tokens"], tokens), ("Settings and versions", ["setting", "value"], rows)]


def _visible(entry: TopToken) -> str:
    """Show white space in a token, and where the token is the first of the sequence."""
    if entry.token == "first token":
        return entry.token
    text = entry.token.replace("\n", "\\n").replace(" ", "␣")
    return f"{text} (first)" if entry.first else text


def _counted(masks: list[str | None]) -> str:
    kinds = [mask or "no attention" for mask in masks]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
