// What the page does: draws the charts (where Vega is in the page), filters, sorts, shows one run in full.
// All figures come from the JSON in #figures, which ckptplan/report/page.py wrote from the records.
const page = JSON.parse(document.getElementById("figures").textContent);
const byId = (id) => document.getElementById(id);
const DONE = new Set(["ok", "over_budget"]);

// --- figures ---------------------------------------------------------------------------------------------------------

/** Rows of a packed dataset: columns of plain values, or of numbers into a list of words. */
function unpack({ columns, length }) {
  const names = Object.keys(columns);
  return Array.from({ length }, (_, i) => {
    const row = {};
    for (const name of names) {
      const { values, words } = columns[name];
      row[name] = words ? (values[i] === null ? null : words[values[i]]) : values[i];
    }
    return row;
  });
}

const datasets = Object.fromEntries(Object.entries(page.datasets).map(([name, packed]) => [name, unpack(packed)]));
const runs = datasets.runs;
const typical = (some) => some.find((run) => DONE.has(run.status) && run.recomputed > 0) ?? some.find((run) => DONE.has(run.status)) ?? some[0];
const first = typical(runs);
const state = { workload: first.workload, hidden: new Set(), status: "", text: "", run: first, sort: null, descending: false };

function bytesText(value) {
  for (const [unit, factor] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (Math.abs(value) >= factor) return `${(value / factor).toFixed(2)} ${unit}`;
  }
  return `${value} B`;
}

