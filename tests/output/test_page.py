"""The pages in a real browser with the network off, wide and narrow."""

import copy
import json
import math
import re
from dataclasses import replace

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.support.ui import WebDriverWait

import crosslayer
from crosslayer.core.plan import DepthPlan
from crosslayer.environment import environment
from crosslayer.judge.report import Row
from crosslayer.output.chart import chart, same_scale, save_svg
from crosslayer.output.page import Page
from crosslayer.output.panel import Dots, Line, Panel, colored_lines
from crosslayer.stats.estimate import Estimate
from crosslayer.verbs.retrofit.moments import Fit
from crosslayer.verbs.retrofit.page import panels as retrofit_panels
from crosslayer.verbs.retrofit.result import (
    Calibration,
    Choice,
    CurvePoint,
    RetrofitReport,
    SearchRecord,
)
from tests.helpers.browser import complaints, opened, resize
from tests.helpers.tiny import tiny, tokens

LAYERS = 12
SHARES = ("first_token_share", "adjacent_map_similarity", "attention_received", "first_token")
FLAT = (1, math.sqrt(32))
POSSIBLE = {  # by figure: bands lie between these
    **dict.fromkeys(SHARES, (0, 1)),
    **dict.fromkeys(("token_similarity", "cross_layer", "query_key_cosine"), (-1, 1)),
    "io_similarity": (0, 2),
    **dict.fromkeys(("hidden_norm_ratio", "value_norm_ratio", "stream_norm", "trade_off"), (0, math.inf)),
    "entropy": (0, math.log(48)),
    "mlp_l1_l2": FLAT,
}
# What a designer would not let pass, as words; empty where all is well.
LOOK = """
const wrong = [], box = (node) => node.getBoundingClientRect();
const between = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1;
const inside = (a, b) => between(a, b) && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page scrolls sideways");
for (const table of document.querySelectorAll(".scroll"))
  if (table.scrollWidth > table.clientWidth) wrong.push("a table scrolls sideways: " + table.innerText.slice(0, 40));
for (const figure of document.querySelectorAll(".figure")) {
  const say = (words) => wrong.push(figure.id + ": " + words), frame = box(figure), panel = figure.closest(".panel");
  const plot = box(figure.querySelector(".role-frame.root .background"));
  if (!figure.querySelector(".mark-line path, .mark-symbol path, .mark-rect path")) say("nothing is drawn");
  if (!inside(frame, box(panel)) || plot.width < 150 || plot.height < 150) say("no room");
  if (figure.querySelector(".role-legend")) say("a legend inside of the plot");
  const legend = panel.querySelector(".legend"), rects = figure.querySelectorAll(".mark-rect path");
  const heat = new Set([...rects].map((rect) => rect.getAttribute("fill"))).size > 1;
  const lines = figure.querySelectorAll(".mark-line path").length;
  if (!legend && (lines ? lines > 1 : heat)) say("no legend");
  if (legend && (box(legend).bottom > plot.top || !inside(box(legend), box(panel)))) say("its legend is not above it");
  for (const item of legend ? legend.children : [])
    if (!inside(box(item), box(legend))) say("its legend is cut");
  for (const side of ["X", "Y"]) {
    const axis = figure.querySelector(`.role-axis[aria-label^=${side}] .role-axis-label`).closest(".role-axis");
    const texts = [...axis.querySelectorAll(".role-axis-label text")];
    const shown = texts.filter((text) => text.getAttribute("opacity") !== "0");
    const title = axis.querySelector(".role-axis-title text"), boxes = shown.map(box);
    for (const text of [...shown, ...(title ? [title] : [])])
      if (!inside(box(text), frame)) say("cut: " + text.textContent);
    const row = boxes.sort((a, b) => side === "X" ? a.left - b.left : a.top - b.top);
    if (row.some((at, i) => i && (side === "X" ? at.left < row[i - 1].right : at.top < row[i - 1].bottom - 3)))
      say("labels overlap");
    const ticks = shown.map((text) => text.textContent);
    if (!ticks.length) say("no ticks");
    const whole = (text) => /^[0-9]+$/.test(text) && Number(text) < LAST;
    if (title && title.textContent === "layer" && !ticks.every(whole)) say("layers " + ticks);
  }
}
return wrong;
""".replace("LAST", str(LAYERS))


