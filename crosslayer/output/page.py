"""One self-contained HTML page: opens from disk, with no network, on a laptop and a phone."""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plotly.offline import get_plotlyjs

from crosslayer.output.panel import Panel, drawn, plotly_figure, save_svg
from crosslayer.output.record import dumps


class Mark(NamedTuple):
    """A cell whose color says what it means: `kind` is pass, fail or skip."""

    text: str
    kind: str


Cell = str | list[str] | Mark  # a list is set as pieces of code
Table = tuple[str, list[str], list[list[Any]]]  # title, head, rows of cells

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
.figure { height: 300px; margin-top: 6px; }
.square { height: auto; aspect-ratio: 1 / 0.98; max-width: 470px; margin: 6px auto 0; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin-top: 4px; }
.legend button { border: 0; padding: 2px 0; background: none; font: inherit; font-size: .82rem; color: inherit; text-align: left; cursor: pointer; }
.legend i { display: inline-block; width: 22px; border-top: 3px solid; margin-right: 6px; vertical-align: middle; }
.legend i.dashed { border-top-style: dotted; }
.legend .scale { flex: 1; max-width: 320px; min-width: 60px; height: 10px; border: 0; margin: 0; align-self: center; background: linear-gradient(to right, #440154, #48186a, #472d7b, #424086, #3b528b, #33638d, #2c728e, #26828e, #21918c, #1fa088, #28ae80, #3fbc73, #5ec962, #84d44b, #addc30, #d8e219, #fde725); }
.legend span { font-size: .82rem; }
.legend [aria-pressed=false] { opacity: .4; text-decoration: line-through; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
th, td:first-child { overflow-wrap: normal; }
td, th { white-space: pre-line; } td { font-variant-numeric: tabular-nums; }
.pass { color: #1c7a4f; } .fail { color: #b3261e; } .skip { color: var(--soft); }
.pass, .fail, .skip { font-weight: 600; }
code { display: inline-block; background: #eef0f6; border-radius: 4px; padding: 1px 5px; font-size: .88em; white-space: pre-wrap; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: .85rem; padding: 24px 0 48px; }
@media (max-width: 760px) {
  .grid { grid-template-columns: minmax(0, 1fr); } main, header { padding-left: 12px; padding-right: 12px; } h1 { font-size: 1.35rem; }
  .card:last-child:nth-child(odd) { grid-column: 1 / -1; } .card b { font-size: 1.35rem; }
  .stack tr:first-child { display: none; } .stack tr { display: block; border-bottom: 2px solid var(--line); padding: 8px 0; }
  .stack td { display: grid; grid-template-columns: 38% 1fr; gap: 10px; border: 0; padding: 2px 0; }
  .stack td::before { content: attr(data-name); color: var(--soft); } .stack td:empty { display: none; }
}
"""

DRAW = """
for (const [id, figure] of Object.entries(FIGURES)) {
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displaylogo: false, displayModeBar: false});
}
for (const button of document.querySelectorAll(".legend button")) {
  button.onclick = () => {
    const figure = button.closest(".panel").querySelector(".figure"), shown = button.ariaPressed === "false";
    const traces = figure.data.flatMap((trace, i) => trace.legendgroup === button.textContent ? [i] : []);
    button.ariaPressed = String(shown);
    Plotly.restyle(figure, {visible: shown}, traces);
  };
}
"""


@dataclass(frozen=True)
class Page:
    """The parts of a page: every text is escaped when `html` puts them together. `lead` comes before the figures."""

    title: str
    subtitle: str
    cards: Sequence[tuple[str, str, str]]  # title, figure, note
    words: Sequence[str]
    panels: list[Panel]
    tables: Sequence[Table]
    lead: Sequence[Table] = ()

    def html(self) -> str:
        """Return the page as one HTML string."""
        return page(self.title, self.subtitle, self.cards, self.words, self.panels, self.tables, self.lead)


def page(
    title: str,
    subtitle: str,
    cards: Iterable[tuple[str, str, str]],
    words: Iterable[str],
    panels: list[Panel],
    tables: Iterable[Table],
    lead: Sequence[Table] = (),
) -> str:
    """Return the page as one HTML string; every text is escaped here. `lead` are tables that come before the figures."""
    body = [
        f"<header><h1>{_text(title)}</h1><p class='sub'>{_text(subtitle)}</p></header><main>",
        "<section class='cards'>" + "".join(_card(*card) for card in cards) + "</section>",
        "<section class='words'>" + "".join(f"<p>{_text(word)}</p>" for word in words) + "</section>",
        "".join(_table(*table) for table in lead) + ("<h2>Figures</h2>" if lead and panels else ""),
        "<section class='grid'>" + "".join(_panel(panel) for panel in panels) + "</section>",
        "".join(_table(*table) for table in tables),
        "<footer>Made by crosslayer.</footer></main>",
        _scripts(panels),
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
    for panel in panels:
        (folder / "figures").mkdir(exist_ok=True)
        save_svg(panel, folder / "figures")


def measured_on(sequences: int, length: int, text: str | None, documents: Sequence[int] | None) -> str:
    """Return on which text something was measured, and what the bands of the figures are."""
    windows = f"{sequences} sequences of {length} tokens, {text or 'own tokens'}"
    origin = f" · {_origin(documents)}" if documents else ""
    return (
        f"{windows}{origin} · bands: 95 % Student-t intervals over sequences, which they take as independent, cut off at "
        "what is possible"
    )


def _origin(documents: Sequence[int]) -> str:
    """Return how many documents sequences come from; a number below 0 stands for several."""
    single, joined = len({number for number in documents if number >= 0}), sum(number < 0 for number in documents)
    words = [f"{single} document{'s' if single > 1 else ''}"] if single else []
    words += [f"{joined} joined from several documents"] if joined else []
    return f"from {' and '.join(words)}"


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


def _scripts(panels: list[Panel]) -> str:
    """Return Plotly and the figures, nothing where there are none."""
    if not panels:
        return ""
    figures = {f"figure-{panel.key}": plotly_figure(panel) for panel in panels}
    # In a script element only "</" and "<!" can end or bend the data.
    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
    return f"<script>{get_plotlyjs()}</script><script>const FIGURES = {data};{DRAW}</script>"


def _panel(panel: Panel) -> str:
    wide = " wide" if panel.wide else ""
    square = " square" if panel.heat is not None and panel.heat.square else ""
    return (
        f"<article class='panel{wide}'><h3>{_text(panel.title)}</h3>{_legend(panel)}"
        f"<div class='figure{square}' id='figure-{_text(panel.key)}'></div><p>{_text(panel.sentence)}</p></article>"
    )


def _legend(panel: Panel) -> str:
    """Return a scale of colors, or buttons that name the lines, show and hide them; nothing for a single line."""
    if panel.heat is not None:
        low, high = (f"{end:g}".replace("-", "−") for end in panel.heat.limits)
        label = _text(panel.heat.label)
        return (
            f"<div class='legend'><span>{label}</span><span>{low}</span><i class='scale'></i><span>{high}</span></div>"
        )
    if len(panel.lines) < 2:
        return ""
    made = ""
    for line in drawn(panel):
        style = f"class='{'dashed' if line.dashed else ''}' style='border-color:{line.color}'"
        made += f"<button type='button' aria-pressed='true'><i {style}></i>{_text(line.name)}</button>"
    return f"<div class='legend'>{made}</div>"


def _table(title: str, head: list[str], rows: list[list[Any]]) -> str:
    """Return a table; one of more than three columns becomes a list of named values on a narrow screen."""
    body = ""
    for row in rows:
        named = zip(head, row, strict=True)
        body += "<tr>" + "".join(f"<td data-name='{_text(name)}'>{_cell(cell)}</td>" for name, cell in named) + "</tr>"
    names = "".join(f"<th>{_text(name)}</th>" for name in head)
    stack = " class='stack'" if len(head) > 3 else ""
    return f"<h2>{_text(title)}</h2><div class='panel scroll'><table{stack}><tr>{names}</tr>{body}</table></div>"


def _cell(value: Cell) -> str:
    """Escape a cell."""
    if isinstance(value, Mark):
        return f"<span class='{_text(value.kind)}'>{_text(value.text)}</span>"
    return _text(value) if isinstance(value, str) else " ".join(f"<code>{_text(piece)}</code>" for piece in value)
