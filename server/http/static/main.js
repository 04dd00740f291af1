// The console: which views there are, and which one is shown.

import { get, token } from "./api.js";
import { $, el, fill, put } from "./dom.js";
import { clock } from "./format.js";
import { go, here, link, place, read } from "./place.js";
import * as shell from "./shell.js";
import { Table } from "./tables.js";
import { openAggregate } from "./aggregate.js";
import { openHealth } from "./health.js";
import { openRules } from "./rules.js";
import { openSql } from "./sql.js";
import { openTable, openTables } from "./browse.js";
import { openTrace, openTraces } from "./traces.js";

const ROLES = { services: "Services", endpoints: "Endpoints", dependencies: "Dependencies", models: "Models", traces: "Traces" };
const GENERAL = { rules: "Rules and alerts", tables: "Tables", sql: "SQL", health: "Health" };
const POLL_MS = 5000;

let tables = null; // name -> Table
let current = null;
let known = "";

async function refresh() {
  const found = (await get("/v1/tables")).tables;
  const text = JSON.stringify(found);
  if (text === known) return false;
  known = text;
  tables = new Map(found.map((each) => [each.name, new Table(each)]));
  return true;
}

const ofRole = (role) => [...tables.values()].filter((table) => table.role === role);

function showViews() {
  const roles = Object.keys(ROLES).filter((role) => ofRole(role).length);
  const entry = (view, text) => el("li", {}, el("a", {
    href: link(view), "data-key": view, ...(isAt(view) ? { "aria-current": "page" } : {}),
  }, text));
  fill($("views"), ...roles.map((role) => entry(role, ROLES[role])), roles.length ? el("li", { class: "gap", "aria-hidden": "true" }) : null,
    ...Object.entries(GENERAL).map(([view, text]) => entry(view, text)));
  const now = $("views").querySelector("[aria-current]");
  $("views").parentNode.scrollLeft = now ? now.offsetLeft - 40 : 0; // on a phone the list scrolls
}

const isAt = (view) => place.view === view || (view === "traces" && place.view === "trace") || (view === "tables" && place.view === "table");

function show(moved) {
  const used = document.activeElement?.dataset.key;
  current?.close();
  current = null;
  const main = $("main");
  shell.trouble(null);
  shell.snapshot(null);
  main.classList.remove("stale");
  main.setAttribute("aria-busy", "true");
  document.body.classList.toggle("past", place.asOf !== null);
  $("past").hidden = place.asOf === null;
  if (place.asOf !== null) put($("past-when"), `${clock(place.asOf, { seconds: true, day: true })} UTC.`);
  showViews();
  shell.status("wait", "loading");
  const named = (kind) => tables.get(place.name) ?? (kind && ofRole(kind)[0]);
  if (place.asOf !== null && Number.isNaN(Date.parse(place.asOf))) {
    fill(main);
    return shell.failed({ status: 400, message: `"${place.asOf}" is no moment: go back to live, and choose one` });
  }
  try {
    current = opened(main, named);
  } catch (error) {
    console.error(error);
    shell.failed({ status: 1, message: `the console failed: ${error.message}` });
  }
  const heading = main.querySelector("h1");
  document.title = `${heading?.textContent ?? "kivi"} · kivi`;
  const again = used === undefined ? null : main.querySelector(`[data-key="${CSS.escape(used)}"]`);
  if (again) again.focus({ preventScroll: true });
  else if (moved) (heading ?? main).focus({ preventScroll: true });
}

function opened(main, named) {
  const context = { main, tables, ofRole };
  if (place.view in ROLES && place.view !== "traces" && named(place.view)) return openAggregate(context, named(place.view), ROLES[place.view]);
  if (place.view === "traces" && ofRole("traces").length) return openTraces(context);
  if (place.view === "trace" && place.name) return openTrace(context, place.name);
  if (place.view === "table" && tables.has(place.name)) return openTable(context, tables.get(place.name));
  if (place.view === "rules") return openRules(context);
  if (place.view === "sql") return openSql(context);
  if (place.view === "health") return openHealth(context);
  return openTables(context);
}

function route(moved = true) {
  read();
  if (!place.view) {
    const first = Object.keys(ROLES).find((role) => role !== "traces" && ofRole(role).length) ?? "tables";
    history.replaceState(null, "", link(first));
    read();
  }
  show(moved);
}

async function begin() {
  for (;;) {
    try {
      await refresh();
      break;
    } catch (error) {
      if (!error.passes) return shell.failed(error);
      shell.status("bad", "reconnecting");
      shell.trouble(`${error.message}; trying again`);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  $("token").hidden = !token.get();
  route(false);
}

// Tables come and go: the list of views follows, and a view whose table was made anew.
setInterval(async () => {
  if (tables === null || document.hidden) return;
  try {
    const before = tables;
    if (await refresh()) {
      const own = place.name || null;
      if (before.size === 0 || JSON.stringify(before.get(own)) !== JSON.stringify(tables.get(own)) || !current) route(false);
      else if (place.view === "tables") show(false);
      else showViews();
    }
  } catch { /* the view itself says so */ }
}, POLL_MS);

// A page that the browser keeps, to go back to, would keep its stream, too; an origin has six connections.
addEventListener("pagehide", () => { current?.close(); current = null; });
addEventListener("pageshow", (event) => { if (event.persisted && tables !== null) route(false); });
addEventListener("hashchange", () => { if (tables !== null && location.hash.startsWith("#/")) route(); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
$("to-live").addEventListener("click", () => go(here({ asOf: null })));
$("token").addEventListener("click", () => shell.askToken("Another token may see other tables."));
$("token-cancel").addEventListener("click", () => $("token-dialog").close());
$("token-form").addEventListener("submit", () => {
  token.set($("token-input").value.trim());
  $("token-input").value = "";
  known = "";
  begin();
});

begin();