def widen(record):
    """Make every interval by layer far wider than what is possible."""
    if isinstance(record, list):
        for entry in record:
            widen(entry)
    elif isinstance(record, dict):
        if isinstance(record.get("mean"), list) and record.get("ci95") is not None:
            record["ci95"] = _wider(record["mean"])
        widen([*record.values()])


def _wider(mean):
    return [_wider(x) if isinstance(x, list) else [None, None] if x is None else [x - 99, x + 99] for x in mean]


def diagnosed(folder):
    model = tiny("gpt2", num_hidden_layers=LAYERS)
    record = crosslayer.diagnose(model, tokens(batch=3, length=48), cross_layer=True).record()
    record["settings"] |= {"text": "a text", "documents": [0, 0, 2]}
    widen(record)
    return crosslayer.Diagnosis.from_record(record).save(folder)


def intervened(folder):
    model = tiny("llama", num_hidden_layers=LAYERS)
    record = crosslayer.intervene(model, tokens(batch=2, length=48), interventions=[crosslayer.waiver(23)]).record()
    widen(record)
    return crosslayer.Effect.from_record(record).save(folder)


def benched(folder):
    model = tiny("llama")
    record = crosslayer.bench(model, model, contexts=(4,), new_tokens=1, repeats=3).record()
    rows = record["rows"]
    scopes = [f"context {c}, batch {b}, sdpa" for b in (1, 16) for c in (512, 2048, 32768)]
    record["rows"] = [copy.deepcopy(row) | {"scope": scope} for scope in scopes for row in rows]
    record["rows"][len(rows) - 1] |= {"value": None, "original": None, "change": None}  # peak memory
    return crosslayer.Benchmark.from_record(record).save(folder)


def retrofitted(folder):
    fits = [Fit(layer, *(10.0 ** (i - layer) for i in range(4))) for layer in range(6)]

    def estimate(value):
        return Estimate(value=value, low=value - 0.3, high=value + 0.2, n=16, over="windows", how="bootstrap")

    curve = [CurvePoint(share=1 - i / 9, kl_search=i / 5, kl=estimate(i / 5), layers={}) for i in range(6)]
    facts = {"quantity": "KL", "unit": "nats/token", "candidate": "cla", "details": {"share": 0.85, "groups": "4-5"}}
    blocks = Row(change=estimate(0.7), value=0.7, original=0.0, **facts)
    search = SearchRecord(passes=9, methods=[], curve=curve, baselines=[blocks])
    record = RetrofitReport.model_construct(
        plan=DepthPlan.identity(4),
        calibration=Calibration(fit="ridge", windows={}, layers=fits),
        choice=Choice(how="search", search=search),
        caches=(),
    )
    panels = retrofit_panels(record)
    folder.mkdir()
    (folder / "report.html").write_text(Page("Retrofit", "of a model", [], [], panels, [], []).html())
    return folder / "report.html"


def verified(folder):
    row = {"dtype": "bfloat16", "difference": None, "tolerance": None, "reason": ""}
    checks = [
        {**row, "name": "static cache", "status": "PASS", "difference": 0.000012, "tolerance": 0.001},
        {**row, "name": "left-padded batch", "status": "FAIL", "difference": 0.2, "tolerance": 0.001},
        {**row, "name": "compiled", "status": "FAIL", "reason": "InductorError: " + "a long word or two " * 9},
        {**row, "name": "flex attention", "status": "NOT APPLICABLE", "reason": "<b>this model has none</b>"},
    ]
    record = {"schema": "crosslayer/verify/3", "model": "ours", "command": "crosslayer verify ours", "seconds": 9.0}
    return crosslayer.Verification.from_record(
        {**record, "checks": checks, "environment": environment().model_dump()}
    ).save(folder)


PAGES = {f.__name__: f for f in (diagnosed, intervened, benched, retrofitted, verified)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return {name: make(folder / name) for name, make in PAGES.items()}


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 390])
def test_nothing_is_cut_overlaps_or_needs_the_network(browser, pages, width):
    resize(browser, width)
    figures = {"diagnosed": 25, "intervened": 14, "benched": 4, "retrofitted": 3, "verified": 0}
    for name, file in pages.items():
        opened(browser, file)
        assert len(browser.find_elements("css selector", ".figure")) == figures[name], name
        assert browser.execute_script(LOOK) == [], name
    assert not complaints(browser)


