"""The page of a result: a self-contained HTML document that needs no network and fits wide and narrow screens."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jinja2

from crosslayer.output.chart import VERSION, chart
from crosslayer.output.formatting import Table
from crosslayer.output.panel import Panel, colored_lines


class Mark(NamedTuple):
    """A cell with the color of its `kind`: pass, fail or skip."""

    text: str
    kind: str


Cell = str | list[str] | Mark  # the strings of a list are formatted as code


@dataclass(frozen=True)
class Page:
    """The content of a page; the template escapes every text.

    Sentences and the tables of `lead`, which come before the figures, are by default those that the command prints.
    """

    title: str
    subtitle: str
    cards: Sequence[tuple[str, str, str]] = ()  # title, figure, note
    sentences: Sequence[str] | None = None
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()
    lead: Sequence[Table] | None = None
    following: str | None = None  # the next command

    def html(self) -> str:
        """Return the page as HTML."""
        figures = {f"figure-{panel.key}": chart(panel) for panel in self.panels}
        vega = _vega() if figures else ""
        return _templates().get_template("page.html").render(page=self, figures=figures, vega=vega)


@functools.cache
def _vega() -> str:
    """Return the script that draws Vega-Lite charts in a browser, with its dependencies."""
    # 30 MB, and only pages need it
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VERSION)


@functools.cache
def _templates() -> jinja2.Environment:
    """Return the templates in the folder `templates`: text is escaped, and an unknown name is an error."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    # a NaN in a chart is an error here; Jinja's own setting sorts keys, but figures are drawn in the panels' order
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False}
    # the page's legends are HTML, with the colors of the chart
    templates.globals |= {"colored_lines": colored_lines, "pairs": functools.partial(zip, strict=True)}  # type: ignore[bad-assignment]
    # the prefix keeps the address of a table apart from that of a figure with the same title
    templates.globals["anchor"] = lambda title: "table-" + re.sub(r"\W+", "-", title.lower()).strip("-")  # type: ignore[unsupported-operation]
    templates.filters["signed"] = lambda number: f"{number:g}".replace("-", "−")
    return templates
