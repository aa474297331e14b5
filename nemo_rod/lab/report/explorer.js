"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const [step, find, title] = ["step", "find", "title"].map((id) => document.getElementById(id));
const body = document.querySelector("#pool tbody");

function cell(row, text, className = "") {
  const item = row.insertCell();
  item.textContent = typeof text === "number" ? text.toFixed(3).replace("-", "\u2212") : text ?? "unknown";
  item.className = className;
}

/** Shows the step's candidates whose source or text has the words; a line is below the last chosen. */
function show() {
  const pool = data.pools[step.value], words = find.value.toLowerCase();
  const texts = (c) => [data.sources[c[4]][1], data.texts[c[0]] || ""];
  const shown = pool.candidates.filter((c) => texts(c).join("\n").toLowerCase().includes(words));
  body.replaceChildren();
  for (const c of shown) {
    const [id, loss, reference, score, , chosen] = c, row = body.insertRow(), [source, text] = texts(c);
    row.className = (chosen ? "chosen" : "dropped") + (c === shown.findLast((one) => one[5]) ? " last" : "");
    for (const value of [score, loss, reference]) cell(row, value, "num");
    for (const value of [chosen ? "chosen" : "dropped", source]) cell(row, value);
    cell(row, String(id), "num");
    cell(row, text);
  }
  const won = shown.filter((c) => c[5]).length;
  title.textContent = `Step ${pool.step}: ${won} of ${shown.length} candidates were chosen, best first` +
    (pool.tau === null ? "." : `; the lowest chosen score, \u03c4, is ${pool.tau.toFixed(3)}.`);
  const hash = `#${new URLSearchParams({ step: pool.step, find: find.value })}`;
  history.replaceState(null, "", hash);
  for (const other of document.querySelectorAll("a.other")) other.hash = hash;
}

/** Selects what the link names; of a step without a pool, the nearest one with it. */
function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  const far = data.pools.map((pool) => Math.abs(pool.step - Number(state.get("step"))));
  step.value = far.indexOf(Math.min(...far));
  find.value = state.get("find") || "";
  show();
}

data.pools.forEach((pool, index) => step.add(new Option(pool.step, index)));
step.addEventListener("change", show);
find.addEventListener("input", show);
window.addEventListener("hashchange", restore);
restore();
