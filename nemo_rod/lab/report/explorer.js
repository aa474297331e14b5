"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const controls = ["source", "from", "to", "find"];
const [source, from, to, find] = controls.map((id) => document.getElementById(id));
const SHOWN = 12; // blocks of a kind

function option(select, value, text) {
  const item = element("option", text);
  item.value = value;
  select.append(item);
}

function element(name, text, className) {
  const item = document.createElement(name);
  item.textContent = text;
  if (className) item.className = className;
  return item;
}

function number(value, digits) {
  return value === null ? "unknown" : value.toFixed(digits).replace("-", "\u2212");
}

function card(block) {
  const [step, id, loss, reference, score] = block;
  const item = element("li", "");
  const facts = element("dl", "");
  for (const [name, value, className] of [
    ["score", number(score, 3), "score"],
    ["loss", number(loss, 3)],
    ["reference", number(reference, 3)],
    ["step, block", `${step}, ${id}`],
  ]) {
    facts.append(element("dt", name), element("dd", value, className));
  }
  item.append(facts);
  if (id in data.texts) item.append(element("pre", data.texts[id]));
  return item;
}

/** Returns at most SHOWN blocks, evenly from the highest score to the lowest. */
function some(blocks) {
  const sorted = [...blocks].sort((a, b) => b[4] - a[4]);
  if (sorted.length <= SHOWN) return sorted;
  return Array.from({ length: SHOWN }, (_, i) =>
    sorted[Math.round((i * (sorted.length - 1)) / (SHOWN - 1))]);
}

function fill(kind, cells) {
  const column = document.querySelector(`.${kind}`);
  const count = cells.reduce((sum, cell) => sum + cell[kind].count, 0);
  const total = cells.reduce((sum, cell) => sum + cell[kind].total, 0);
  const words = find.value.toLowerCase();
  const blocks = some(cells.flatMap((cell) => cell[kind].blocks)
    .filter((block) => (data.texts[block[1]] || "").toLowerCase().includes(words)));
  column.querySelector("p").textContent = count
    ? `${count.toLocaleString("en")} block${count === 1 ? "" : "s"}, mean score ${number(total / count, 3)}; ` +
      `${blocks.length} of them, from the highest score to the lowest`
    : "none";
  column.querySelector("ul").replaceChildren(...blocks.map(card));
  return count;
}

/** Draws the whole pool of the first step that is shown: scores by role, and tau. */
function drawPool(pool) {
  const bins = pool.replay.length, most = Math.max(1, ...pool.adaptation, ...pool.replay);
  const svg = document.getElementById("pool");
  const add = (name, attributes, text = "") => {
    const item = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) item.setAttribute(key, value);
    item.textContent = text;
    svg.append(item);
  };
  svg.replaceChildren();
  for (const role of ["adaptation", "replay"]) {
    pool[role].forEach((count, bin) => add("rect", {
      x: 640 * bin / bins, width: 640 / bins - 1, y: 130 - 110 * count / most,
      height: 110 * count / most, fill: `var(--${role})`, "fill-opacity": 0.55,
    }));
  }
  const x = 640 * (pool.tau - pool.low) / Math.max(pool.high - pool.low, 1e-6);
  if (pool.tau !== null) {
    add("line", { x1: x, x2: x, y1: 8, y2: 130, stroke: "var(--ink)", "stroke-dasharray": "4 3" });
    add("text", { x: Math.min(x + 5, 590), y: 16 }, `\u03c4 ${number(pool.tau, 3)}`);
  }
  add("text", { x: 0, y: 146 }, number(pool.low, 2));
  add("text", { x: 640, y: 146, "text-anchor": "end" }, number(pool.high, 2));
  document.getElementById("pool-title").textContent =
    `Scores of the whole pool of step ${pool.step}: adaptation (teal) and replay (pink); ` +
    "\u03c4 is the lowest score that was chosen";
}

function show() {
  if (Number(to.value) < Number(from.value)) to.value = from.value;
  const cells = data.cells.filter((cell) => cell.source === Number(source.value) &&
    cell.range >= Number(from.value) && cell.range <= Number(to.value));
  const [chosen, dropped] = [fill("chosen", cells), fill("dropped", cells)];
  const all = chosen + dropped;
  const steps = `steps ${data.ranges[from.value][0]} to ${data.ranges[to.value][1]}`;
  document.getElementById("found").textContent = all
    ? `${all.toLocaleString("en")} candidates in ${steps}, ` +
      `${(100 * chosen / all).toFixed(1)} % chosen`
    : `no candidates in ${steps}`;
  drawPool(data.pools[from.value]);
  const state = Object.fromEntries(controls.map((id, i) => [id, [source, from, to, find][i].value]));
  const hash = `#${new URLSearchParams(state)}`; // a link to what is shown
  history.replaceState(null, "", hash);
  for (const other of document.querySelectorAll("a.other")) other.hash = hash;
}

/** Selects what the link names. */
function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  controls.forEach((id, i) => {
    const control = [source, from, to, find][i], value = state.get(id);
    const known = control === find || [...(control.options || [])].some((one) => one.value === value);
    if (value !== null && known) control.value = value;
  });
  show();
}

data.sources.forEach(([role, name], index) => option(source, index, `${name} (${role})`));
data.ranges.forEach(([first, last], index) => {
  option(from, index, first);
  option(to, index, last);
});
to.value = data.ranges.length - 1;
for (const control of [source, from, to]) control.addEventListener("change", show);
find.addEventListener("input", show);
window.addEventListener("hashchange", restore);
restore();
