// Traces: the slowest spans of a while, and all spans of one trace, as a tree and on a common scale.

import { controls, effective, heading, RANGES } from "./controls.js";
import { el, fill, put } from "./dom.js";
import { Feed, Past } from "./feed.js";
import { clock, count, duration, withMethod } from "./format.js";
import { Grid } from "./grid.js";
import { go, here, link, place } from "./place.js";
import { listening } from "./shell.js";

const LEFT_OUT = new Set(["namespace", "instance", "span_id", "parent_span_id", "kind"]);
const SHOWN = 200;
const MOST = 1000; // spans of a trace, of each table
const DEEPEST = 8; // that is drawn
const NAMES = ["route", "operation", "model"];

// What a span is called, of whatever table.
function nameOf(row) {
  const name = NAMES.map((each) => row[each]).find((text) => text) ?? row.peer ?? "";
  return withMethod(row.method, name);
}
const idText = (table, id) => (table.types.trace_id === "bytes" && !id.startsWith("0x") ? `0x${id}` : id);

export function openTraces({ main, ofRole }) {
  const tables = ofRole("traces");
  const table = tables.find((each) => each.name === place.more.table) ?? tables[0];
  const range = effective(0);
  const now = place.asOf === null ? Date.now() : Date.parse(place.asOf);
  const from = new Date(Math.floor((now - RANGES[range] / 1e3) / 60e3) * 60e3).toISOString();
  const by = "duration_us" in table.types ? "duration_us" : table.event_time;
  const names = Object.keys(table.columns).filter((name) => !LEFT_OUT.has(name));
  const ordered = [...NAMES, "service"].filter((name) => names.includes(name));
  const columns = [table.event_time, "duration_us", ...ordered, ...names.filter((name) => name !== table.event_time && name !== "duration_us" && !ordered.includes(name))].filter((name) => names.includes(name));
  const grid = new Grid(by === "duration_us" ? `Slowest since ${clock(from)} UTC` : "Newest", columns.map((name) => ({
    name, kind: name === "error" || name === "status_code" ? "number" : table.kindOf(name), title: name === "trace_id" ? "trace" : undefined, wide: NAMES.includes(name),
    ...(name === "trace_id" ? { href: (row) => link("trace", row.trace_id) } : {}),
    isMinor: !["service", "duration_us", "trace_id", ...NAMES].includes(name),
    ...(table.kindOf(name) === "text" ? { text: (row) => row[name] || "" } : {}), // of what a span does not say
    ...(name === "status_code" ? { text: (row) => row[name] || "" } : {}),
    ...(name === "error" ? { kind: "text", text: (row) => (row.error ? "error" : ""), hot: (row) => row.error > 0 } : {}),
  })), { what: "spans", key: (row) => `${row.trace_id}${row.span_id ?? row[table.event_time]}`, sort: { name: by, down: true }, empty: "No spans came in this range. Choose a longer one." });
  const id = el("input", { id: "trace-id", type: "text", required: true, spellcheck: "false", pattern: "(0x)?[0-9a-fA-F]{4,64}", placeholder: "32 hexadecimal digits" });
  fill(main, heading([["Traces", null]]),
    el("div", { class: "top" },
      el("form", { class: "find", onsubmit: (event) => { event.preventDefault(); go(link("trace", id.value.trim().toLowerCase())); } },
        el("label", { for: "trace-id" }, "Trace id"), id, el("button", { type: "submit" }, "Open")),
      controls({})),
    tables.length > 1 ? el("fieldset", { class: "range" }, el("legend", { class: "hidden" }, "Table"), ...tables.map((each) => el("label", {},
      el("input", { type: "radio", name: "table", value: each.name, checked: each === table, "data-key": `table-${each.name}`, onchange: () => go(here({ more: { table: each.name } })) }), el("span", {}, each.name)))) : null,
    grid.node);
  const query = { table: table.name, columns: [...new Set([...columns, ...("span_id" in table.types ? ["span_id"] : [])])].join(","), where: `${table.event_time} >= '${from}'`, order_by: `-${by}`, limit: SHOWN, interval_ms: 1000 };
  const on = listening({ pastOf: place.asOf, shown: ([rows]) => grid.update(rows) });
  const feed = place.asOf === null ? new Feed([query], on) : new Past([query], place.asOf, on);
  return { close() { feed.close(); grid.close(); } };
}

