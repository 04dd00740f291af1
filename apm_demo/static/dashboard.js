// Reads /api/view again and again and shows it. Every number on the page is of one snapshot.
"use strict";

const REFRESH_MS = 1000;
const LEVELS = ["customer", "application", "server", "endpoint_id"];
const state = { path: [], endpoint: null, width: "5s", paused: false, view: null, asked: 0 };
const $ = (id) => document.getElementById(id);

const whole = new Intl.NumberFormat("en");
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const ms = (us) => {
  const value = us / 1000;
  return value >= 100 ? whole.format(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2);
};
const color = (n) => `var(--s${n % 8})`;

// A row or an item of text; cells that are nodes are taken as they are.
function element(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

// The children of a node, replaced only if they changed: the focus of the keyboard survives a refresh.
function fill(node, children) {
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  node.replaceChildren(...children);
  if (focused) node.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

// -- where we are: the address says it, so that it can be kept and sent ------------------------------

function fromAddress() {
  const query = new URLSearchParams(location.hash.slice(1));
  state.path = [];
  for (const level of LEVELS.slice(0, 3)) {
    if (!query.get(level)) break;
    state.path.push(query.get(level));
  }
  state.endpoint = state.path.length === 3 ? query.get("endpoint_id") : null;
  state.width = ["5s", "5m", "1h"].includes(query.get("width")) ? query.get("width") : "5s";
  for (const input of document.querySelectorAll("#width input")) input.checked = input.value === state.width;
}

function query() {
  const found = new URLSearchParams({ width: state.width });
  state.path.forEach((value, n) => found.set(LEVELS[n], value));
  if (state.endpoint !== null) found.set("endpoint_id", state.endpoint);
  return found;
}

function go(path, endpoint = null) {
  state.path = path;
  state.endpoint = endpoint;
  location.hash = query().toString();
}

// -- reading ---------------------------------------------------------------------------------------------

async function refresh() {
  const mine = ++state.asked;
  try {
    const answer = await fetch(`/api/view?${query()}`, { signal: AbortSignal.timeout(8000) });
    const view = await answer.json();
    if (mine !== state.asked) return; // another question was asked meanwhile
    if (!answer.ok) throw new Error(view.error || `the dashboard answered ${answer.status}`);
    state.view = view;
    show(view);
    light("live", state.paused ? "paused" : "live");
    $("error").hidden = true;
    $("main").classList.remove("stale");
  } catch (error) {
    if (mine !== state.asked) return;
    light("bad", "no new numbers");
    const text = error instanceof TypeError ? "the dashboard's server cannot be reached" : error.message;
    $("error").textContent = `${text}. ${state.view ? "What is shown is from the snapshot named above." : ""} Trying again.`;
    $("error").hidden = false;
    $("main").classList.toggle("stale", state.view !== null);
  }
}

function light(kind, text) {
  $("light").className = `light ${kind}`;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

async function forever() {
  for (;;) {
    if (!state.paused && !document.hidden) await refresh();
    await new Promise((done) => setTimeout(done, REFRESH_MS));
  }
}

// -- showing ----------------------------------------------------------------------------------------------

function show(view) {
  $("snapshot").textContent = whole.format(view.snapshot_ts);
  $("read-at").textContent = `, read at ${charts.clock(view.read_at_us)} UTC in ${view.read_ms} ms`;
  showPath(view);
  showTiles(view);
  showCharts(view);
  showChildren(view);
  showAnomalies(view);
  showServices(view.llm);
  $("batch").hidden = view.batches === null;
  if (view.batches !== null) {
    $("batch-id").textContent = whole.format(view.batches.last);
    $("batch-events").textContent = whole.format(view.batches.events);
    $("batch-anomalies").textContent = whole.format(view.batches.anomalies);
  }
}

function showPath(view) {
  const steps = [["all customers", [], null], ...view.path.map((name, n) => [name, view.path.slice(0, n + 1), null])];
  if (view.endpoint) steps.push([view.endpoint.name, view.path, view.endpoint.id]);
  fill($("path"), steps.map(([name, path], n) =>
    n === steps.length - 1
      ? element("li", {}, element("span", { "aria-current": "page" }, name))
      : element("li", {}, element("button", { type: "button", "data-key": `step-${n}`, onclick: () => go(path) }, name))));
}

function totals(slots) {
  let sum = 0, count = 0, slowest = 0;
  for (const [, s, c, max] of slots) {
    sum += s;
    count += c;
    slowest = Math.max(slowest, max);
  }
  return { sum, count, slowest };
}

const unit = (text, name) => [text, " ", element("small", {}, name)];

function showTiles(view) {
  const { sum, count, slowest } = totals(view.children.flatMap((child) => child.slots));
  $("total-count").textContent = whole.format(count);
  $("total-avg").replaceChildren(...(count ? unit(ms(sum / count), "ms") : ["–"]));
  $("total-max").replaceChildren(...(count ? unit(ms(slowest), "ms") : ["–"]));
  $("total-anomalies").textContent = whole.format(view.anomalies_total);
  $("total-anomalies").parentElement.classList.toggle("some", view.anomalies_total > 0);
}

const named = (child, view) => (view.level === "endpoint" ? `${child.label} (${child.key})` : child.label);

function showCharts(view) {
  const series = (value) => view.children.map((child, n) => ({
    name: named(child, view), color: color(n), points: new Map(child.slots.map((slot) => [slot[0], value(slot)])),
  }));
  const by = `by ${view.level}, in slots of ${view.width}`;
  charts.draw($("chart-avg"), {
    series: series(([, sum, count]) => sum / count / 1000), widthUs: view.width_us, kind: "line",
    label: `Average response time in milliseconds ${by}; the numbers are in the table below`, format: (v) => `${ms(v * 1000)} ms`,
  });
  charts.draw($("chart-count"), {
    series: series(([, , count]) => count), widthUs: view.width_us, kind: "bars",
    label: `Invocations ${by}; the numbers are in the table below`, format: whole.format,
  });
  fill($("legend"), view.children.map((child, n) => {
    const key = element("i", { class: "key", "aria-hidden": "true" });
    key.style.color = color(n);
    return element("li", {}, key, named(child, view));
  }));
  const services = Object.entries(view.llm.services);
  const tokens = (column) => services.map(([name, rows], n) => ({
    name, color: color(n), points: new Map(rows.map((row) => [row[0], row[column]])),
  }));
  for (const [id, column, what] of [["chart-context", 2, "Context"], ["chart-generated", 3, "Generated"]]) {
    charts.draw($(id), {
      series: tokens(column), widthUs: view.llm.width_us, kind: "bars",
      label: `${what} tokens by service, in slots of ${view.llm.width}; the totals are in the table below`, format: whole.format,
    });
  }
}

function showChildren(view) {
  $("level").textContent = view.level;
  $("level-head").textContent = view.level;
  $("children-empty").hidden = view.children.length > 0;
  fill($("children").tBodies[0], view.children.map((child, n) => {
    const { sum, count, slowest } = totals(child.slots);
    const key = element("i", { class: "key", "aria-hidden": "true" });
    key.style.color = color(n);
    const down = view.level === "endpoint" ? () => go(view.path, child.key) : () => go([...view.path, child.key]);
    const name = view.endpoint
      ? element("span", {}, child.label)
      : element("button", { type: "button", "data-key": child.key, onclick: down }, child.label);
    const of = view.level === "endpoint" ? [element("span", { class: "of" }, child.key)] : [];
    return element("tr", { "data-child": child.key },
      element("td", {}, key, name, ...of),
      element("td", { class: "n" }, whole.format(count)),
      element("td", { class: "n" }, ms(sum / count)),
      element("td", { class: "n" }, ms(slowest)),
      element("td", { class: child.anomalies ? "n hot" : "n" }, whole.format(child.anomalies)));
  }));
}

function showAnomalies(view) {
  $("anomalies-empty").hidden = view.anomalies.length > 0;
  fill($("anomalies").tBodies[0], view.anomalies.map((row) => {
    const before = row.previous_sum_us / row.previous_count;
    const where = element("button", {
      type: "button", "data-key": `${row.ts_us}-${row.endpoint_id}`, title: `${row.customer} › ${row.application} › ${row.server}`,
      onclick: () => go([row.customer, row.application, row.server], String(row.endpoint_id)),
    }, row.endpoint || String(row.endpoint_id));
    return element("tr", {},
      element("td", {}, charts.clock(row.ts_us)),
      element("td", {}, where, element("span", { class: "of" }, row.server)),
      element("td", { class: "n hot" }, ms(row.resp_time_us)),
      element("td", { class: "n" }, ms(before)),
      element("td", { class: "n" }, `${(row.resp_time_us / before).toFixed(1)}×`));
  }));
}

function showServices(llm) {
  $("llm-width").textContent = { "5m": "5 min", "1h": "1 h" }[llm.width];
  const services = Object.entries(llm.services);
  $("services-empty").hidden = services.length > 0;
  $("services").hidden = services.length === 0;
  fill($("services").tBodies[0], services.map(([name, rows], n) => {
    const sum = (column) => rows.reduce((total, row) => total + row[column], 0);
    const [requests, context, generated] = [sum(1), sum(2), sum(3)];
    const key = element("i", { class: "key", "aria-hidden": "true" });
    key.style.color = color(n);
    return element("tr", { "data-service": name },
      element("td", {}, key, name),
      ...[requests, context, generated].map((value) => element("td", { class: "n" }, whole.format(value))),
      element("td", { class: "n" }, tenths.format(context / requests)),
      element("td", { class: "n" }, tenths.format(generated / requests)),
      element("td", { class: "n" }, whole.format(Math.max(...rows.map((row) => row[4])))));
  }));
}

// -- what a person does -------------------------------------------------------------------------------------

$("width").addEventListener("change", (event) => {
  state.width = event.target.value;
  location.hash = query().toString();
});
$("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  $("pause").textContent = state.paused ? "Go on" : "Pause";
  if (state.paused) light("wait", "paused");
  else refresh();
});
addEventListener("hashchange", () => {
  fromAddress();
  refresh();
});
addEventListener("resize", () => state.view && showCharts(state.view));
fromAddress();
forever();
