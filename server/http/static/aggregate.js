// Any aggregate with a time slot: totals, charts over time, and a row for each of its keys, down to one key's slots.

import { Chart } from "./chart.js";
import { controls, effective, heading, RANGES } from "./controls.js";
import { el, fill } from "./dom.js";
import { Feed, Past } from "./feed.js";
import { duration, isNumeric, short, shown as text, title } from "./format.js";
import { Grid } from "./grid.js";
import { link, place } from "./place.js";
import { listening } from "./shell.js";

const WEEK_MS = 7 * 86400e3;
const POINTS = 300;
const STEPS_US = [1, 5, 10, 15, 30].map((s) => s * 1e6).concat([1, 5, 10, 15, 30].map((m) => m * 60e6), [1, 2, 3, 6, 12, 24].map((h) => h * 3600e6));
const COLUMNS = ["calls", "error_rate", "p50_us", "p95_us", "p99_us", "apdex", "slowest_us", "slowest_trace_id", "input_tokens", "output_tokens"];
const GROUPS = [
  { heading: "Calls", names: ["calls"], bars: true, color: 0 },
  { heading: "Error rate", names: ["error_rate"], color: 4 },
  { heading: "Latency", names: ["p50_us", "p95_us", "p99_us"], color: 0 },
  { heading: "Tokens", names: ["input_tokens", "output_tokens"], color: 2 },
];
const MINOR = new Set(["p50_us", "p95_us", "apdex", "slowest_us", "slowest_trace_id", "input_tokens", "output_tokens"]);
const INTERVAL_MS = 500;
const DOWN = { services: "endpoints" };

function stepOf(table, range) {
  if (table.slotText !== null) return table.slotText;
  const us = [table.slotUs, ...STEPS_US].find((each) => each >= table.slotUs && each % table.slotUs === 0 && RANGES[range] / each <= POINTS) ?? table.slotUs;
  return us % 1e6 === 0 ? `${us / 1e6}s` : `${us / 1e3}ms`;
}

export function openAggregate({ main, tables, ofRole }, table, named, extra = null) {
  const known = COLUMNS.filter((name) => name in table.types);
  const isKnown = known.includes("calls");
  const measures = isKnown ? known : table.measures.filter((name) => table.kindOf(name) !== "state").slice(0, 24);
  const drawn = isKnown ? GROUPS.map((group) => ({ ...group, names: group.names.filter((name) => name in table.types) })).filter((group) => group.names.length) : chosen(table, measures);
  const keys = Object.fromEntries(Object.entries(place.keys).filter(([name]) => table.keys.includes(name)));
  const free = table.keys.filter((name) => !(name in keys));
  const range = effective(table.slotUs);
  const step = stepOf(table, range);
  const selection = table.selected(keys);
  const columns = measures.join(",");
  const common = { table: table.name, ...selection, slot: table.slot, interval_ms: INTERVAL_MS };

  // -- the page
  const tiles = el("section", { class: "tiles", "aria-label": "Totals of what is shown" });
  const charts = drawn.map((group) => new Chart(group.heading, group.names.map((name, n) => ({
    name, title: group.names.length > 1 ? title(name) : "", kind: table.kindOf(name), color: group.names.length > 1 ? (group.color + n) % 8 : group.color, bars: group.bars,
  }))));
  const isDetail = free.length === 0;
  const grid = isDetail ? slots(table, measures) : list(table, named, free, keys, measures, tables, ofRole);
  fill(main, heading(path(table, named, keys)), el("div", { class: "top" }, extra, controls({ slotUs: table.slotUs, canCompare: table.slotText === null })),
    tiles, el("div", { class: "charts" }, ...charts.map((chart) => chart.node)), grid.node);

  // -- its contents
  let feed = null, compared = null;
  const parts = (end) => {
    const own = [
      { ...common, by: "", last: range, columns },
      { ...common, by: "", step, last: range, columns },
      ...(isDetail ? [] : [{ ...common, by: free.join(","), last: range, columns }]),
    ];
    if (end === null) return own;
    const then = { from: end - WEEK_MS - RANGES[range] / 1e3, to: end - WEEK_MS };
    return [...own, ...own.map(({ last: _, ...rest }) => ({ ...rest, ...then }))];
  };
  const endOf = (series) => (series.length ? Date.parse(series.at(-1)[table.slot]) + stepMs(step) : null);

  function open(end) {
    feed?.close();
    compared = end;
    const on = listening({ pastOf: place.asOf, shown: (rows) => show(rows) });
    feed = place.asOf === null ? new Feed(parts(end), on) : new Past(parts(end), place.asOf, on);
  }

  function show(rows) {
    const size = isDetail ? 2 : 3;
    const [total, series, entries] = rows;
    const [totalBefore, seriesBefore, entriesBefore] = rows.length > size ? rows.slice(size) : [null, null, null];
    const end = endOf(series);
    if (place.compare && end !== null && end !== compared) open(end); // where the range ends has moved, or is known now
    showTiles(tiles, table, measures, total[0] ?? null, totalBefore === null ? null : (totalBefore[0] ?? {}), range);
    for (const chart of charts) chart.update(series, seriesBefore, table.slot, table.slotText === null ? stepMs(step) : 0, { day: RANGES[range] > 86400e6 });
    if (isDetail) grid.update(series.slice().reverse());
    else {
      if (entriesBefore !== null) {
        const before = new Map(entriesBefore.map((row) => [grid.key(row), row]));
        grid.before = (row) => before.get(grid.key(row));
        grid.table.classList.add("compared");
      }
      grid.update(entries);
    }
  }

  open(null);
  return {
    close() {
      feed.close();
      for (const chart of charts) chart.close();
      grid.close();
    },
  };
}

