"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const [source, from, to] = ["source", "from", "to"].map((id) => document.getElementById(id));
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
  const blocks = some(cells.flatMap((cell) => cell[kind].blocks));
  column.querySelector("p").textContent = count
    ? `${count.toLocaleString("en")} block${count === 1 ? "" : "s"}, mean score ${number(total / count, 3)}; ` +
      `${blocks.length} of them, from the highest score to the lowest`
    : "none";
  column.querySelector("ul").replaceChildren(...blocks.map(card));
  return count;
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
}

data.sources.forEach(([role, name], index) => option(source, index, `${name} (${role})`));
data.ranges.forEach(([first, last], index) => {
  option(from, index, first);
  option(to, index, last);
});
to.value = data.ranges.length - 1;
for (const select of [source, from, to]) select.addEventListener("change", show);
show();
