"""The picture of docs/start/concepts.md: which layers cache keys and values, and which layers read them.

    python benchmarks/who_reads_whom.py    # docs/figures/who_reads_whom.svg

Drawn from the plans of the methods at 8 layers. The picture is legible on a phone, follows a dark theme, and needs
neither scripts nor fonts of another host.
"""

from pathlib import Path

from crosslayer.core.methods import load_method, merge_plans
from crosslayer.core.plan import DepthPlan

LAYERS = 8
PANELS = {  # title → what is shared, method
    "Vanilla": ("nothing shared", None),
    "CLA": ("K and V, in pairs", "cla"),
    "YOCO": ("K and V of layer 4", "yoco"),
    "SVFormer": ("V of layer 0", "svformer"),
    "UniAttn": ("maps, in a block", {"name": "uniattn", "superblocks": [[4, 5, 6, 7]]}),
    "drop": ("attention removed", {"name": "drop", "attention": [4, 6, 7]}),
}
COLUMNS, WIDTH, HEIGHT, TOP = 3, 124, 214, 8  # panels in a row; size of a panel, in user units
BOX, ROW = (34, 13), 17  # a state in a layer
KEYS, VALUES = 26, 64  # left edges of the boxes
STYLE = """
svg { --page: #ffffff; --text: #1b1f2a; --quiet: #5c6475; --empty: #e3e6ee; --keys: #2457c5; --values: #b8461f; }
@media (prefers-color-scheme: dark) {
  svg { --page: #15181f; --text: #eceff6; --quiet: #a5adbd; --empty: #333946; --keys: #8fb1ff; --values: #ffa77f; }
}
text { font: 10px system-ui, sans-serif; fill: var(--text); }
.title { font-size: 12px; font-weight: 700; } .quiet { fill: var(--quiet); }
.box { text-anchor: middle; font-weight: 600; } .full { fill: var(--page); }
.keys { --color: var(--keys); } .values { --color: var(--values); }
rect.keys, rect.values { stroke: var(--color); fill: var(--color); }
rect.hollow, rect.part { fill: none; } rect.hollow { stroke-dasharray: 3 2; }
text.hollow, text.part { fill: var(--color); } path { stroke: var(--color); fill: none; stroke-width: 1.3; }
.head, circle { fill: var(--color); stroke: none; }
"""


def panel(title: str) -> str:
    """Return a panel: a row for each layer, the first at the bottom, and the share of the cache under them."""
    shared, entry = PANELS[title]
    methods = [] if entry is None else [load_method(entry)]
    plan = merge_plans(methods, LAYERS)
    windows = methods[0].windows(LAYERS) if methods else None
    rows = [_text(KEYS - 18, 12, title, "title"), _text(KEYS - 18, 25, shared, "quiet")]
    for layer in range(LAYERS):
        windowed = windows is not None and windows[layer] is not None
        rows.append(_text(KEYS - 18, _y(layer) + 10, str(layer), "quiet"))
        rows += _layer(plan, layer, windowed)
    for state, x, side in (("keys", KEYS, -1), ("values", VALUES + BOX[0], 1)):
        rows += [_arrows(plan, state, source, x, side) for source in range(LAYERS)]
    share, y = plan.cached_fraction(), _y(0) + 24
    width = VALUES + BOX[0] - KEYS
    rows.append(f'<rect x="{KEYS}" y="{y}" width="{width}" height="4" rx="2" fill="var(--empty)"/>')
    rows.append(f'<rect x="{KEYS}" y="{y}" width="{width * share:.1f}" height="4" rx="2" fill="var(--text)"/>')
    rows.append(_text(KEYS, y + 17, f"cache: {'≤ ' if windows else ''}{100 * share:g}%", ""))
    return "".join(rows)


