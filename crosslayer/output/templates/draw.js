const SIZE = {width: "container", height: "container", autosize: {type: "fit", contains: "padding"}};
const PLAIN = {title: null, background: null, padding: 5};  // the page has titles
const OPTIONS = {actions: false, renderer: "svg"};

for (const [id, chart] of Object.entries(FIGURES)) {
  const figure = document.getElementById(id), panel = figure.closest(".panel");
  const buttons = [...panel.querySelectorAll(".legend button")];
  const layer = panel.querySelector(".legend") ? withoutLegends(chart.layer) : chart.layer;
  vegaEmbed(figure, {...chart, ...SIZE, ...PLAIN, layer}, OPTIONS).then(({view}) => {
    for (const button of buttons) button.onclick = () => {
      button.ariaPressed = String(button.ariaPressed === "false");
      const hidden = buttons.filter((one) => one.ariaPressed === "false").map((one) => one.textContent);
      view.signal("hidden", hidden).runAsync();
    };
    for (const button of panel.querySelectorAll(".save button")) button.onclick = () => save(chart, id, button.textContent);
    figure.dataset.drawn = "";  // tests wait for it
  });
}

function withoutLegends(layers) {
  return JSON.parse(JSON.stringify(layers, (key, value) => key === "legend" ? null : value));
}

// Saves a whole figure, with its title and legend, or its data.
async function save(chart, id, kind) {
  const name = id.replace("figure-", ""), type = kind.toLowerCase();
  if (kind === "CSV") return download(`${name}.csv`, URL.createObjectURL(new Blob([csv(chart)], {type: "text/csv"})));
  const {view} = await vegaEmbed(document.createElement("div"), chart, OPTIONS);
  if (kind === "PDF") printAlone(name, await view.toSVG());
  else download(`${name}.${type}`, await view.toImageURL(type, kind === "PNG" ? 3 : 1));
  view.finalize();
}

function download(name, url) {
  Object.assign(document.createElement("a"), {href: url, download: name}).click();
}

// Prints a figure alone, on a page of its size: the browser's dialog saves it as a PDF.
function printAlone(name, svg) {
  const sheet = Object.assign(document.createElement("div"), {id: "sheet", innerHTML: svg}), title = document.title;
  const [width, height] = ["width", "height"].map((side) => Math.ceil(sheet.firstElementChild.getAttribute(side)) + 1);
  sheet.insertAdjacentHTML("beforeend", `<style>@page { size: ${width}px ${height}px; margin: 0; }</style>`);
  document.body.append(sheet);
  document.title = name;  // the file's name
  window.addEventListener("afterprint", () => { sheet.remove(); document.title = title; }, {once: true});
  window.print();
}

// The data of a figure; of numbers with an interval also its ends.
function csv({datasets, layer}) {
  const values = layer.map((one) => one.data.values), {x, y, color} = layer[0].encoding;
  let rows;
  if (datasets.lines) {
    rows = [["line", x.title ?? "x", y.title ?? "y", "low", "high"]];
    for (const row of datasets.lines) rows.push([row.line, row.x, row.y, row.low, row.high]);
  } else if (values[0][0]?.z) {  // a heat map
    const columns = layer[0].transform[2].from.data.values;
    rows = [[y.title ?? "y", x.title ?? "x", color.legend.title]];
    for (const {row, z} of values[0]) z.forEach((value, at) => rows.push([row, columns[at].column, value]));
  } else if (values[0][0]?.kind) {  // bars by layer, and the layers that each reads
    const bars = values[0], reads = values[1].filter((line) => line.x === line.to);
    rows = [["layer", "kind", x.title, "reads"]];
    for (let at = 0; at < y.scale.domain[1]; at++) {
      const bar = bars.find((one) => one.layer === at);
      rows.push([at, bar?.kind, bar?.width ?? 0, reads.filter((line) => line.end === at).map((line) => line.y).join(" ")]);
    }
  } else {  // means, and the values that they are taken over
    rows = [["name", x.title ?? "x", "low", "high", "values"]];
    for (const {row, name, x, low, high} of values[3])
      rows.push([name, x, low, high, values[1].filter((point) => point.row === row).map((point) => point.x).join(" ")]);
  }
  const cell = (value) => /[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value ?? "";
  return rows.map((row) => row.map(cell).join(",") + "\n").join("");
}
