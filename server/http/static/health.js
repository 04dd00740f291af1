// The store's own health: what it counts, and how that goes.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { heading } from "./controls.js";
import { el, fill } from "./dom.js";
import { bytes, count, percent, short } from "./format.js";
import { Grid } from "./grid.js";
import { polling, read } from "./shell.js";

const POLL_MS = 1000;
const KEPT = 300;

export function openHealth({ main }) {
  const tiles = el("section", { class: "tiles", "aria-label": "Health" });
  const line = (name, heading_, kind = "number", color = 0) => new Chart(heading_, [{ name, title: "", kind, color }]);
  const charts = [line("commits", "Commits a second"), line("pending", "Pending in memory", "size", 2), line("reads", "Snapshots open", "number", 3)];
  const grid = new Grid("All numbers", [{ name: "name", kind: "text", isKey: true, wide: true, text: (row) => row.name }, { name: "value", kind: "number" }, { name: "rate", kind: "number", title: "a second" }],
    { what: "numbers", key: (row) => row.name, sort: { name: "name", down: false } });
  fill(main, heading([["Health", null]]), tiles, el("div", { class: "charts" }, ...charts.map((chart) => chart.node)), grid.node);
  const tile = (name, value, note = "", bad = false) => el("div", { class: "tile" }, el("h2", {}, name), el("p", {}, el("span", { class: bad ? "hot" : "" }, value), el("small", { class: "change" }, note)));
  const history = [];
  let before = null;

  async function look() {
    const said = await get("/v1/stats");
    const now = performance.now(), s = said.stats;
    const rate = (name) => (before === null || s[name] === undefined ? null : (s[name] - (before.stats[name] ?? 0)) / ((now - before.at) / 1000));
    history.push({ at: new Date(Math.floor(Date.now() / POLL_MS) * POLL_MS).toISOString(), commits: rate("commits"), pending: s.pending_bytes, reads: s.leases });
    if (history.length > KEPT) history.shift();
    const used = s.disk_size_bytes ? 1 - s.disk_free_bytes / s.disk_size_bytes : null;
    const wrong = s.disk_full ? "the disk is full" : s.storage_failing ? "storage fails" : s.log_failed ? "the log failed" : "";
    fill(tiles,
      tile("State", wrong || "well", `kivi ${said.version}`, wrong !== ""),
      tile("Commits", rate("commits") === null ? "–" : count(Math.round(rate("commits"))), "a second"),
      tile("Conflicts", count(s.aborts_conflict ?? 0), "refused so far"),
      tile("Behind", count(s.watermark_lag ?? 0), "commits not seen yet"),
      tile("Log", bytes(s.log_log_bytes), s.log_segments === 1 ? "1 segment" : `${count(s.log_segments ?? 0)} segments`),
      tile("To settle", short(s.settling ?? 0), "events"),
      ...(used === null ? [] : [tile("Disk", bytes(s.disk_free_bytes), `free, ${percent(used)} used`, used > 0.9)]));
    for (const chart of charts) chart.update(history.filter((each) => each.commits !== null), null, "at", POLL_MS);
    grid.update(Object.entries(s).filter(([, value]) => typeof value === "number").map(([name, value]) => ({ name, value, rate: rate(name) })));
    before = { at: now, stats: s };
    read(said.snapshot);
  }
  const end = polling(look, POLL_MS);
  return { close() { end(); for (const each of charts) each.close(); grid.close(); } };
}
