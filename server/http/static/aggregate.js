// Any aggregate with a time slot: totals, charts over time, and a row for each of its keys, down to one key's slots.

import { Chart } from "./chart.js";
import { controls, effective, heading, RANGES } from "./controls.js";
import { el, fill, put } from "./dom.js";
import { Feed, Past } from "./feed.js";
import { clock, count, duration, isNumeric, rate, short, shown as text, title, withMethod } from "./format.js";
import { Grid } from "./grid.js";
import { link, place } from "./place.js";
import { listening } from "./shell.js";

const WEEK_MS = 7 * 86400e3;
const POINTS = 300;
const STEPS_US = [1, 5, 10, 15, 30].map((s) => s * 1e6).concat([1, 5, 10, 15, 30].map((m) => m * 60e6), [1, 2, 3, 6, 12, 24].map((h) => h * 3600e6));
const COLUMNS = ["calls", "input_tokens", "output_tokens", "cost", "error_rate", "p50_us", "p95_us", "p99_us", "apdex", "slowest_us", "slowest_trace_id"];
const GROUPS = [
  { heading: "Calls", names: ["calls"], bars: true, color: 0 },
  { heading: "Error rate", names: ["error_rate"], color: 4 },
  { heading: "Latency", names: ["p50_us", "p95_us", "p99_us"], color: 0 },
  { heading: "Tokens", names: ["input_tokens", "output_tokens"], color: 2 },
  { heading: "Cost", names: ["cost"], bars: true, color: 5 },
];
const MINOR = new Set(["p50_us", "p95_us", "apdex", "slowest_us", "slowest_trace_id", "input_tokens", "output_tokens"]);
const BOTH = new Set(["calls", "error_rate", "p99_us"]); // beside which those of a week ago are shown
const INTERVAL_MS = 500;
const LATE_MS = 60e3; // after its end a slot is waited for
const DOWN = { services: "endpoints" };
// Roles of aggregates that are shown beside others whose keys they have (of one role alone: `beside`), the measure that
// is, and after which it stands.
const BESIDE = [
  { role: "anomalies", measure: "anomalies", after: "error_rate", none: 0 },
  { role: "costs", measure: "cost", after: "output_tokens", none: null, beside: "models" }, // null: no price is known
];

function stepOf(table, range) {
  if (table.slotText !== null) return table.slotText;
  const us = [table.slotUs, ...STEPS_US].find((each) => each >= table.slotUs && each % table.slotUs === 0 && RANGES[range] / each <= POINTS) ?? table.slotUs;
  return lasting(us);
}

const lasting = (us) => (us % 1e6 === 0 ? `${us / 1e6}s` : `${us / 1e3}ms`);