const stepMs = (step) => (step.endsWith("ms") ? Number(step.slice(0, -2)) : step.endsWith("s") ? Number(step.slice(0, -1)) * 1e3 : 0);

// Of an aggregate that says nothing of itself: a chart for each kind of number, at most four.
function chosen(table, measures) {
  const numbers = measures.filter((name) => isNumeric(table.kindOf(name)));
  const quantiles = numbers.filter((name) => /^p\d+/.test(name));
  const others = numbers.filter((name) => !quantiles.includes(name));
  const groups = others.slice(0, quantiles.length ? 3 : 4).map((name, n) => ({
    heading: title(name), names: [name], color: n, bars: /^(count|sum)/.test(table.columns[name] ?? ""),
  }));
  return quantiles.length ? [...groups, { heading: "Quantiles", names: quantiles.slice(0, 5), color: 0 }] : groups;
}

// -- the way down ---------------------------------------------------------------------------------------

function addressOf(table, keys) {
  return table.role && table.role !== "traces" ? link(table.role, "", { keys }) : link("table", table.name, { keys });
}

function path(table, named, keys) {
  const names = table.keys.filter((name) => name in keys);
  const steps = [[named, addressOf(table, {})]];
  const shownNames = names.filter((name) => keys[name] !== "" || names.length === 1);
  for (const [n, name] of shownNames.entries()) {
    const upto = Object.fromEntries(names.slice(0, names.indexOf(name) + 1).map((each) => [each, keys[each]]));
    const last = n === shownNames.length - 1;
    steps.push([keys[name] || "(empty)", last ? null : addressOf(table, upto)]);
  }
  return steps;
}

function list(table, named, free, keys, measures, tables, ofRole) {
  const below = DOWN[table.role] ? ofRole(DOWN[table.role]).find((each) => table.keys.every((name) => each.keys.includes(name))) : null;
  const href = (row) => addressOf(below ?? table, { ...keys, ...Object.fromEntries(free.map((name) => [name, row[name]])) });
  // A key that tells nothing apart, as an empty namespace, comes last; the first one of the others is the link.
  const order = [...free.filter((name) => name !== "namespace"), ...free.filter((name) => name === "namespace")];
  const main = ["route", "model", "peer"].find((name) => order.includes(name)) ?? order[0];
  const columns = [main, ...order.filter((name) => name !== main)].map((name, n) => ({
    name, kind: table.kindOf(name) === "trace" ? "bytes" : table.kindOf(name) === "number" ? "text" : table.kindOf(name), isKey: true, wide: n === 0, href: n === 0 ? href : null,
    isOptional: name === "namespace", isMinor: n > 1,
  }));
  const grid = new Grid(named, [...columns, ...measured(table, measures)], {
    what: named.toLowerCase(), key: (row) => JSON.stringify(free.map((name) => row[name])),
    sort: { name: measures.includes("calls") ? "calls" : columns[0].name, down: measures.includes("calls") },
    empty: "Nothing came in this range. Choose a longer one.",
  });
  for (const column of grid.columns) {
    if (!["calls", "p99_us", "error_rate"].includes(column.name)) continue;
    const plain = column.kind;
    column.isCompared = true;
    column.text = (row) => {
      const before = grid.before?.(row)?.[column.name];
      return text(plain, row[column.name]) + (grid.before ? ` (${before === undefined ? "–" : text(plain, before)})` : "");
    };
  }
  return grid;
}

