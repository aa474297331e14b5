"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const controls = ["step", "find", "source", "from", "to"].map((id) => document.getElementById(id));
const [step, find, source, from, to] = controls;
const svg = document.getElementById("pool");
let picked = ""; // id of the block of the pool whose text is shown
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
  const [at, id, loss, reference, score, place] = block;
  const item = element("li", "");
  const facts = element("dl", "");
  for (const [name, value, className] of [
    ["score", number(score, 3), "score"],
    ["loss", number(loss, 3)],
    ["reference", number(reference, 3)],
    ["step, block", `${at}, ${id}`],
    ...(place === undefined ? [] : [["source", data.sources[place][1]]]),
  ]) {
    facts.append(element("dt", name), element("dd", value, className));
  }
  item.append(facts);
  if (id in data.texts) item.append(element("pre", data.texts[id]));
  return item;
}

/** Returns whether a block's text has the words that are searched for. */
function matches(block) {
  return (data.texts[block[1]] || "").toLowerCase().includes(find.value.toLowerCase());
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
  const blocks = some(cells.flatMap((cell) => cell[kind].blocks).filter(matches));
  column.querySelector("p").textContent = count
    ? `${count.toLocaleString("en")} block${count === 1 ? "" : "s"}, mean score ${number(total / count, 3)}; ` +
      `${blocks.length} of them, from the highest score to the lowest`
    : "none";
  column.querySelector("ul").replaceChildren(...blocks.map(card));
  return count;
}

/** Draws the pool of the step: a dot for each candidate over its score, filled if it was chosen. */
function drawPool() {
  const pool = data.pools[step.value], width = svg.clientWidth || 640, scores = pool.candidates.map((c) => c[4]);
  const low = Math.min(...scores, pool.tau ?? Infinity), high = Math.max(...scores, pool.tau ?? -Infinity);
  const add = (parent, name, attributes, text = "") => {
    const item = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) item.setAttribute(key, value);
    item.textContent = text;
    parent.append(item);
    return item;
  };
  const roles = ["adaptation", "replay"].map((role) => ({
    role, all: pool.candidates.filter((c) => data.sources[c[5]][0] === role),
  }));
  let size = 12, stacks; // the largest dots whose highest stack fits
  do {
    size -= 1;
    stacks = roles.map(({ all }) => Map.groupBy(all, (c) => at(c[4], size)));
  } while (size > 2 && Math.max(...stacks.flatMap((one) => [...one.values()].map((s) => s.length))) * size > 150);
  function at(score, wide) { // left edge of the column of a score
    return Math.floor((score - low) / Math.max(high - low, 1e-6) * (width - wide) / wide) * wide;
  }
  svg.replaceChildren();
  const tau = (pool.tau - low) / Math.max(high - low, 1e-6) * (width - size);
  const free = pool.tau !== null && tau < 220 ? { x: width, "text-anchor": "end" } : { x: 0 };
  let y = 0;
  roles.forEach(({ role, all }, i) => {
    const chosen = all.filter((c) => c[6]).length, color = `var(--${role})`;
    add(svg, "text", { ...free, y: y + 14 }, `${role}: ${chosen} of ${all.length} chosen`);
    const floor = y + 24 + size * Math.max(1, ...[...stacks[i].values()].map((one) => one.length));
    for (const [x, column] of stacks[i]) {
      column.sort((a, b) => b[6] - a[6]).forEach((c, height) => {
        const link = add(svg, "a", { href: address({ block: c[1] }) });
        if (String(c[1]) === picked) link.setAttribute("class", "picked");
        add(link, "title", {}, `${data.sources[c[5]][1]}, score ${number(c[4], 3)}, ${c[6] ? "chosen" : "dropped"}`);
        add(link, "circle", {
          cx: x + size / 2, cy: floor - size * (height + 0.5), r: size / 2 - 1, stroke: color,
          fill: c[6] ? color : "var(--surface)", opacity: matches(c) ? 1 : 0.15,
        });
      });
    }
    add(svg, "line", { x1: 0, x2: width, y1: floor, y2: floor, stroke: "var(--rule)" });
    y = floor + 6;
  });
  if (pool.tau !== null) {
    const x = tau, end = x > width - 80;
    add(svg, "line", { x1: x, x2: x, y1: 18, y2: y, stroke: "var(--ink)", "stroke-dasharray": "4 3", "pointer-events": "none" });
    add(svg, "text", { x, y: 14, "text-anchor": end ? "end" : "start" }, `\u03c4 ${number(pool.tau, 3)}`);
  }
  add(svg, "text", { x: 0, y: y + 10 }, number(low, 2));
  add(svg, "text", { x: width, y: y + 10, "text-anchor": "end" }, number(high, 2));
  svg.setAttribute("viewBox", `0 0 ${width} ${y + 16}`);
  document.getElementById("pool-title").textContent =
    `Scores of all ${pool.candidates.length} candidates of step ${pool.step}: filled dots were chosen, hollow ones ` +
    "dropped; \u03c4 is the lowest score that was chosen. A dot leads to its block";
  const block = pool.candidates.find((c) => String(c[1]) === picked);
  document.getElementById("picked").replaceChildren(...(block ? [card(block)] : []));
}

/** Returns the link to what is shown, with some of it replaced. */
function address(other = {}) {
  const state = Object.fromEntries(controls.map((control) => [control.id, control.value]));
  state.step = data.pools[step.value].step;
  return `#${new URLSearchParams({ ...state, block: picked, ...other })}`;
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
  drawPool();
  history.replaceState(null, "", address());
  for (const other of document.querySelectorAll("a.other")) other.hash = address();
}

/** Selects what the link names; of a step without a pool, the nearest one with it. */
function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const control of controls) {
    const value = state.get(control.id);
    const known = control === find || [...(control.options || [])].some((one) => one.value === value);
    if (value !== null && known && control !== step) control.value = value;
  }
  if (state.has("step")) {
    const far = data.pools.map((pool) => Math.abs(pool.step - Number(state.get("step"))));
    step.value = far.indexOf(Math.min(...far));
  }
  picked = state.get("block") || "";
  show();
}

data.sources.forEach(([role, name], index) => option(source, index, `${name} (${role})`));
data.pools.forEach((pool, index) => option(step, index, pool.step));
data.ranges.forEach(([first, last], index) => {
  option(from, index, first);
  option(to, index, last);
});
to.value = data.ranges.length - 1;
for (const control of controls) control.addEventListener(control === find ? "input" : "change", show);
window.addEventListener("resize", drawPool);
window.addEventListener("hashchange", restore);
restore();
