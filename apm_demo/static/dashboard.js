// Shows a view: live, as it is pushed, or of the past, as it was. Every number on the page is of one snapshot.
"use strict";

const LEVELS = ["customer", "application", "server", "endpoint_id"];
const RANGES = ["1m", "5m", "1h", "6h", "24h"];
const NAMELESS = "(no name)";
const WIDTHS = { "5s": "5 s", "5m": "5 min", "1h": "1 h" };
const asked = { path: [], endpoint: null, range: "5m", asOf: null };
let live = null; // the stream; null while the past is shown, or the page is hidden
let view = null; // the state that is shown
let answers = ""; // the question that it answers
let about = null; // {ts, age_ms, problem}, heard at `heard`
let heard = 0;
let moved = false; // a person went elsewhere: the focus goes along
const $ = (id) => document.getElementById(id);

const whole = new Intl.NumberFormat("en");
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const ms = (us) => {
  const value = us / 1000;
  return value >= 100 ? whole.format(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2);
};
const color = (n) => `var(--s${n % 8})`;
const sentence = (text) => (text.startsWith("kivi ") ? text : text[0].toUpperCase() + text.slice(1));
const put = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

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
  asked.path = [];
  for (const level of LEVELS.slice(0, 3)) {
    if (query.get(level) === null) break;
    asked.path.push(query.get(level));
  }
  asked.endpoint = asked.path.length === 3 ? query.get("endpoint_id") : null;
  asked.range = RANGES.includes(query.get("range")) ? query.get("range") : "5m";
  asked.asOf = /^\d{1,18}$/.test(query.get("as_of") ?? "") ? query.get("as_of") : null;
  for (const input of document.querySelectorAll("#range input")) input.checked = input.value === asked.range;
}

function query() {
  const found = new URLSearchParams({ range: asked.range });
  asked.path.forEach((value, n) => found.set(LEVELS[n], value));
  if (asked.endpoint !== null) found.set("endpoint_id", asked.endpoint);
  if (asked.asOf !== null) found.set("as_of", asked.asOf);
  return found;
}

function go(change) {
  Object.assign(asked, change);
  location.hash = query().toString();
}

// -- what comes ------------------------------------------------------------------------------------------

let asking = 0; // of the past: an answer to an older question is not shown

function look() {
  const before = live;
  clearTimeout(asking);
  asking = 0;
  $("main").setAttribute("aria-busy", "true");
  showPath();
  $("past").hidden = asked.asOf === null;
  document.body.classList.toggle("past", asked.asOf !== null);
  if (asked.asOf === null) {
    live = new Live(query(), told, lost);
  } else {
    live = null;
    put($("past-when"), `${stamp(Number(asked.asOf))} UTC.`);
    $("moment").value = new Date(Number(asked.asOf) / 1000).toISOString().slice(0, 19);
    past();
  }
  before?.close(); // after the new one is asked for: what both need is not given up in between
}

// Nothing new is to be had: what is shown stays, marked as old, unless it answers another question.
function keep() {
  const own = view !== null && answers === query().toString();
  $("main").classList.toggle("stale", own);
  document.body.classList.toggle("blank", !own);
  showAge();
  return own;
}

function arrived() {
  $("error").hidden = true;
  $("main").classList.remove("stale");
  document.body.classList.remove("blank");
}

function told(state, changed, now) {
  about = now;
  heard = performance.now();
  const fresh = !changed || state !== view;
  view = state;
  answers = query().toString();
  later(fresh ? null : changed);
  if (now.problem) {
    lost(now.problem);
  } else {
    status("live", "live");
    arrived();
  }
  if (fresh) $("main").setAttribute("aria-busy", "false");
}

function lost(text, final) {
  status("bad", final ? "not shown" : "reconnecting");
  const kept = keep() ? "What is shown is of the snapshot named above. " : "";
  put($("error"), `${sentence(text)}. ${kept}${final ? "Choose another place." : "Trying again."}`);
  $("error").hidden = false;
}

async function past() {
  const mine = (asking = setTimeout(() => {}, 0));
  let answer = null, body = { error: "the dashboard's server cannot be reached" };
  try {
    answer = await fetch(`/api/view?${query()}`, { signal: AbortSignal.timeout(15000) });
    body = await answer.json();
  } catch { /* said below */ }
  if (mine !== asking) return;
  if (!answer?.ok) {
    const again = !answer || answer.status === 503;
    status("bad", again ? "reconnecting" : "not shown");
    $("error").textContent = `${sentence(body.error)}. ${again ? "Trying again." : "Choose another moment, or go back to live."}`;
    $("error").hidden = false;
    keep();
    if (again) asking = setTimeout(past, 2000);
    return;
  }
  about = { ts: body.snapshot_ts, age_ms: null, problem: "" };
  view = body;
  answers = query().toString();
  status("past", "the past");
  arrived();
  $("main").setAttribute("aria-busy", "false");
  later(null);
}