const precise = (value, digits) => Number(value.toPrecision(digits)).toLocaleString("en");
const FORMATS = {
  bytes: bytesText,
  ratio: (value) => `${value >= 0 ? "+" : "−"}${(Math.abs(value) * 100).toFixed(1)} %`,
  error: (value) => `${value >= 0 ? "+" : "−"}${(Math.abs(value) * 100).toFixed(2)} %`,
  ms: (value) => (value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${precise(value, 3)} ms`),
  number: (value) => (typeof value === "number" ? precise(value, 5) : String(value)),
  text: String,
};
const shown = (value, kind) => (value === null || value === undefined ? "not measured" : FORMATS[kind](value));
const isNumber = (kind) => !["text", "strip", "command", "run", "status"].includes(kind);

/** What is drawn now of a dataset. */
function rowsOf(name) {
  if (name === "allowed") return state.run.budget_bytes === null ? [] : [{ budget_bytes: state.run.budget_bytes }];
  return datasets[name].filter((row) => {
    if (row.workload !== state.workload) return false;
    if (name === "timeline") return row.plan_id === 0 || row.plan_id === state.run.plan_id;
    if (state.hidden.has(row.planner)) return false;
    return name !== "runs" || !state.status || row.status === state.status;
  });
}

// --- small pieces of the page ----------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const SHAPES = {
  circle: "M8 3a5 5 0 1 0 .01 0Z", square: "M3.5 3.5h9v9h-9Z", diamond: "M8 2l4 6-4 6-4-6Z", stroke: "M3 8h10",
  "triangle-up": "M8 3l5 9H3Z", "triangle-down": "M8 13l5-9H3Z", "triangle-right": "M13 8L4 3v10Z", "triangle-left": "M3 8l9-5v10Z",
};

function swatch({ colour, shape }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  for (const [key, value] of Object.entries({ d: SHAPES[shape], fill: colour, "fill-opacity": 0.55, stroke: colour, "stroke-width": 2 })) {
    path.setAttribute(key, value);
  }
  svg.append(path);
  return svg;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy"); // the way of pages opened from disk, where the clipboard is closed to scripts
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "copied";
  byId("said").textContent = `copied: ${text}`;
  setTimeout(() => (button.textContent = before), 1200);
}

const copyButton = (run) =>
  element("button", { type: "button", class: "copy", title: run.command, "aria-label": `copy the command of ${run.job}`,
    onclick: (event) => copy(run.command, event.currentTarget) }, "copy");

/** The plan's text as one word a block, "R(4 R(5 6))" too. */
function decisionsOf(plan) {
  let depth = 0;
  const found = [];
  for (const [token] of plan.matchAll(/R\(|\)|S\d+\[[^\]]*\]|K?\d+/g)) {
    if (token === "R(") depth += 1;
    else if (token === ")") depth -= 1;
    else if (token[0] === "S") found.push("part");
    else found.push(["keep", "recompute", "repeat"][Math.min(depth, 2)]);
  }
  return found;
}

function strip(plan) {
  const decisions = decisionsOf(plan);
  const stops = decisions.map((word, i) => {
    const [from, to] = [i, i + 1].map((n) => `${((100 * n) / decisions.length).toFixed(2)}%`);
    return `var(--${word}) ${from} ${to}`;
  });
  const made = element("span", { class: "strip", role: "img", title: plan, "aria-label": plan });
  made.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  made.style.width = `${Math.min(220, Math.max(96, decisions.length * 6))}px`;
  return made;
}

function cell(row, field, kind) {
  const value = row[field];
  if (kind === "strip") return element("td", {}, value === null ? "no plan" : strip(value));
  if (kind === "command") return element("td", {}, value === null ? "unknown" : copyButton(row));
  if (kind === "run") {
    return element("td", {}, element("button", { type: "button", class: "link", onclick: () => choose(row) }, value));
  }
  if (kind === "status") {
    return element("td", { class: DONE.has(value) ? "status-ok" : "status-bad", title: row.error }, value);
  }
  const attributes = { class: isNumber(kind) ? "number" : String(value).length > 40 ? "wrap" : null };
  if (kind === "bytes" && value !== null) attributes.title = `${value.toLocaleString("en")} bytes`;
  return element("td", attributes, shown(value, kind));
}

const head = ([, title, kind]) => element("th", { scope: "col", class: isNumber(kind) ? "number" : null }, title);

function plainTable(columns, rows, caption) {
  const body = rows.map((row) => element("tr", {}, ...columns.map(([field, , kind]) => cell(row, field, kind))));
  return element("table", {}, element("caption", { class: "visually-hidden" }, caption),
    element("thead", {}, element("tr", {}, ...columns.map(head))), element("tbody", {}, ...body));
}

// --- charts ----------------------------------------------------------------------------------------------------------

const stripsHeight = () => 24 * new Set(rowsOf("strips").map((row) => row.strip)).size;

// Vega warns of what is meant so: charts with no point left in them.
const ERRORS_ONLY = { level: () => ERRORS_ONLY, error: (...words) => (console.error(...words), ERRORS_ONLY) };
for (const name of ["warn", "info", "debug"]) ERRORS_ONLY[name] = () => ERRORS_ONLY;

const views = new Map();
let drawing = Promise.resolve();

/** A chart that cannot be drawn leaves its table, and the others are drawn. */
function draw(chart) {
  drawing = drawing.then(() => drawNow(chart)).catch((error) => {
    console.error(`${chart.name}:`, error);
    byId(`figure-${chart.name}`).querySelector("details").open = true;
  });
}

async function drawNow(chart) {
  const figure = byId(`figure-${chart.name}`);
  const choice = figure.querySelector("select.variant");
  const spec = structuredClone(chart.variants[choice ? choice.value : Object.keys(chart.variants)[0]]);
  spec.datasets = Object.fromEntries(chart.datasets.map((name) => [name, rowsOf(name)]));
  spec.description = `${chart.title}. ${chart.caption} The table below holds the same figures.`;
  if (chart.name === "strips") spec.height = stripsHeight();
  if (chart.name === "memory") spec.params[0].value = page.stages[state.workload];
  const options = { actions: false, renderer: "svg", logLevel: 1, logger: ERRORS_ONLY, tooltip: { disableDefaultStyle: true } };
  views.get(chart.name)?.finalize();
  const embedded = await window.vegaEmbed(figure.querySelector(".chart"), spec, options);
  embedded.view.addEventListener("click", (_, item) => {
    const run = item?.datum?.job && runs.find((one) => one.job === item.datum.job);
    if (run) choose(run);
  });
  views.set(chart.name, embedded);
}

/** New rows into the charts that are there; all drawing happens in one row. */
function refresh(changed) {
  drawing = drawing.then(async () => {
    for (const chart of page.charts) {
      const names = chart.datasets.filter((name) => changed.includes(name));
      const view = views.get(chart.name)?.view;
      if (!view || !names.length) continue;
      if (chart.name === "strips") view.height(stripsHeight());
      if (chart.name === "memory") view.signal("stages", page.stages[state.workload]);
      for (const name of names) view.data(name, rowsOf(name));
      await view.runAsync();
    }
  });
  for (const chart of page.charts) fillTable(chart);
  return drawing;
}

function fillTable(chart) {
  const details = byId(`figure-${chart.name}`).querySelector("details");
  if (!details.open) return;
  const table = plainTable(chart.columns, rowsOf(chart.datasets[0]), chart.title);
  details.querySelector(".scroll").replaceChildren(table);
}

const EVERYTHING = ["runs", "curve", "baselines", "budgets", "timeline", "allowed", "strips", "loss"];

// --- one run in full -------------------------------------------------------------------------------------------------

function card(title, value, more) {
  return element("div", {}, element("dt", {}, title), element("dd", {}, value, ...(more ? [element("small", {}, more)] : [])));
}

function showRun() {
  const run = state.run;
  byId("run").value = run.job;
  const gradients = { true: "bitwise equal", false: "within tolerance", null: "not checked" }[
    run.gradients_passed === false ? "different" : run.gradients_bitwise_equal] ?? "DIFFERENT";
  const within = { true: "within the budget", false: "over the budget", null: "" }[run.within_budget];
  byId("cards").replaceChildren(
    card("status", run.status, run.budget),
    card("peak with the plan", shown(run.measured_peak_bytes, "bytes"), `predicted ${shown(run.predicted_peak_bytes, "bytes")}; ${within}`),
    card("peak without", shown(run.no_checkpoint_measured_peak_bytes, "bytes"), `predicted ${shown(run.no_checkpoint_predicted_peak_bytes, "bytes")}`),
    card("budget allows", shown(run.budget_bytes, "bytes"), `smallest reachable ${shown(run.smallest_reachable_bytes, "bytes")}`),
    card("time added", shown(run.overhead_ratio, "ratio"), `predicted ${shown(run.predicted_overhead_ratio, "ratio")}`),
    card("step", shown(run.step_ms, "ms"), `${shown(run.no_checkpoint_step_ms, "ms")} without`),
    card("gradients", gradients, "against the unplanned step"),
    card("loss", shown(run.last_loss, "number"), `from ${shown(run.first_loss, "number")}`),
  );
  byId("error").textContent = run.error ?? "";
  byId("error").hidden = !run.error;
  byId("command").hidden = run.command === null;
  byId("command").replaceChildren(...(run.command === null ? [] : [element("code", { tabindex: "0" }, run.command), copyButton(run)]));
  const blocks = datasets.blocks.filter((row) => row.plan_id === run.plan_id);
  byId("blocks").hidden = !blocks.length;
  byId("blocks").querySelector(".scroll").replaceChildren(plainTable(page.block_columns, blocks, `plan of ${run.job}, block by block`));
  for (const row of byId("table").querySelectorAll("tbody tr")) {
    if (row.dataset.job === run.job) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

function choose(run) {
  const moved = run.workload !== state.workload;
  state.run = run;
  state.workload = run.workload;
  if (moved) byId("workload").value = String(run.workload);
  showRun();
  if (moved) showTable();
  return refresh(moved ? EVERYTHING : ["timeline", "allowed"]);
}

// --- the table of runs -----------------------------------------------------------------------------------------------

function listed() {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = rowsOf("runs").filter((run) => {
    const text = [run.job, run.status, run.planner, run.budget, run.plan, run.error, run.command].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  if (state.sort === null) return rows;
  const sign = state.descending ? -1 : 1;
  return rows.sort((a, b) => {
    const [x, y] = [a[state.sort], b[state.sort]];
    if (x === null || y === null) return (x === null) - (y === null); // what is unknown stands last, both ways
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
  });
}

function showTable() {
  const rows = listed();
  const body = rows.map((run) => {
    const made = element("tr", { "data-job": run.job, "aria-current": run === state.run ? "true" : null });
    made.append(...page.columns.map(([field, , kind]) => cell(run, field, kind)));
    return made;
  });
  byId("table").querySelector("tbody").replaceChildren(...body);
  byId("count").textContent = `${rows.length} of ${runs.length} runs`;
}

function sortBy(field) {
  state.descending = state.sort === field && !state.descending;
  state.sort = field;
  for (const one of byId("table").querySelectorAll("th[data-field]")) {
    one.setAttribute("aria-sort", one.dataset.field !== field ? "none" : state.descending ? "descending" : "ascending");
  }
  showTable();
}

function makeTableHead() {
  const heads = page.columns.map(([field, title, kind]) => {
    const inside = kind === "command" ? title : element("button", { type: "button", onclick: () => sortBy(field) }, title);
    const sortable = kind === "command" ? {} : { "data-field": field, "aria-sort": "none" };
    return element("th", { scope: "col", class: isNumber(kind) ? "number" : null, ...sortable }, inside);
  });
  byId("table").querySelector("thead").replaceChildren(element("tr", {}, ...heads));
}

// --- controls --------------------------------------------------------------------------------------------------------

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, label]) => element("option", { value }, label)));
}

function filterChanged() {
  showTable();
  return refresh(["runs", "strips", "loss"]);
}

function makeControls() {
  for (const planner of page.planners) {
    const box = element("input", { type: "checkbox", checked: true, value: planner.name, onchange: (event) => {
      if (event.target.checked) state.hidden.delete(planner.name);
      else state.hidden.add(planner.name);
      filterChanged();
    } });
    byId("planners").append(element("label", {}, box, swatch(planner), planner.name));
  }
  options(byId("workload"), page.workloads.map((label, i) => [String(i), label]));
  byId("workload").closest("label").hidden = page.workloads.length < 2;
  byId("workload").addEventListener("change", (event) => {
    const workload = Number(event.target.value);
    choose(typical(runs.filter((run) => run.workload === workload)));
  });
  options(byId("run"), runs.map((run) => [run.job, run.job]));
  byId("run").addEventListener("change", (event) => choose(runs.find((run) => run.job === event.target.value)));
  const statuses = [...new Set(runs.map((run) => run.status))];
  options(byId("status"), [["", "all"], ...statuses.map((status) => [status, status])]);
  byId("status").addEventListener("change", (event) => {
    state.status = event.target.value;
    filterChanged();
  });
  byId("search").addEventListener("input", (event) => {
    state.text = event.target.value;
    showTable();
  });
}

function setTheme(choice) {
  const dark = choice === "dark" || (choice === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function makeTheme() {
  const select = byId("theme");
  const apply = () => setTheme(select.value);
  select.addEventListener("change", apply);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  addEventListener("beforeprint", () => setTheme("light"));
  addEventListener("afterprint", apply);
  apply();
}

makeTheme();
makeControls();
makeTableHead();
showTable();
showRun();
for (const chart of page.charts) {
  const figure = byId(`figure-${chart.name}`);
  figure.querySelector("details").addEventListener("toggle", () => fillTable(chart));
  figure.querySelector("select.variant")?.addEventListener("change", () => draw(chart));
  if (window.vegaEmbed) draw(chart);
  else figure.querySelector("details").open = true;
}
byId("no-charts").hidden = Boolean(window.vegaEmbed);
drawing.then(() => (document.documentElement.dataset.ready = "true"));
