"""One self-contained HTML page: opens from disk, with no network, on a laptop and a phone."""

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from crosslayer.report.panel import Panel, plotly_figure, save_svg
from crosslayer.report.record import dumps

Table = tuple[str, list[str], list[list[str | list[str]]]]  # title, head, rows

STYLE = """
:root { --ink: #1c2030; --soft: #5a6274; --line: #e3e6ee; --ground: #f6f7fb; --accent: #2457c5; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main, header { max-width: 1180px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; }
h1 { font-size: 1.7rem; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 2px; }
.sub { color: var(--soft); margin: 0 0 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(190px, 46%), 1fr)); gap: 12px; }
.card, .panel, .words { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.card b { display: block; font-size: 1.55rem; line-height: 1.25; color: var(--accent); font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: .86rem; }
.words { margin: 14px 0; padding: 14px 18px; }
.words p { margin: 0 0 8px; } .words p:last-child { margin: 0; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.panel { min-width: 0; } .wide { grid-column: 1 / -1; }
.panel p { margin: 6px 0 0; color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
code { background: #eef0f6; border-radius: 4px; padding: 1px 5px; font-size: .88em; white-space: pre-wrap; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: .85rem; padding: 24px 0 48px; }
@media (max-width: 760px) { .grid { grid-template-columns: minmax(0, 1fr); } main, header { padding-left: 12px; padding-right: 12px; } h1 { font-size: 1.35rem; } }
"""

DRAW = """
for (const [id, figure] of Object.entries(FIGURES)) {
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displaylogo: false, displayModeBar: false});
}
"""


def page(
    title: str,
    subtitle: str,
    cards: Iterable[tuple[str, str, str]],
    words: Iterable[str],
    panels: list[Panel],
    tables: Iterable[Table],
) -> str:
    """Return the page as one HTML string; every text is escaped here."""
    figures = {f"figure-{panel.key}": plotly_figure(panel) for panel in panels}
    # In a script element only "</" and "<!" can end or bend the data.
    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
    body = [
        f"<header><h1>{_text(title)}</h1><p class='sub'>{_text(subtitle)}</p></header><main>",
        "<section class='cards'>" + "".join(_card(*card) for card in cards) + "</section>",
        "<section class='words'>" + "".join(f"<p>{_text(word)}</p>" for word in words) + "</section>",
        "<section class='grid'>" + "".join(_panel(panel) for panel in panels) + "</section>",
        "".join(_table(*table) for table in tables),
        "<footer>Made by crosslayer.</footer></main>",
        f"<script>{get_plotlyjs()}</script><script>const FIGURES = {data};{DRAW}</script>",
    ]
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='icon' href='data:,'><title>{_text(title)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "".join(body) + "</body></html>"


def save_page(folder: Path, text: str, record: dict[str, Any], panels: list[Panel]) -> None:
    """Write report.html, record.json and one SVG for each figure into a folder."""
    (folder / "report.html").write_text(text, encoding="utf-8")
    (folder / "record.json").write_text(dumps(record), encoding="utf-8")
    (folder / "figures").mkdir()
    for panel in panels:
        save_svg(panel, folder / "figures")


def runs(numbers: list[int] | tuple[int, ...]) -> str:
    """Return whole numbers with ranges for neighbours: 0-2, 7."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][-1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _text(value: Any) -> str:
    return html.escape(str(value))


def _card(title: str, figure: str, note: str) -> str:
    return f"<div class='card'>{_text(title)}<b>{_text(figure)}</b><span>{_text(note)}</span></div>"


def _panel(panel: Panel) -> str:
    wide = " wide" if panel.wide else ""
    return (
        f"<article class='panel{wide}'><h3>{_text(panel.title)}</h3><div class='figure' id='figure-{_text(panel.key)}'></div>"
        f"<p>{_text(panel.sentence)}</p></article>"
    )


def _table(title: str, head: list[str], rows: list[list[str | list[str]]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    names = "".join(f"<th>{_text(name)}</th>" for name in head)
    return f"<h2>{_text(title)}</h2><div class='panel scroll'><table><tr>{names}</tr>{cells}</table></div>"


def _cell(value: str | list[str]) -> str:
    """Escape a cell; a list is set as pieces of code."""
    return _text(value) if isinstance(value, str) else " ".join(f"<code>{_text(piece)}</code>" for piece in value)