def _layer(plan: DepthPlan, layer: int, windowed: bool) -> list[str]:
    """Return the boxes of a layer: full where it caches a state, dashed where it reads another layer's."""
    y, (width, height) = _y(layer), BOX
    if not plan.attends(layer):
        return [_text(KEYS + 2, y + 10, "no attention", "quiet")]
    shapes = []
    for state, x in (("keys", KEYS), ("values", VALUES)):
        own = plan.reads(state, layer) == (layer,)
        map_read = plan.reads("queries", layer) == plan.reads("keys", layer) != (layer,)
        name = "map" if state == "keys" and map_read else state[0].upper()
        style = "hollow" if not own else "part" if windowed else "full"
        shapes.append(f'<rect class="{state} {style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="2"/>')
        if style == "part":  # just the latest tokens are cached
            shapes.append(f'<rect class="{state}" x="{x + width - 10}" y="{y}" width="10" height="{height}" rx="2"/>')
        shapes.append(_text(x + width / 2 - (5 if style == "part" else 0), y + 10, name, f"box {state} {style}"))
    return shapes


def _arrows(plan: DepthPlan, state: str, source: int, x: float, side: int) -> str:
    """Return a line from a source to its readers, with an arrow into each; `side` is −1 on the left, 1 on the right."""
    readers = [layer for layer in range(source + 1, LAYERS) if source in plan.reads(state, layer)]
    if not readers:
        return ""
    line, middle = x + side * 8, BOX[1] / 2
    path = [f"M{x} {_y(source) + middle}H{line}V{_y(readers[-1]) + middle}"]
    heads = []
    for reader in readers:
        y = _y(reader) + middle
        path.append(f"M{line} {y}H{x + side * 3}")
        heads.append(f"M{x + side} {y}l{side * 5} -3v6z")
    return f'<g class="{state}"><path d="{"".join(path)}"/><path class="head" d="{"".join(heads)}"/></g>'


def _y(layer: int) -> float:
    return 36 + (LAYERS - 1 - layer) * ROW


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{text}</text>'


def _legend(y: int) -> str:
    """Return what the marks mean."""
    lines = [
        ("full", "keys (K) and values (V) that the layer caches"),
        ("hollow", "read from the arrow's source, not cached"),
        ("part", "cached for the latest tokens only (a window)"),
    ]
    marks = []
    for number, (style, text) in enumerate(lines):
        top = y + 18 * number
        for state, x in (("keys", 8), ("values", 34)):
            marks.append(f'<rect class="{state} {style}" x="{x}" y="{top}" width="22" height="11" rx="2"/>')
            if style == "part":
                marks.append(f'<rect class="{state}" x="{x + 14}" y="{top}" width="8" height="11" rx="2"/>')
        marks.append(_text(64, top + 9, text, ""))
    marks.append(_text(8, y + 63, "map: the source's softmax map, from its queries and keys", ""))
    marks.append(_text(8, y + 79, "0 to 7: the layers, the first at the bottom", ""))
    return "".join(marks)


def picture() -> str:
    """Return the whole as SVG."""
    rows = -(-len(PANELS) // COLUMNS)
    width, height = COLUMNS * WIDTH, TOP + rows * HEIGHT + 92
    shown = []
    for number, title in enumerate(PANELS):
        x, y = number % COLUMNS * WIDTH, TOP + number // COLUMNS * HEIGHT
        shown.append(f'<g transform="translate({x} {y})">{panel(title)}</g>')
    name = f"Which of {LAYERS} layers cache keys and values, and which layers read them, in six models"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="620" role="img">'
    page = f'<title>{name}</title><style>{STYLE}</style><rect width="100%" height="100%" rx="6" fill="var(--page)"/>'
    return f"{head}{page}{''.join(shown)}{_legend(TOP + rows * HEIGHT + 2)}</svg>\n"


if __name__ == "__main__":
    out = Path(__file__).parent.parent / "docs" / "figures" / "who_reads_whom.svg"
    out.write_text(picture(), encoding="utf-8")
    print(out)
