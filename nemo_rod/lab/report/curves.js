"use strict";
/* Draws the charts in the reader's theme, as wide as the page; again when either changes. */
const charts = JSON.parse(document.getElementById("charts").textContent);
const colours = JSON.parse(document.getElementById("colours").textContent); // light -> role
const [logSteps, logLoss] = ["log-x", "log-y"].map((id) => document.getElementById(id));

function drawn(chart) {
  const style = getComputedStyle(document.documentElement);
  const themed = JSON.stringify(chart.spec).replace(/#[0-9a-f]{6}/g, (colour) =>
    colours[colour] ? style.getPropertyValue(`--${colours[colour]}`).trim() : colour);
  const spec = JSON.parse(themed);
  const width = document.getElementById(chart.id).clientWidth;
  const across = spec.facet ? Math.max(1, Math.floor(width / 300)) : 1;
  const view = spec.facet ? spec.spec : spec;
  if (spec.facet) Object.assign(spec, { columns: across, spacing: 20 });
  Object.assign(view, { width: Math.floor(width / across) - 62, height: spec.facet ? 150 : 240 });
  const { x, y, color, strokeDash } = view.encoding;
  for (const { legend } of [color, strokeDash].filter(Boolean)) // a wide one would shrink the plot
    if (legend && legend.columns) legend.columns = Math.max(1, Math.floor(width / 150));
  if (logSteps.checked) {
    x.scale = { type: "log" };
    spec.transform = [...(spec.transform || []), { filter: `datum['${x.field}'] > 0` }];
  }
  if (logLoss.checked && y && !(y.axis && y.axis.format)) {
    y.scale = { type: "log", zero: false };
    for (const layer of view.layer) if (layer.encoding && layer.encoding.y) layer.encoding.y.scale = y.scale;
  }
  return spec;
}

function draw() {
  const actions = { export: true, source: false, compiled: false, editor: false };
  for (const chart of charts) {
    vegaEmbed(`#${chart.id}`, drawn(chart), { actions, renderer: "svg", downloadFileName: chart.id })
      .catch((error) => console.error(chart.id, error));
  }
}

let waiting, width = window.innerWidth;
window.addEventListener("resize", () => {
  if (width === window.innerWidth) return; // a phone's address bar
  width = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(draw, 200);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
for (const box of [logSteps, logLoss]) box.addEventListener("change", draw);
draw();