function status(kind, text) {
  $("light").className = `light ${kind}`;
  put($("status-text"), text); // a screen reader hears this, and only when it changes
}

// How old the state is: it was known to be the newest `age_ms` before it was heard of.
function showAge() {
  if (!about || document.body.classList.contains("blank")) {
    put($("snapshot"), "–");
    return put($("age"), "");
  }
  put($("snapshot"), whole.format(about.ts));
  if (about.age_ms === null) return put($("age"), "");
  const seconds = (about.age_ms + performance.now() - heard) / 1000;
  put($("age"), `, ${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s old`);
}

// -- showing: once in a frame, whatever came meanwhile ------------------------------------------------------

let pending; // undefined: nothing; null: all; else {section: Set of names}

function later(changed) {
  if (pending === undefined) requestAnimationFrame(show);
  if (changed === null || pending === null) {
    pending = null;
  } else {
    pending ??= {};
    for (const [section, names] of Object.entries(changed)) pending[section] = pending[section]?.union?.(names) ?? new Set([...(pending[section] ?? []), ...names]);
  }
}

function show() {
  const changed = pending, all = changed === null;
  pending = undefined;
  showAge();
  if (all || changed.head) showHead();
  if (all || changed.totals) showTotals();
  if (all || changed.series || changed.head || changed.children) showCharts();
  if (all || changed.children) showChildren(all ? null : changed.children);
  if (all || changed.anomalies) showAnomalies();
  if (all || changed.llm) showServices(view.llm);
  if (all || changed.batch) showBatch(view.batch);
}

// Where a person wants to be, also while that is not shown yet, or cannot be.
function showPath() {
  const { path, endpoint } = asked;
  const steps = [["all customers", []], ...path.map((name, n) => [name || NAMELESS, path.slice(0, n + 1)])];
  if (endpoint !== null) steps.push([(view?.head.endpoint?.id === Number(endpoint) && view.head.endpoint.name) || endpoint]);
  fill($("path"), steps.map(([name, to], n) =>
    n === steps.length - 1
      ? element("li", {}, element("span", { "aria-current": "page", tabindex: "-1", "data-key": "here" }, name))
      : element("li", {}, element("button", { type: "button", "data-key": `step-${n}`, onclick: () => step(to) }, name))));
  document.title = `${steps.at(-1)[0]} · kivi · application performance`;
  if (moved) document.querySelector("[aria-current]").focus({ preventScroll: true });
  moved = false;
}

function showHead() {
  const { level, width, last, apdex_us: apdexUs } = view.head;
  put($("apdex-bound"), `of ${ms(apdexUs)} ms`);
  put($("newest"), last === null ? "–" : `${stamp(last)} UTC`);
  showPath();
  put($("level"), level);
  put($("level-head"), level);
  for (const node of document.querySelectorAll(".width")) put(node, WIDTHS[width]);
}

function step(path, endpoint = null) {
  moved = true;
  go({ path, endpoint });
}

const percent = (part, all) => `${tenths.format((100 * part) / all)} %`;
const unit = (text, name) => [text, " ", element("small", {}, name)];

function showTotals() {
  const { count, sum, slowest, slowest_trace_id: trace, errors, anomalies, p50, p95, p99, apdex } = view.totals;
  put($("total-count"), whole.format(count));
  $("total-avg").replaceChildren(...(count ? unit(ms(sum / count), "ms") : ["–"]));
  $("total-percentiles").replaceChildren(...(count ? unit([p50, p95, p99].map(ms).join(" · "), "ms") : ["–"]));
  $("total-errors").replaceChildren(...(count ? unit(percent(errors, count), `(${whole.format(errors)})`) : ["–"]));
  $("total-errors").parentElement.classList.toggle("some", errors > 0);
  put($("total-apdex"), count ? apdex.toFixed(2) : "–");
  $("total-max").replaceChildren(...(count ? unit(ms(slowest), "ms") : ["–"]));
  put($("total-trace"), trace ?? "");
  put($("total-anomalies"), whole.format(anomalies));
  $("total-anomalies").parentElement.classList.toggle("some", anomalies > 0);
}