export function openAggregate({ main, ofRole }, table, named, extra = null) {
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
  const namings = namingsOf(table, ofRole);
  const beside = table.slotText !== null ? [] : BESIDE.flatMap((each) => {
    if (measures.includes(each.measure) || (each.beside ?? table.role) !== table.role) return [];
    const isBeside = ({ name, keys, history_us: kept }) => name !== table.name && table.keys.every((key) => keys.includes(key)) && (place.asOf === null || kept);
    const other = ofRole(each.role).find(isBeside);
    return other ? [{ ...each, other }] : [];
  });
  const common = { table: table.name, ...selection, slot: table.slot, interval_ms: INTERVAL_MS };

  // -- the page
  const tiles = el("section", { class: "tiles", "aria-label": "Totals of what is shown" });
  const charts = drawn.map((group) => new Chart(group.heading, group.names.map((name, n) => ({
    name, title: title(name).toLowerCase() === group.heading.toLowerCase() ? "" : title(name), kind: table.kindOf(name), color: group.names.length > 1 ? (group.color + n) % 8 : group.color, bars: group.bars,
  }))));
  const isDetail = free.length === 0;
  const grid = isDetail ? slots(table, measures) : list(table, named, free, keys, measures, namings, ofRole, beside);
  const late = el("p", { class: "soft", role: "status", hidden: true });
  const steps = () => path(table, named, keys, namings);
  const way = heading(steps());
  fill(main, way, el("div", { class: "top" }, extra, controls({ slotUs: table.slotUs, canCompare: table.slotText === null, hasPast: table.hasPast })),
    late, tiles, el("div", { class: "charts" }, ...charts.map((chart) => chart.node)), grid.node);

  // -- its contents
  // What is asked: [name, query], of one snapshot. `end`: of the range, for what was a week before; `from`: where the
  // range begins, in milliseconds. Both are known by the newest slot: of what is beside it, such as anomalies, which may
  // have come long before that, `last` would be another range.
  let feed = null, compared = null, counted = null, asked = [];
  const parts = (end, from) => {
    const own = {
      total: { ...common, by: "", last: range, columns },
      series: { ...common, by: "", step, last: range, columns },
      ...(isDetail ? {} : { entries: { ...common, by: free.join(","), last: range, columns } }),
    };
    const found = Object.entries(own);
    for (const [n, each] of namings.entries()) found.push([`naming${n}`, { table: each.table, columns: `${each.column},name`, interval_ms: INTERVAL_MS }]);
    if (beside.length) found.push(["newest", { ...common, by: "", step: slotText, last: slotText, columns: measures[0] }]);
    if (from !== null) {
      for (const { other, measure } of beside) {
        const of = { table: other.name, ...other.selected(keys), slot: other.slot, interval_ms: INTERVAL_MS, from, columns: measure };
        found.push([`${measure}Beside`, { ...of, by: "", columns: measure === "cost" && "calls" in other.types ? "cost,calls" : measure }]);
        if (!isDetail) found.push([`${measure}Of`, { ...of, by: free.join(",") }]);
      }
    }
    if (end !== null) {
      const then = { from: end - WEEK_MS - RANGES[range] / 1e3, to: end - WEEK_MS };
      for (const [name, { last: _, ...rest }] of Object.entries(own)) found.push([`${name}Before`, { ...rest, ...then }]);
    }
    return found;
  };
  const slotText = lasting(table.slotUs);
  const endOf = (series, width) => (series.length ? Date.parse(series.at(-1)[table.slot]) + width : null);

  // A range ends with the newest slot, which may have been over for long.
  let until = null;
  function tell() {
    const ago = (place.asOf === null ? Date.now() : Date.parse(place.asOf)) - until;
    late.hidden = until === null || ago < table.slotUs / 1e3 + LATE_MS;
    put(late, late.hidden ? "" : `Nothing has come since ${clock(until)} UTC: the range ends there.`);
  }
  const telling = setInterval(tell, LATE_MS / 6);

  function open(end, from) {
    feed?.close();
    compared = end;
    counted = from;
    asked = parts(end, from);
    const queries = asked.map(([, each]) => each);
    const on = listening({ pastOf: place.asOf, shown: (rows) => show(Object.fromEntries(rows.map((each, n) => [asked[n][0], each]))) });
    feed = place.asOf === null ? new Feed(queries, on) : new Past(queries, place.asOf, on);
  }

  function show(found) {
    for (const [n, each] of namings.entries()) each.told(found[`naming${n}`]);
    if (namings.length) {
      for (const [n, node] of [...way.querySelectorAll("h1, a")].entries()) put(node, steps()[n][0]);
      document.title = `${way.querySelector("h1").textContent} · kivi`;
    }
    const { total, series, entries, totalBefore, seriesBefore = null, entriesBefore } = found;
    const end = place.compare ? endOf(series, stepMs(step)) ?? compared : null;
    until = table.slotText === null ? endOf(series, stepMs(step)) : null;
    tell();
    const newest = beside.length ? endOf(found.newest, table.slotUs / 1e3) : null;
    const from = newest === null ? counted : newest - RANGES[range] / 1e3;
    if (end !== compared || from !== counted) open(end, from); // where the range ends has moved, or is known now
    const extra = beside.map(({ measure, none }) => {
      const rows = found[`${measure}Beside`];
      const { [measure]: value = none, calls } = rows?.[0] ?? {};
      // What is known of some of the calls is not taken for that of all.
      const part = calls !== undefined && calls !== total[0]?.calls ? el("small", {}, `of ${count(calls)} calls`) : "";
      return [measure[0].toUpperCase() + measure.slice(1), rows === undefined ? "–" : count(value), " ", part];
    });
    showTiles(tiles, table, measures, total[0] ?? null, totalBefore === undefined ? null : (totalBefore[0] ?? {}), range, extra);
    for (const chart of charts) chart.update(series, seriesBefore, table.slot, table.slotText === null ? stepMs(step) : 0, { day: RANGES[range] > 86400e6, least: table.slotText === null ? Math.round(RANGES[range] / 1e3 / stepMs(step)) : undefined });
    if (isDetail) grid.update(series.slice().reverse());
    else {
      for (const { measure, none } of beside) {
        if (found[`${measure}Of`] === undefined) continue;
        const each = new Map(found[`${measure}Of`].map((row) => [grid.key(row), row[measure]]));
        grid.beside[measure] = (row) => each.get(grid.key(row)) ?? none;
      }
      if (entriesBefore !== undefined) {
        const before = new Map(entriesBefore.map((row) => [grid.key(row), row]));
        grid.compare((row) => before.get(grid.key(row)));
      }
      grid.update(entries);
    }
  }

  open(null, null);
  return {
    close() {
      clearInterval(telling);
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

// What the values of key columns are called, by tables that have the role.
function namingsOf(table, ofRole) {
  return ofRole("names").filter((each) => table.keys.includes(each.keys[0])).map((each) => {
    let rows = null, known = new Map();
    const column = each.keys[0];
    return {
      table: each.name, column,
      of: (value) => known.get(String(value)) ?? String(value),
      told(found) {
        if (found !== rows) known = new Map((rows = found).map((row) => [String(row[column]), row.name]));
      },
    };
  });
}

function path(table, named, keys, namings) {
  const called = (name) => namings.find((each) => each.column === name)?.of(keys[name]) ?? keys[name];
  const names = table.keys.filter((name) => name in keys);
  const steps = [...(named === table.name ? [["Tables", link("tables")]] : []), [named, addressOf(table, {})]];
  const shownNames = names.filter((name) => keys[name] !== "" || names.length === 1);
  const isEndpoint = shownNames.at(-2) === "route" && shownNames.at(-1) === "method";
  for (const [n, name] of shownNames.entries()) {
    if (isEndpoint && name === "route") continue; // it is called by both
    const upto = Object.fromEntries(names.slice(0, names.indexOf(name) + 1).map((each) => [each, keys[each]]));
    const last = n === shownNames.length - 1;
    const text = isEndpoint && last ? withMethod(keys.method, called("route")) : called(name);
    steps.push([text || "(empty)", last ? null : addressOf(table, upto)]);
  }
  return steps;
}

function list(table, named, free, keys, measures, namings, ofRole, beside) {
  const below = DOWN[table.role] ? ofRole(DOWN[table.role]).find((each) => table.keys.every((name) => each.keys.includes(name))) : null;
  const href = (row) => addressOf(below ?? table, { ...keys, ...Object.fromEntries(free.map((name) => [name, row[name]])) });
  // A key that tells nothing apart, as an empty namespace, comes last. Keys go from the general to the
  // particular: the last one of the others is the link, where none is known to be.
  const order = [...free.filter((name) => name !== "namespace"), ...free.filter((name) => name === "namespace")];
  const main = ["route", "model", "peer"].find((name) => order.includes(name)) ?? free.filter((name) => name !== "namespace").at(-1) ?? order[0];
  const columns = [main, ...order.filter((name) => name !== main)].map((name, n) => ({
    name, kind: table.kindOf(name) === "trace" ? "bytes" : table.kindOf(name) === "number" ? "text" : table.kindOf(name), isKey: true, wide: n === 0, href: n === 0 ? href : null,
    isNumber: table.kindOf(name) === "number",
    isOptional: n > 0, isMinor: n > 1, ...calledBy(namings.find((each) => each.column === name)),
  }));
  const found = measured(table, measures);
  for (const { measure, after } of beside) {
    const place = found.findIndex((each) => each.name === after) + 1 || found.length;
    found.splice(place, 0, { name: measure, kind: "number", title: title(measure), value: (row) => grid.beside[measure]?.(row) ?? null });
  }
  const grid = new Grid(named, [...columns, ...found], {
    what: named.toLowerCase(), key: (row) => JSON.stringify(free.map((name) => row[name])),
    sort: { name: measures.includes("calls") ? "calls" : columns[0].name, down: measures.includes("calls") },
    empty: "Nothing came in this range. Choose a longer one.",
  });
  grid.beside = {};
  for (const column of grid.columns) {
    if (!column.isBoth) continue;
    const plain = column.kind;
    column.text = (row) => {
      const before = grid.before?.(row)?.[column.name];
      return text(plain, row[column.name]) + (grid.before ? ` (${before === undefined ? "–" : text(plain, before)})` : "");
    };
  }
  return grid;
}

function calledBy(naming) {
  if (!naming) return {};
  const of = (row) => naming.of(row[naming.column]);
  return { title: title(naming.column.replace(/_id$/, "")), value: of, text: of };
}

function slots(table, measures) {
  const text = (row) => clock(row[table.slot], { seconds: table.slotUs < 60e6 });
  return new Grid("By time", [{ name: table.slot, kind: "time", isKey: true, title: "slot", wide: true, text }, ...measured(table, measures)], {
    what: "slots", sort: { name: table.slot, down: true }, hasFilter: false, empty: "Nothing came in this range. Choose a longer one.",
  });
}

const measured = (table, measures) => measures.map((name) => {
  const kind = table.kindOf(name);
  return {
    name, kind, title: title(name), isMinor: MINOR.has(name),
    ...(kind === "trace" ? { href: (row) => (row[name] ? link("trace", row[name]) : null) } : {}),
    ...(BOTH.has(name) ? { isBoth: true } : {}),
    ...(name === "error_rate" ? { hot: (row) => row[name] >= 0.01 } : {}),
  };
});

// T of an Apdex, which its definition says.
function toleratedText(table) {
  const bound = /fraction_below\(\w+, ([\d.]+)/.exec(table.derived?.apdex ?? "")?.[1];
  return bound ? `T = ${duration(Number(bound))}` : "";
}

// -- totals ---------------------------------------------------------------------------------------------

// `extra`: [heading, ...content] of what is of other tables.
function showTiles(node, table, measures, total, before, range, extra) {
  const cell = (name, ...content) => el("div", { class: "tile" }, el("h2", {}, name), el("p", {}, ...content));
  const value = (name) => (total === null ? "–" : text(table.kindOf(name), total[name] ?? null));
  const change = (name) => {
    if (before === null) return null;
    const then = before[name];
    if (then === undefined || then === null || total === null) return el("small", { class: "change" }, "a week ago: –");
    return el("small", { class: "change" }, `a week ago: ${text(table.kindOf(name), then)}`);
  };
  const has = (name) => measures.includes(name);
  const quantiles = ["p50_us", "p95_us", "p99_us"].filter(has);
  let found;
  if (has("calls") && has("p99_us")) {
    found = [
      cell("Calls", value("calls"), " ", el("small", {}, total === null ? "" : rate(total.calls, RANGES[range])), change("calls")),
      ...(has("error_rate") ? [cell("Error rate", el("span", { class: total?.error_rate >= 0.01 ? "hot" : "" }, value("error_rate")), change("error_rate"))] : []),
      cell(quantiles.map(title).join(" · "), el("span", { class: "several" }, total === null ? "–" : quantiles.map((name) => duration(total[name])).join(" · ")), before === null ? null : el("small", { class: "change" }, `a week ago: ${quantiles.map((name) => duration(before[name] ?? null)).join(" · ")}`)),
      ...(has("apdex") ? [cell("Apdex", value("apdex"), " ", el("small", {}, toleratedText(table)), change("apdex"))] : []),
      ...(has("slowest_us") ? [cell("Slowest", value("slowest_us"), " ", total?.slowest_trace_id ? el("a", { href: link("trace", total.slowest_trace_id), "data-key": "slowest" }, el("small", {}, "its trace")) : "", change("slowest_us"))] : []),
      ...(has("input_tokens") ? [cell("Tokens in · out", el("span", { class: "several" }, total === null ? "–" : `${short(total.input_tokens)} · ${short(total.output_tokens)}`))] : []),
    ];
  } else {
    found = measures.filter((name) => isNumeric(table.kindOf(name))).slice(0, 6).map((name) => cell(title(name), value(name), change(name)));
  }
  found.push(...extra.map((each) => cell(...each)));
  if (!node.children.length || node.children.length !== found.length) return fill(node, ...found);
  for (const [n, tile] of found.entries()) if (node.children[n].textContent !== tile.textContent || node.children[n].innerHTML !== tile.innerHTML) {
    const focused = node.children[n].contains(document.activeElement);
    node.children[n].replaceWith(tile);
    if (focused) tile.querySelector("a")?.focus({ preventScroll: true });
  }
}
