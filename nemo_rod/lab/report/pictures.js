"use strict";
/* Draws the pictures as wide as the page; their colours are CSS variables of the reader's theme. */
const pictures = JSON.parse(document.getElementById("pictures").textContent);
const [logSteps, logLoss] = ["log-x", "log-y"].map((id) => document.getElementById(id) || {});

function fitted(original, width) {
  const spec = structuredClone(original), narrow = { name: "narrow", value: width < 480 };
  spec.params = [narrow, ...(spec.params || [])];
  if (spec.facet) {
    const across = Math.max(1, Math.floor(width / 300));
    Object.assign(spec, { columns: across, spacing: 24 });
    spec.spec.width = Math.floor(width / across) - 74;
  } else if (spec.layer || spec.mark) {
    Object.assign(spec, { width, autosize: { type: "fit-x", contains: "padding" } });
  }
  const view = spec.facet ? spec.spec : spec, { x, y } = view.encoding || {};
  if (logSteps.checked && x && x.field === "steps done") {
    x.scale = { type: "log" };
    view.transform = [{ filter: "datum['steps done'] > 0" }, ...(view.transform || [])];
  }
  if (logLoss.checked && y && /nats/.test(y.title)) {
    for (const { encoding } of [view, ...(view.layer || [])])
      if (encoding && encoding.y) encoding.y.scale = { type: "log", zero: false, nice: false };
  }
  return spec;
}

function draw() {
  for (const { id, spec } of pictures) {
    const place = document.getElementById(id);
    vegaEmbed(place, fitted(spec, place.clientWidth), { actions: false, renderer: "svg" })
      .catch((error) => console.error(id, error));
  }
}

let waiting, width = window.innerWidth;
window.addEventListener("resize", () => {
  if (width === window.innerWidth) return; // a phone's address bar
  width = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(draw, 200);
});
for (const box of document.querySelectorAll("#log-x, #log-y")) box.addEventListener("change", draw);
draw();