const LINES = 8; // more children than these are drawn as one

// The children that have lines of their own, in the order of their colours; none: their sum is one line.
function lines() {
  const keys = Object.keys(view.children);
  return keys.length <= LINES ? keys.sort(names.compare) : [];
}

const named = (key) => (view.head.level === "endpoint" ? `${view.children[key][0]} (${key})` : key || NAMELESS);

function showCharts() {
  const found = new Map(); // name -> [[slot, sum, count], ...]
  for (const [key, [sum, count]] of Object.entries(view.series)) {
    const cut = key.indexOf("|"), name = key.slice(cut + 1);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push([Number(key.slice(0, cut)), sum, count]);
  }
  for (const slots of found.values()) slots.sort((a, b) => a[0] - b[0]);
  const { level, width, width_us: widthUs } = view.head;
  const keys = lines();
  const all = `all ${whole.format(Object.keys(view.children).length)} ${level}s`;
  const drawn = keys.length ? keys.map((key) => [named(key), found.get(key) ?? []]) : [[all, found.get("") ?? []]];
  const series = (value) => drawn.map(([name, slots], n) => ({
    name, color: color(n), points: new Map(slots.map((slot) => [slot[0], value(slot)])),
  }));
  const by = `${keys.length ? `by ${level}` : `of ${all}`}, in slots of ${WIDTHS[width]}`;
  charts.draw($("chart-avg"), {
    series: series(([, sum, count]) => sum / count / 1000), widthUs, kind: "line",
    label: `Average response time in milliseconds ${by}; the numbers are in the table below`, format: (v) => `${ms(v * 1000)} ms`,
  });
  charts.draw($("chart-count"), {
    series: series(([, , count]) => count), widthUs, kind: "bars",
    label: `Invocations ${by}; the numbers are in the table below`, format: whole.format,
  });
  const legend = found.size ? drawn.map(([name]) => name) : [];
  if (legend.join("|") === $("legend").dataset.shown) return;
  $("legend").dataset.shown = legend.join("|");
  fill($("legend"), legend.map((name, n) => element("li", {}, key(n), name)));
}

function key(n) {
  const node = element("i", { class: "key", "aria-hidden": "true" });
  node.style.color = color(n);
  return node;
}

const table = new LiveTable($("children"), {
  // label, count, sum, slowest, anomalies, p50, p95, p99, apdex, errors, trace id of the slowest
  columns: [
    (e) => e[0], (e) => e[1], (e) => e[2] / e[1], (e) => e[3], (e) => e[10] ?? "", (e) => e[5], (e) => e[6], (e) => e[7],
    (e) => e[9] / e[1], (e) => e[8], (e) => e[4],
  ],
  cells: (e) => [
    whole.format(e[1]), ms(e[2] / e[1]), ms(e[3]), e[10] ?? "–", ms(e[5]), ms(e[6]), ms(e[7]), percent(e[9], e[1]), e[8].toFixed(2),
    whole.format(e[4]),
  ],
  hot: (e) => e[4] > 0,
  name: (child, e) => {
    const { level, path, endpoint } = view.head;
    const down = level === "endpoint" ? () => step(path, child) : () => step([...path, child]);
    const label = endpoint
      ? element("span", { title: e[0] }, e[0])
      : element("button", { type: "button", "data-key": child, title: e[0], onclick: down }, e[0] || NAMELESS);
    return level === "endpoint" ? [label, element("span", { class: "of" }, child)] : [label];
  },
});

function showChildren(changed) {
  const children = view.children;
  const place = JSON.stringify([view.head.path, view.head.endpoint]);
  if (table.place !== place) table.clear(); // of the same place the rows stay, and the focus with them
  table.place = place;
  for (const child of changed ?? new Set([...table.rows.keys(), ...Object.keys(children)])) {
    if (Object.hasOwn(children, child)) table.set(child, children[child]);
    else table.remove(child);
  }
  table.arrange();
  const count = Object.keys(children).length;
  put($("children-count"), count > LINES ? `${whole.format(count)} of them` : "");
  $("children-empty").hidden = count > 0;
  $("children").hidden = count === 0;
  showMore();
  const own = lines();
  if (table.lines === own.join("|") && changed !== null) return;
  table.lines = own.join("|");
  for (const [child, { row }] of table.rows) {
    row.querySelector(".key")?.remove();
    if (own.includes(child)) row.cells[0].prepend(key(own.indexOf(child)));
  }
}

