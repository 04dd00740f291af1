// Charts as SVG, drawn by hand: lines with gaps where a slot has no events, or bars stacked by series.
"use strict";

const charts = (() => {
  const NS = "http://www.w3.org/2000/svg";

  function make(name, attributes, parent, text) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }

  // Steps of 1, 2 or 5 times a power of ten, from 0 to at least `top`.
  function ticks(top, wanted) {
    const raw = Math.max(top, 1e-9) / wanted;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
    const found = [];
    for (let n = 0; n * step < top + step * 0.999; n++) found.push(n * step);
    return found;
  }

  const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

  // `us` since 1970 -> 17:55:03; with hours and minutes only where slots are whole minutes. UTC, as in the store.
  function clock(us, widthUs) {
    const text = new Date(us / 1000).toISOString();
    return widthUs && widthUs % 60e6 === 0 ? text.slice(11, 16) : text.slice(11, 19);
  }

  // series: [{name, color, points: Map(slot -> value)}]; kind: "line" or "bars"
  function draw(box, { series, widthUs, kind, label, format }) {
    const slots = [...new Set(series.flatMap((s) => [...s.points.keys()]))].sort((a, b) => a - b);
    box.replaceChildren();
    if (!slots.length) {
      const none = document.createElement("p");
      none.className = "none";
      none.textContent = "nothing to show yet";
      box.append(none);
      return;
    }
    const w = box.clientWidth || 400, h = box.clientHeight || 220;
    const left = 44, right = 12, top = 10, bottom = 24;
    const first = slots[0], last = slots[slots.length - 1];
    const count = Math.round((last - first) / widthUs) + 1;
    const total = (slot) => series.reduce((sum, s) => sum + (s.points.get(slot) ?? 0), 0);
    const highest = kind === "bars" ? Math.max(...slots.map(total)) : Math.max(...series.flatMap((s) => [...s.points.values()]));
    const marks = ticks(highest, h < 200 ? 3 : 4);
    const max = marks[marks.length - 1] || 1;
    const step = (w - left - right) / count;
    const x = (slot) => left + ((slot - first) / widthUs + 0.5) * step;
    const y = (value) => h - bottom - (value / max) * (h - top - bottom);

    const svg = make("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": label }, box);
    for (const mark of marks) {
      make("line", { x1: left, x2: w - right, y1: y(mark), y2: y(mark), class: mark ? "grid" : "axis" }, svg);
      make("text", { x: left - 7, y: y(mark) + 4, "text-anchor": "end" }, svg, short.format(mark));
    }
    const every = Math.max(1, Math.ceil(count / Math.max(1, Math.floor((w - left - right) / 74))));
    for (let n = 0; n < count; n += every) {
      const slot = first + n * widthUs;
      make("text", { x: x(slot), y: h - 6, "text-anchor": "middle" }, svg, clock(slot, widthUs));
    }
    if (kind === "bars") drawBars(svg, series, slots, x, y, step);
    else for (const one of series) drawLine(svg, one, widthUs, x, y);
    point(box, svg, { series, slots, x, w, h, top, bottom, widthUs, format });
  }

  function drawBars(svg, series, slots, x, y, step) {
    const wide = Math.max(2, Math.min(34, step * 0.72));
    for (const slot of slots) {
      let below = 0;
      for (const one of series) {
        const value = one.points.get(slot);
        if (!value) continue;
        const up = y(below + value), down = y(below);
        make("rect", { x: x(slot) - wide / 2, y: up, width: wide, height: Math.max(0.5, down - up - (below ? 1 : 0)), fill: one.color, rx: 1.5 }, svg);
        below += value;
      }
    }
  }

  function drawLine(svg, one, widthUs, x, y) {
    let path = "", before = null;
    for (const [slot, value] of one.points) {
      path += `${before !== null && slot - before === widthUs ? "L" : "M"}${x(slot).toFixed(1)} ${y(value).toFixed(1)}`;
      before = slot;
    }
    make("path", { d: path, fill: "none", stroke: one.color, "stroke-width": 2.2, "stroke-linejoin": "round" }, svg);
    if (one.points.size <= 40) {
      for (const [slot, value] of one.points) make("circle", { cx: x(slot), cy: y(value), r: 3, fill: one.color }, svg);
    }
  }

  // What is under the pointer: a line at the slot, and its values.
  function point(box, svg, { series, slots, x, w, h, top, bottom, widthUs, format }) {
    const cross = make("line", { y1: top, y2: h - bottom, class: "cross", visibility: "hidden" }, svg);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    box.append(tip);
    const show = (clientX) => {
      box.pointed = clientX;
      const area = svg.getBoundingClientRect();
      const at = ((clientX - area.left) / area.width) * w;
      const slot = slots.reduce((best, s) => (Math.abs(x(s) - at) < Math.abs(x(best) - at) ? s : best));
      cross.setAttribute("x1", x(slot));
      cross.setAttribute("x2", x(slot));
      cross.setAttribute("visibility", "visible");
      const head = document.createElement("b");
      head.textContent = clock(slot, widthUs);
      tip.replaceChildren(head);
      for (const one of series) {
        const value = one.points.get(slot);
        if (value === undefined) continue;
        const row = document.createElement("div"), name = document.createElement("span"), number = document.createElement("b");
        const key = document.createElement("i");
        key.className = "key";
        key.style.color = one.color;
        name.append(key, one.name);
        number.textContent = format(value);
        row.append(name, number);
        tip.append(row);
      }
      tip.hidden = false;
      const room = x(slot) + 14 + tip.offsetWidth < w;
      tip.style.left = `${room ? x(slot) + 12 : Math.max(0, x(slot) - 12 - tip.offsetWidth)}px`;
    };
    if (box.pointed !== undefined) show(box.pointed); // drawn anew under the pointer
    svg.addEventListener("pointermove", (event) => show(event.clientX));
    svg.addEventListener("pointerleave", () => {
      if (!svg.isConnected) return;
      box.pointed = undefined;
      tip.hidden = true;
      cross.setAttribute("visibility", "hidden");
    });
  }

  return { draw, clock };
})();
