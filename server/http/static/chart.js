// A chart over time: uPlot, with a legend that reads it out, by mouse and by keyboard (arrows, Home, End, Escape).

import uPlot from "./uPlot.esm.js";
import { el, put, unique } from "./dom.js";
import { axis, clock, date, shown } from "./format.js";

const HEIGHT = 176;
const LEAST = 8;
// Between the lines of an axis: 1, 2 and 5, up to a second, and what a minute, an hour and days are divided by.
const STEPS_US = [
  ...[1, 10, 100, 1e3, 1e4, 1e5].flatMap((each) => [each, 2 * each, 5 * each]),
  ...[1e6, 60e6].flatMap((each) => [each, 2 * each, 5 * each, 10 * each, 20 * each, 30 * each]),
  ...[1, 2, 6, 12].map((hours) => hours * 3600e6), ...Array.from({ length: 20 }, (_, n) => 2 ** n * 86400e6),
];
const FONT = '11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
const charts = new Set();
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.draw(true)));

// The places of values that no line leads to.
const isolated = (values) => [...values.keys()].filter((n) => values[n] !== null && [values[n - 1], values[n + 1]].every((each) => each === null || each === undefined));

export class Chart {
  // lines: [{name, title, kind, color: a number, bars}]
  constructor(heading, lines, note = "") {
    this.lines = lines;
    this.heading = heading;
    this.plot = null;
    this.compared = false;
    this.index = null;
    const id = unique("chart");
    this.note = el("small", {}, note);
    this.when = el("span", { class: "when" });
    this.values = lines.map(() => el("b", {}, "–"));
    this.before = lines.map(() => el("span", { class: "before" }));
    const legend = el("p", { class: "legend", "aria-live": "off" }, this.when, ...lines.map((line, n) =>
      el("span", { class: "entry" }, el("i", { class: `key s${line.color}`, "aria-hidden": "true" }), `${line.title} `, this.values[n], this.before[n])));
    this.legend = legend;
    this.area = el("div", {
      class: "plot", tabindex: "0", role: "group", "aria-labelledby": id, "aria-roledescription": "chart",
      onkeydown: (event) => this.key(event),
      onblur: () => this.point(null),
    });
    this.node = el("section", { class: "panel chart", "aria-labelledby": id },
      el("h2", { id }, heading, " ", this.note), legend, this.area);
    this.none = el("p", { class: "none", hidden: true }, "Nothing in this range.");
    this.node.append(this.none);
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(this.area);
    charts.add(this);
  }

  // rows: of the slots, in order; `before`: those of a week ago, or null. Slots without a row are gaps, or 0 of bars.
  // `least`: how many slots there is room for, which is the range.
  update(rows, before, slot, widthMs, { day = false, least = LEAST } = {}) {
    this.widthMs = widthMs;
    const times = new Map(rows.map((row) => [Date.parse(row[slot]), row]));
    const shift = 7 * 86400e3;
    const earlier = before === null ? null : new Map(before.map((row) => [Date.parse(row[slot]) + shift, row]));
    const all = [...times.keys(), ...(earlier === null ? [] : earlier.keys())].sort((a, b) => a - b);
    this.none.hidden = times.size > 0;
    this.area.hidden = times.size === 0;
    this.legend.hidden = times.size === 0;
    if (!times.size) return;
    const x = [];
    if (widthMs > 0 && (all.at(-1) - all[0]) / widthMs < 5000) for (let at = all[0]; at <= all.at(-1); at += widthMs) x.push(at);
    else x.push(...new Set(all));
    while (widthMs > 0 && x.length < Math.max(least, LEAST)) x.unshift(x[0] - widthMs); // what has just begun has room to come
    const first = Math.min(...times.keys());
    const values = (found, line) => x.map((at) => {
      const row = found.get(at);
      if (row === undefined) return line.bars && found === times && at >= first ? 0 : null;
      const value = row[line.name] ?? null;
      return value === null ? null : Number(value); // decimals come as texts
    });
    this.day = day;
    this.data = [x.map((at) => at / 1000), ...this.lines.map((line) => values(times, line)), ...(earlier === null ? [] : this.lines.map((line) => values(earlier, line)))];
    this.draw(this.compared !== (earlier !== null));
    this.compared = earlier !== null;
  }