function showMore() {
  $("more").hidden = table.hidden === 0;
  put($("more"), `Show all ${whole.format(table.rows.size)}`);
}

function showBatch(batch) {
  $("batch").hidden = batch.batch_id === undefined;
  if ($("batch").hidden) return;
  put($("batch-id"), whole.format(batch.batch_id));
  put($("batch-events"), whole.format(batch.events));
}

function showAnomalies() {
  const latest = view.anomalies.latest;
  $("anomalies-empty").hidden = latest.length > 0;
  $("anomalies").hidden = latest.length === 0;
  fill($("anomalies").tBodies[0], latest.map((row) => {
    const before = row.previous_sum_us / row.previous_count;
    const where = element("button", {
      type: "button", "data-key": `${row.ts_us}-${row.endpoint_id}-${row.resp_time_us}`, title: `${row.customer} › ${row.application} › ${row.server}`,
      onclick: () => step([row.customer, row.application, row.server], String(row.endpoint_id)),
    }, row.endpoint || String(row.endpoint_id));
    return element("tr", {},
      element("td", { title: `${stamp(row.ts_us)} UTC` }, charts.clock(row.ts_us)),
      element("td", {}, where, element("span", { class: "of" }, row.server)),
      element("td", { class: "n hot" }, ms(row.resp_time_us)),
      element("td", { class: "n" }, ms(before)),
      element("td", { class: "n" }, before ? `${tenths.format(row.resp_time_us / before)}×` : "–"));
  }));
}

function showTokens(llm) {
  const services = Object.entries(llm.services);
  $("tokens").hidden = services.length === 0;
  for (const [id, column, what] of [["chart-context", 2, "Context"], ["chart-generated", 3, "Generated"]]) {
    charts.draw($(id), {
      series: services.map(([name, rows], n) => ({ name, color: color(n), points: new Map(rows.map((row) => [row[0], row[column]])) })),
      widthUs: llm.width_us, kind: "bars",
      label: `${what} tokens by service, in slots of ${WIDTHS[llm.width]}; the totals are in the table below`, format: whole.format,
    });
  }
}

function showServices(llm) {
  showTokens(llm);
  put($("llm-width"), WIDTHS[llm.width]);
  const services = Object.entries(llm.services);
  $("services-empty").hidden = services.length > 0;
  $("services").hidden = services.length === 0;
  fill($("services").tBodies[0], services.map(([name, rows], n) => {
    const sum = (column) => rows.reduce((total, row) => total + row[column], 0);
    const [requests, context, generated, errors] = [sum(1), sum(2), sum(3), sum(6)];
    const longest = rows.reduce((best, row) => (row[5] > best[5] ? row : best));
    return element("tr", { "data-service": name },
      element("td", {}, key(n), name),
      ...[requests, context, generated].map((value) => element("td", { class: "n" }, whole.format(value))),
      element("td", { class: "n" }, tenths.format(context / requests)),
      element("td", { class: "n" }, tenths.format(generated / requests)),
      element("td", { class: "n" }, whole.format(Math.max(...rows.map((row) => row[4])))),
      element("td", { class: "n" }, percent(errors, requests)),
      element("td", { class: "n trace" }, longest[7] ?? "–"));
  }));
}

// -- what a person does -------------------------------------------------------------------------------------

const stamp = (us) => new Date(us / 1000).toISOString().slice(0, 19).replace("T", " ");

$("range").addEventListener("change", (event) => go({ range: event.target.value }));
$("as-of").addEventListener("submit", (event) => {
  event.preventDefault();
  const at = Date.parse(`${$("moment").value}Z`);
  if (Number.isNaN(at)) return;
  const before = location.hash;
  go({ asOf: String(at * 1000) });
  if (location.hash === before) look(); // the same moment once more
});
$("more").addEventListener("click", () => {
  table.all();
  showMore();
  $("children").parentElement.focus(); // the button is gone
});
$("to-live").addEventListener("click", () => {
  moved = true; // the button goes away
  go({ asOf: null });
});
addEventListener("hashchange", () => {
  fromAddress();
  look();
});
document.addEventListener("visibilitychange", () => { // a page that nobody sees holds no stream
  if (asked.asOf !== null) return;
  if (document.hidden) {
    live?.close();
    live = null;
  } else if (live === null) {
    look();
  }
});
addEventListener("resize", () => view && later(null));
setInterval(showAge, 500);
$("moment").value = new Date(Date.now() - 60_000).toISOString().slice(0, 19);
fromAddress();
look();
