// A question in SQL, at one snapshot.

import { post } from "./api.js";
import { controls, heading } from "./controls.js";
import { el, fill, put } from "./dom.js";
import { Grid } from "./grid.js";
import { count, kindOf } from "./format.js";
import { link, place } from "./place.js";
import { failed, snapshot, status, trouble } from "./shell.js";

const KEY = "kivi-sql";

export function openSql({ main, tables }) {
  const example = [...tables.values()].find((table) => table.role === "endpoints") ?? [...tables.values()][0];
  const box = el("textarea", { id: "sql", rows: "6", spellcheck: "false", "aria-describedby": "sql-help", onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); } } });
  box.value = place.more.q ?? sessionStorage.getItem(KEY) ?? (example ? `select * from ${example.name} limit 100` : "select 1");
  const button = el("button", { type: "submit", class: "main" }, "Run");
  const stop = el("button", { type: "button", hidden: true, onclick: () => { running?.abort(); button.focus(); } }, "Stop");
  const about = el("p", { class: "soft", role: "status" });
  const wrong = el("pre", { class: "wrong", role: "alert", hidden: true });
  const answer = el("div", {});
  fill(main, heading([["SQL", null]]), el("div", { class: "top" }, controls({ hasRange: false })),
    el("form", { class: "panel sql", onsubmit: (event) => { event.preventDefault(); run(); } },
      el("label", { for: "sql" }, "Question"), box,
      el("p", { class: "buttons" }, button, stop, el("small", { id: "sql-help" }, "Ctrl+Enter runs it. It reads only; tables are those that the token may read."))),
    about, wrong, answer);
  let grid = null, running = null;

  async function run() {
    running?.abort();
    const mine = (running = new AbortController());
    sessionStorage.setItem(KEY, box.value);
    put(about, "Running …");
    stop.hidden = false;
    status("wait", "running");
    const began = performance.now();
    try {
      const said = await post("/v1/sql", { sql: box.value, ...(place.asOf === null ? {} : { as_of: place.asOf }) }, mine.signal);
      wrong.hidden = true;
      trouble(null);
      const names = Object.keys(said.types);
      grid?.close();
      grid = names.length ? new Grid("Answer", names.map((name) => {
        const kind = kindOf(name, typeOf(said.types[name]));
        return { name, kind, title: name, isKey: !["number"].includes(kind), ...(kind === "trace" ? { href: (row) => (row[name] ? link("trace", row[name]) : null) } : {}) };
      }), { what: "rows", key: (row) => JSON.stringify(row), sort: { name: "", down: false }, empty: "No rows." }) : null;
      fill(answer, grid?.node ?? el("p", { class: "empty" }, "No rows."));
      grid?.update(said.rows);
      put(about, `${count(said.rows.length)} ${said.rows.length === 1 ? "row" : "rows"} in ${Math.round(performance.now() - began)} ms`);
      status(place.asOf === null ? "live" : "past", place.asOf === null ? "done" : "the past");
      snapshot(said.snapshot);
    } catch (error) {
      if (error.name === "AbortError") {
        if (running !== mine) return; // another one runs, or the view was left
        put(about, "Stopped.");
        return status("live", "stopped");
      }
      put(about, "");
      if (error.status === 401 || error.status === 403) return failed(error);
      put(wrong, error.message);
      wrong.hidden = false;
      fill(answer); // that of the question before is not of this one
      status("bad", "not answered");
    } finally {
      if (running === mine) stop.hidden = true;
    }
  }

  status("live", "ready");
  main.setAttribute("aria-busy", "false");
  return { close() { const last = running; running = null; last?.abort(); grid?.close(); } };
}

// What Arrow calls a type, as kivi calls it.
function typeOf(type) {
  if (/^(u?int|halffloat|float|double|decimal)/.test(type)) return "float64";
  if (/^(list|large_list|fixed_size_list|struct|map)/.test(type)) return "list(x)";
  return type.startsWith("timestamp") ? "timestamp" : "string";
}