function slots(table, measures) {
  return new Grid("By time", [{ name: table.slot, kind: "time", isKey: true, title: "slot", wide: true }, ...measured(table, measures)], {
    what: "slots", sort: { name: table.slot, down: true }, hasFilter: false, empty: "Nothing came in this range. Choose a longer one.",
  });
}

const measured = (table, measures) => measures.map((name) => {
  const kind = table.kindOf(name);
  return {
    name, kind, title: title(name), isMinor: MINOR.has(name),
    ...(kind === "trace" ? { href: (row) => (row[name] ? link("trace", row[name]) : null) } : {}),
    ...(name === "error_rate" ? { hot: (row) => row[name] >= 0.01 } : {}),
  };
});

// -- totals ---------------------------------------------------------------------------------------------

function showTiles(node, table, measures, total, before, range) {
  const cell = (name, ...content) => el("div", { class: "tile" }, el("h2", {}, name), el("p", {}, ...content));
  const value = (name) => (total === null ? "–" : text(table.kindOf(name), total[name] ?? null));
  const change = (name) => {
    if (before === null) return null;
    const then = before[name];
    if (then === undefined || then === null || total === null) return el("small", { class: "change" }, "a week ago: –");
    return el("small", { class: "change" }, `a week ago: ${text(table.kindOf(name), then)}`);
  };
  const has = (name) => measures.includes(name);
  let found;
  if (has("calls") && has("p99_us")) {
    const perSecond = total === null ? null : total.calls / (RANGES[range] / 1e6);
    found = [
      cell("Calls", value("calls"), " ", el("small", {}, perSecond === null ? "" : `${perSecond >= 10 ? Math.round(perSecond) : perSecond.toPrecision(2)} /s`), change("calls")),
      ...(has("error_rate") ? [cell("Error rate", el("span", { class: total?.error_rate >= 0.01 ? "hot" : "" }, value("error_rate")), change("error_rate"))] : []),
      cell("p50 · p95 · p99", el("span", { class: "several" }, total === null ? "–" : ["p50_us", "p95_us", "p99_us"].filter(has).map((name) => duration(total[name])).join(" · ")), before === null ? null : el("small", { class: "change" }, `a week ago: ${["p50_us", "p95_us", "p99_us"].filter(has).map((name) => duration(before[name] ?? null)).join(" · ")}`)),
      ...(has("apdex") ? [cell("Apdex", value("apdex"), " ", el("small", {}, "T = 0.5 s"), change("apdex"))] : []),
      ...(has("slowest_us") ? [cell("Slowest", value("slowest_us"), " ", total?.slowest_trace_id ? el("a", { href: link("trace", total.slowest_trace_id), "data-key": "slowest" }, el("small", {}, "its trace")) : "", change("slowest_us"))] : []),
      ...(has("input_tokens") ? [cell("Tokens in · out", el("span", { class: "several" }, total === null ? "–" : `${short(total.input_tokens)} · ${short(total.output_tokens)}`))] : []),
    ];
  } else {
    found = measures.filter((name) => isNumeric(table.kindOf(name))).slice(0, 6).map((name) => cell(title(name), value(name), change(name)));
  }
  if (!node.children.length || node.children.length !== found.length) return fill(node, ...found);
  for (const [n, tile] of found.entries()) if (node.children[n].textContent !== tile.textContent || node.children[n].innerHTML !== tile.innerHTML) {
    const focused = node.children[n].contains(document.activeElement);
    node.children[n].replaceWith(tile);
    if (focused) tile.querySelector("a")?.focus({ preventScroll: true });
  }
}
