// Any store: its tables, what each is, and what is in it.

import { openAggregate } from "./aggregate.js";
import { controls, heading } from "./controls.js";
import { el, fill } from "./dom.js";
import { Feed, Past } from "./feed.js";
import { count } from "./format.js";
import { Grid } from "./grid.js";
import { link, place } from "./place.js";
import { snapshotOf } from "./api.js";
import { listening, polling, read } from "./shell.js";

const SHOWN = 500;
const POLL_MS = 2000;

export function openTables({ main, tables }) {
  const grid = new Grid("All tables", [
    { name: "name", kind: "text", isKey: true, wide: true, href: (row) => link("table", row.name) },
    { name: "kind", kind: "text" },
    { name: "role", kind: "text", text: (row) => row.role ?? "" },
    { name: "of", kind: "text", text: (row) => row.source ?? "" },
    { name: "keys", kind: "text", title: "key", wide: true, text: (row) => Object.keys(row.key).join(", ") },
    { name: "columns", kind: "number", value: (row) => Object.keys(row.columns).length, text: (row) => count(Object.keys(row.columns).length) },
  ], { what: "tables", key: (row) => row.name, sort: { name: "name", down: false }, empty: "There is no table yet." });
  const spans = `export OTEL_EXPORTER_OTLP_ENDPOINT=${location.origin} OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf`;
  fill(main, heading([["Tables", null]]), grid.node, tables.size ? null : el("section", { class: "panel help" }, el("h2", {}, "Begin"),
    el("p", {}, "Send spans from a service that speaks OpenTelemetry:"), el("pre", { tabindex: "0" }, spans),
    el("p", {}, "or make a table of a file:"), el("pre", { tabindex: "0" }, "kivi append calls calls.csv --create")));
  grid.update([...tables.values()]);
  // A list of definitions is of the newest snapshot, which it names.
  const end = polling(async () => read(await snapshotOf("/v1/tables")), POLL_MS);
  return { close() { end(); grid.close(); } };
}

export function openTable(context, table) {
  const { main } = context;
  if (table.isTimed) return openAggregate(context, table, table.name, about(table));
  const isEvents = table.kind === "event";
  const names = [...Object.keys(table.key), ...table.measures];
  const grid = new Grid(isEvents ? `The newest ${SHOWN}` : `The first ${SHOWN}`, names.map((name, n) => ({
    name, kind: table.kindOf(name), title: name, isKey: n === 0 || name in table.key, wide: n === 0,
    ...(table.kindOf(name) === "trace" && table.role === "traces" ? { href: (row) => link("trace", row[name]) } : {}),
  })), {
    what: "rows", key: (row) => JSON.stringify(isEvents ? row : Object.keys(table.key).map((name) => row[name])),
    sort: isEvents ? { name: table.event_time, down: true } : { name: names[0], down: false }, empty: "The table is empty.",
  });
  fill(main, heading([["Tables", link("tables")], [table.name, null]]), el("div", { class: "top" }, about(table), controls({ hasRange: false, hasPast: table.hasPast })), grid.node);
  const query = { table: table.name, columns: names.join(","), limit: SHOWN, interval_ms: 500, ...(isEvents ? { order_by: `-${table.event_time}` } : {}) };
  const on = listening({ pastOf: place.asOf, shown: ([rows]) => grid.update(rows) });
  const feed = place.asOf === null ? new Feed([query], on) : new Past([query], place.asOf, on);
  return { close() { feed.close(); grid.close(); } };
}

// What it is, to be unfolded.
function about(table) {
  const kept = [["kept", table.retention_us], ["versions kept", table.history_us]].filter(([, us]) => us);
  const facts = [
    ["kind", table.kind + (table.role ? `, ${table.role}` : "")], ...(table.source ? [["of", table.source]] : []),
    ...kept.map(([name, us]) => [name, `${count(us / 3600e6)} h`]),
    ...Object.entries(table.key).map(([name, type]) => [name, `${type}, key`]),
    ...Object.entries(table.columns),
    ...Object.entries(table.derived ?? {}).map(([name, expression]) => [name, expression]),
  ];
  return el("details", { class: "about" }, el("summary", {}, "Definition"), el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}
