const SIZE = {width: "container", height: "container", autosize: {type: "fit", contains: "padding"}};
const OPTIONS = {actions: false, renderer: "svg"};
for (const [id, chart] of Object.entries(FIGURES)) {
  const figure = document.getElementById(id), buttons = [...figure.closest(".panel").querySelectorAll(".legend button")];
  vegaEmbed(figure, {...chart, ...SIZE}, OPTIONS).then(({view}) => {
    for (const button of buttons) button.onclick = () => {
      button.ariaPressed = String(button.ariaPressed === "false");
      const hidden = buttons.filter((one) => one.ariaPressed === "false").map((one) => one.textContent);
      view.signal("hidden", hidden).runAsync();
    };
    figure.dataset.drawn = "";  // tests wait for it
  });
}