  draw(anew) {
    if (!this.data) return;
    if (this.plot && !anew) this.plot.setData(this.data);
    else {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), this.data, this.area);
    }
    this.read();
  }

  options() {
    const [soft, grid] = [variable("--soft"), variable("--grid")];
    const format = axis(this.lines[0].kind);
    const line = (each, isBefore) => {
      const stroke = variable(`--s${each.color}`);
      return {
        label: each.title, stroke, width: isBefore ? 1.2 : 1.8, dash: isBefore ? [5, 4] : undefined, spanGaps: false,
        points: { show: false, filter: (plot, n) => (each.bars && !isBefore ? null : isolated(plot.data[n])), size: 5 },
        ...(each.bars && !isBefore ? { fill: `${stroke}a6`, width: 0, paths: uPlot.paths.bars({ size: [0.75, 40], align: 1 }) } : {}),
      };
    };
    const isCompared = this.data.length > this.lines.length + 1;
    return {
      width: Math.max(this.area.clientWidth, 120), height: HEIGHT, legend: { show: false },
      tzDate: (ts) => uPlot.tzDate(new Date(ts * 1000), "Etc/UTC"),
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      scales: { x: { time: true, range: (_, low, high) => [low, high + (this.widthMs > 0 ? this.widthMs / 1000 : 1)] }, y: { range: (_, __, high) => [0, high > 0 ? high * 1.08 : this.lines[0].kind === "size" ? 1024 : 1] } },
      axes: [
        { stroke: soft, grid: { show: false }, ticks: { stroke: grid, size: 4 }, font: FONT, size: 26, space: 64, values: (_, ticks) => ticks.map((at) => (this.day && at % 86400 === 0 ? date(at * 1000) : clock(at * 1000, { day: false, seconds: this.widthMs > 0 && this.widthMs < 60000 }))) },
        { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: FONT, gap: 6, space: 34, values: (_, ticks) => ticks.map(format),
          size: (_, texts) => Math.max(52, 12 + 7 * Math.max(0, ...(texts ?? []).map((each) => each.length))), ...(this.lines[0].kind === "duration" ? { incrs: STEPS_US } : {}) },
      ],
      series: [{}, ...this.lines.map((each) => line(each, false)), ...(isCompared ? this.lines.map((each) => line(each, true)) : [])],
      hooks: { setCursor: [(plot) => { this.index = plot.cursor.idx ?? null; this.read(); }] },
    };
  }

  // The values at the cursor, or of the newest slot.
  read() {
    const at = this.index ?? this.data[0].length - 1;
    put(this.when, `${clock(this.data[0][at] * 1000, { seconds: this.widthMs > 0 && this.widthMs < 60000 })} UTC`);
    for (const [n, line] of this.lines.entries()) {
      put(this.values[n], shown(line.kind, this.data[n + 1][at] ?? null));
      const before = this.data[n + 1 + this.lines.length]?.[at];
      put(this.before[n], before === undefined || before === null ? "" : ` (${shown(line.kind, before)})`);
    }
  }

  point(index) {
    if (!this.plot) return;
    this.legend.setAttribute("aria-live", index === null ? "off" : "polite");
    if (index === null) return this.plot.setCursor({ left: -10, top: -10 });
    this.plot.setCursor({ left: this.plot.valToPos(this.data[0][index], "x"), top: 20 });
  }

  key(event) {
    const last = (this.data?.[0].length ?? 0) - 1;
    const at = this.index ?? last + 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, PageUp: at - 12, PageDown: at + 12 }[event.key];
    if (event.key === "Escape") return this.point(null);
    if (to === undefined) return;
    event.preventDefault();
    this.point(Math.max(0, Math.min(last, to)));
  }

  resize() {
    if (this.plot && this.area.clientWidth) this.plot.setSize({ width: this.area.clientWidth, height: HEIGHT });
  }

  close() {
    charts.delete(this);
    this.watcher.disconnect();
    this.plot?.destroy();
  }
}