def test_a_click_on_the_legend_hides_a_line_its_band_and_its_values(browser, pages):
    resize(browser, 1280)
    opened(browser, pages["diagnosed"])
    assert browser.execute_script(LOOK) == []
    figure = browser.find_element("css selector", "#figure-first_token_share")
    button = figure.find_element("xpath", "..//button")

    def marks():
        return [len(figure.find_elements("css selector", f".mark-{kind} path")) for kind in ("line", "area")]

    assert marks() == [3, 3]

    def tooltip():
        ActionChains(browser).move_to_element_with_offset(figure, 0, -40).move_to_element(figure).perform()
        return WebDriverWait(browser, 10).until(lambda b: b.find_element("css selector", "#vg-tooltip-element").text)

    for expected in (2, 3):
        browser.execute_script("arguments[0].click()", button)
        WebDriverWait(browser, 10).until(lambda _, expected=expected: marks() == [expected, expected])
        assert button.get_attribute("aria-pressed") == str(expected == 3).lower()
        words = tooltip()
        assert "layer" in words and "sink rate" in words and "(0 to 1)" in words
        assert (button.text in words) == (expected == 3)


def shown(file):
    """Return the figures of a page as its browser gets them, by key."""
    text = file.read_text()
    start = text.index("const FIGURES = ") + len("const FIGURES = ")
    charts, _ = json.JSONDecoder().raw_decode(text, start)
    return {name.removeprefix("figure-"): figure for name, figure in charts.items()}


def y_of(figure):
    return figure["layer"][0]["encoding"]["y"]


def test_bands_end_at_what_is_possible(pages):
    seen = set()
    for file in (pages[name] for name in ("diagnosed", "intervened", "retrofitted")):
        for key, figure in shown(file).items():
            rows = [row for row in figure["datasets"].get("lines", []) if row["low"] is not None]
            for row in rows:
                low, high = POSSIBLE[key]
                assert low <= row["low"] and row["high"] <= high + 1e-5, key  # six digits of √C
                seen.add(key)
            if rows and key != "trade_off" and y_of(figure)["scale"].get("type") != "log":  # all were far too wide
                assert rows[5]["low"] == POSSIBLE[key][0] or rows[5]["high"] == pytest.approx(POSSIBLE[key][1]), key
    assert seen == {*POSSIBLE}


def test_a_logarithmic_axis_is_not_stretched_by_a_band_that_reaches_zero():
    line = Line("a", [0, 1], [2.0, 8.0], [-5.0, 7.0], [3.0, 9.0])
    panel = Panel("a", "a", "", "layer", "norm", [line], log_y=True, bounds=(0, math.inf))
    assert colored_lines(panel)[0].low == [1.0, 7.0]
    assert y_of(chart(panel))["scale"]["domain"] == [2.0, 9.0]  # the band goes on below the axis, where it is clipped
    panel = replace(panel, lines=[replace(line, low=[1.9, 7.0])])
    assert y_of(chart(panel))["scale"]["domain"] == [1.9, 9.0]


def test_rows_of_the_same_name_stand_below_each_other(tmp_path):
    names = ["wh_vs_that_no_gap_long_distance (acc)", "wh_vs_that_with_gap_long_distance (acc)"]
    dots = Dots(names, [1.0, 1.0], [None] * 2, [None] * 2, [[], []])
    svg = save_svg(Panel("a", "a", "", "points", "", dots=dots), tmp_path).read_text()
    places = re.findall(r'aria-label="[^"]*row: \d[^"]*"[^>]* transform="([^"]*)', svg)
    assert svg.count("wh_vs_tha…distance") == 2 and len({*places}) == 2


def test_a_zero_has_no_point_on_a_logarithmic_axis(tmp_path):
    panel = Panel("a", "a", "", "layer", "norm", [Line("a", [0, 1, 2], [2.0, 0.0, 8.0])], log_y=True)
    svgs = [save_svg(one, tmp_path).read_text() for one in (panel, replace(panel, log_y=False))]
    assert [svg.count('aria-roledescription="point"') for svg in svgs] == [2, 3]