export function openTrace({ main, ofRole }, id) {
  const tables = ofRole("traces");
  const list = el("ol", { class: "spans", "aria-label": "Spans, each below the one that it is part of" });
  const about = el("p", { class: "soft" });
  const empty = el("p", { class: "empty", hidden: true }, "No span of this trace is here: it was not sent, or it is older than its table keeps events.");
  fill(main, heading([["Traces", link("traces")], [id.replace(/^0x/, ""), null]]), el("section", { class: "panel" }, about, list, empty));
  const queries = tables.map((table) => ({ table: table.name, where: `trace_id == '${idText(table, id)}'`, order_by: table.event_time, limit: MOST, interval_ms: 1000 }));
  const on = listening({
    pastOf: place.asOf,
    shown: (parts) => {
      const spans = nested(parts.flatMap((rows, n) => rows.map((row) => {
        const end = Date.parse(row[tables[n].event_time]) * 1000 + microsOf(row[tables[n].event_time]);
        return { row, table: tables[n], end, start: end - (row.duration_us ?? 0) };
      })).sort((a, b) => a.start - b.start || b.end - a.end));
      empty.hidden = spans.length > 0;
      list.hidden = spans.length === 0;
      const first = Math.min(...spans.map((span) => span.start)), last = Math.max(...spans.map((span) => span.end));
      const isCut = parts.some((rows) => rows.length === MOST);
      put(about, spans.length ? `${isCut ? "Only those that ended first: " : ""}${count(spans.length)} ${spans.length === 1 ? "span" : "spans"}, ${duration(last - first)}, begun ${clock(first / 1000, { seconds: true, day: true })} UTC` : "");
      const open = new Set([...list.querySelectorAll("details[open]")].map((each) => each.dataset.key));
      fill(list, ...spans.map((span) => shownSpan(span, first, Math.max(1, last - first), open)));
    },
  });
  const feed = place.asOf === null ? new Feed(queries, on) : new Past(queries, place.asOf, on);
  return { close() { feed.close(); } };
}

// Each below the span that it is part of, and such as are part of none that is here, by their beginning: `depth` is how
// deep, of 0 on. The spans inside of a service are not kept, so what is part of them begins anew.
function nested(spans) {
  const known = new Map(spans.map((span) => [span.row.span_id, span]));
  const parts = new Map(spans.map((span) => [span, []]));
  const tops = [];
  for (const span of spans) {
    const parent = span.row.parent_span_id && known.get(span.row.parent_span_id);
    (parent && parent !== span ? parts.get(parent) : tops).push(span);
  }
  const found = new Set();
  for (const top of [...tops, ...spans]) { // also those that say that they are part of each other
    const waiting = [[top, 0]];
    while (waiting.length) {
      const [span, depth] = waiting.pop();
      if (found.has(span)) continue;
      found.add(Object.assign(span, { depth }));
      waiting.push(...parts.get(span).map((each) => [each, depth + 1]).reverse());
    }
  }
  return [...found];
}

// The microseconds of a text like 2026-07-01T12:00:00.123456Z that a Date does not hold.
const microsOf = (text) => Number(/\.\d{3}(\d{3})/.exec(text)?.[1] ?? 0);

function shownSpan({ row, table, start, end, depth }, first, whole, open) {
  const bar = el("span", { class: `bar ${row.error ? "bad" : ""}` });
  bar.style.marginInlineStart = `${(100 * (start - first)) / whole}%`;
  bar.style.width = `${Math.max(0.3, (100 * (end - start)) / whole)}%`;
  const what = el("span", { class: "what" }, depth ? el("span", { class: "hidden" }, `level ${depth + 1}: `) : null, el("b", {}, row.service ?? table.name), ` ${nameOf(row)}`,
    row.peer && NAMES.some((name) => row[name]) ? el("small", {}, ` → ${row.peer}`) : null, row.error ? el("span", { class: "badge bad" }, "error") : null);
  what.style.paddingInlineStart = `${Math.min(depth, DEEPEST) * 14}px`;
  const details = Object.entries(row).filter(([name, value]) => value !== "" && value !== "0x" && value !== null && !["trace_id", "duration_us"].includes(name));
  return el("li", {}, el("details", { "data-key": row.span_id ?? "", open: open.has(row.span_id ?? "") },
    el("summary", {}, what,
      el("span", { class: "took" }, duration(row.duration_us)), el("span", { class: "lane", "aria-hidden": "true" }, bar)),
    el("dl", {}, el("dt", {}, "table"), el("dd", {}, table.name), ...details.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]))));
}
