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
