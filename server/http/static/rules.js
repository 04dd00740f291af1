// Rules and what they raised, and alerts.

import { get } from "./api.js";
import { heading } from "./controls.js";
import { el, fill } from "./dom.js";
import { Feed } from "./feed.js";
import { count, title } from "./format.js";
import { Grid } from "./grid.js";
import { link } from "./place.js";
import { listening, polling, read } from "./shell.js";

const POLL_MS = 2000;
const SHOWN = 200;

const values = (found) => (found === null ? "" : Object.entries(found).map(([name, value]) => `${title(name)} ${typeof value === "number" ? count(value) : value}`).join(", "));

export function openRules({ main, tables }) {
  const alerts = new Grid("Alerts", [
    { name: "name", kind: "text", isKey: true, wide: true },
    { name: "state", kind: "text", hot: (row) => row.state === "firing" },
    { name: "on", kind: "text", href: (row) => link("table", row.on) },
    { name: "key", kind: "text", wide: true, text: (row) => values(row.key) },
    { name: "value", kind: "text", wide: true, text: (row) => row.error ?? values(row.value) },
    { name: "since", kind: "time" },
    { name: "silenced_until", kind: "time", title: "silenced until" },
  ], { what: "alerts", key: (row) => JSON.stringify([row.name, row.key]), sort: { name: "since", down: true }, hasFilter: false, empty: "There is no alert. db.create_alert(...) makes one: of an aggregate, when a condition holds for a while." });
  const rules = new Grid("Rules", [
    { name: "name", kind: "text", isKey: true, wide: true },
    { name: "source", kind: "text", href: (row) => link("table", row.source) },
    { name: "where", kind: "text", wide: true },
    { name: "into", kind: "text", href: (row) => link("table", row.into) },
    ...["judged", "raised", "missing", "failed"].map((name) => ({ name, kind: "number" })),
  ], { what: "rules", key: (row) => row.name, sort: { name: "name", down: false }, hasFilter: false, empty: "There is no rule. db.create_rule(...) makes one, which judges events as they are committed." });
  const raised = el("div", {});
  fill(main, heading([["Rules and alerts", null]]), alerts.node, rules.node, raised);

  let feed = null, grids = [], followed = "";
  function follow(into) {
    if (followed === into.join()) return;
    followed = into.join();
    feed?.close();
    for (const each of grids) each.close();
    grids = into.map((name) => {
      const table = tables.get(name);
      return new Grid(`Raised into ${name}`, Object.keys(table.columns).map((column) => ({
        name: column, kind: table.kindOf(column), isKey: true,
        ...(table.kindOf(column) === "trace" ? { href: (row) => (row[column] ? link("trace", row[column]) : null) } : {}),
      })), { what: "events", key: (row) => JSON.stringify(row), sort: { name: table.event_time, down: true }, empty: "Nothing was raised." });
    });
    fill(raised, ...grids.map((each) => each.node));
    if (!into.length) return;
    feed = new Feed(into.map((name) => ({ table: name, order_by: `-${tables.get(name).event_time}`, limit: SHOWN, interval_ms: 500 })),
      listening({ shown: (parts) => parts.forEach((rows, n) => grids[n].update(rows)) }));
  }

  async function look() {
    const [first, second, said] = await Promise.all([get("/v1/alerts"), get("/v1/rules"), get("/v1/stats")]);
    alerts.update(first.alerts);
    rules.update(second.rules);
    follow([...new Set(second.rules.map((rule) => rule.into))].filter((name) => tables.get(name)?.kind === "event").slice(0, 8));
    if (feed === null) read(said.snapshot);
  }
  const end = polling(look, POLL_MS);
  return { close() { end(); feed?.close(); for (const each of [alerts, rules, ...grids]) each.close(); } };
}