@pytest.mark.parametrize("title", ["", "loss a.b [nats] 'x'"])
def test_values_stand_at_their_x_whatever_the_axis_is_called(tmp_path, title):
    svg = save_svg(Panel("a", "a", "", title, "y", [Line("a", [0, 1], [2.0, 8.0])]), tmp_path).read_text()
    uprights = re.findall(r'<line aria-label="([^"]*)"[^>]*transform="([^"]*)', svg.partition("layer_2_marks")[2])
    assert [label for label, _ in uprights] == [f"{title or 'x'}: {x}" for x in (0, 1)]
    assert len({place for _, place in uprights}) == 2


def test_positions_are_counted_from_zero(pages):
    for name, keys in {
        "diagnosed": ["importance_by_position", "value_norms_by_position"],
        "intervened": ["attention_before"],
    }.items():
        for key in keys:
            layer = shown(pages[name])[key]["layer"][0]
            x, cells = layer["encoding"]["x"], layer["transform"][2]["from"]["data"]["values"]
            labels = json.loads(x["axis"]["labelExpr"].split("[indexof")[0])
            assert x["title"] == "position (0 = first token)" and labels[0] == "0"
            assert cells[0]["column"] == "0" and cells[0]["x"] == 1 and max(cell["x2"] for cell in cells) == 49
            label = "23" if name == "intervened" else "20"
            place = dict(zip(labels, x["axis"]["values"], strict=True))[label]
            assert {cell["column"] for cell in cells if cell["x"] < place < cell["x2"]} == {label}
    text = "".join(file.read_text() for file in pages.values())
    assert "1 = first token" not in text


def test_a_quantity_has_one_scale_and_one_color(pages):
    figures = shown(pages["intervened"])
    received = [figure for figure in figures.values() if y_of(figure)["title"] == "attention received"]
    assert len(received) >= 4 and len({tuple(y_of(figure)["scale"]["domain"]) for figure in received}) == 1
    colors = [figure["layer"][0]["encoding"]["color"] for figure in figures.values()]
    lines = [color["scale"] for color in colors if color["field"] == "line"]
    pairs = {(name, color) for scale in lines for name, color in zip(scale["domain"], scale["range"], strict=True)}
    sides = [color for name, color in pairs if name in ("before", "after")]
    assert len(sides) == len({*sides}) == 2
    maps = {key: figure["layer"][0]["encoding"]["color"] for key, figure in figures.items()}
    for by_head in (False, True):  # shares by head are on a linear scale, those by position on a logarithmic one
        heats = [color for key, color in maps.items() if color["field"] == "z" and key.endswith("by_head") == by_head]
        assert heats and len({tuple(color["scale"]["domain"]) for color in heats}) == 1
    wide, narrow = (Panel(key, "", "", "x", "y", [Line("", [0, 1], [1.0, y])]) for key, y in (("a", 9.0), ("b", 2.0)))
    assert {panel.y_range for panel in same_scale([wide, narrow])} == {(1.0, 9.0)}


def test_a_page_with_figures_is_small_enough_to_send(pages):
    assert all(file.stat().st_size < 1_500_000 for file in pages.values())


def test_the_subtitle_says_what_was_measured(pages):
    words = pages["diagnosed"].read_text().split("class='sub'>")[1].split("</p>")[0]
    assert "3 sequences" in words
    assert "95% intervals (Student-t" in words
    assert "own tokens" in pages["intervened"].read_text()


def test_the_page_of_a_verification(pages):
    text = pages["verified"].read_text()
    assert len(text) < 20_000 and not (pages["verified"].parent / "figures").exists()  # no figures, no Vega
    assert "difference 0.2, tolerance 0.001." in text
    assert "compiled (bfloat16) failed: InductorError" in text and "1 of 3" in text
    assert "<span class='fail'>FAIL</span>" in text and "<span class='pass'>PASS</span>" in text
    assert "<span class='skip'>NOT APPLICABLE</span>" in text
    assert "flex attention" in text and "&lt;b&gt;this" in text
    assert "check skipped" in text and "1.2e-05" in text


def test_few_layers_have_a_tick_each(tmp_path):
    save_svg(Panel("few", "Few", "", "layer", "share", [Line("a", [27, 28, 29], [0.1, 0.25, 0.4])]), tmp_path)
    texts = re.findall(r">([^<>]+)</text>", (tmp_path / "few.svg").read_text())
    assert [text for text in texts if text.isdigit()] == ["27", "28", "29"]
