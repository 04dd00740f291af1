// The bar above a view: the way to it, the range, a week ago, and as of when.

import { el } from "./dom.js";
import { go, here, place } from "./place.js";

export const RANGES = { "1m": 60e6, "5m": 300e6, "15m": 900e6, "1h": 3600e6, "6h": 6 * 3600e6, "24h": 86400e6, "7d": 7 * 86400e6, "30d": 30 * 86400e6 };
const NAMES = { "1m": "1 min", "5m": "5 min", "15m": "15 min", "1h": "1 h", "6h": "6 h", "24h": "24 h", "7d": "7 d", "30d": "30 d" };

const LEAST = 3; // slots in a range: of fewer there is nothing to see, and the newest of them is not over

// The ranges of a table with such slots, at least the longest one.
const rangesOf = (slotUs) => Object.keys(RANGES).filter((name) => RANGES[name] >= LEAST * slotUs || name === "30d");

// The range that is chosen, or the shortest of the table's where that is not among them.
export function effective(slotUs) {
  const ranges = rangesOf(slotUs);
  return ranges.includes(place.range) ? place.range : ranges[0];
}

// path: [[text, address or null], ...]
export function heading(path) {
  return el("nav", { "aria-label": "Drill-down", class: "path" }, el("ol", {}, ...path.map(([text, address], n) =>
    el("li", {}, n === path.length - 1 || address === null
      ? el("h1", { tabindex: "-1", "aria-current": n === path.length - 1 ? "page" : null }, text)
      : el("a", { href: address, "data-key": `step-${n}` }, text)))));
}

export function controls({ slotUs = 0, canCompare = false, hasRange = true, hasPast = true } = {}) {
  const ranges = rangesOf(slotUs), chosen = effective(slotUs);
  const moment = el("input", { id: "moment", type: "datetime-local", step: "1", required: true });
  if (place.asOf !== null) moment.value = new Date(place.asOf).toISOString().slice(0, 19);
  const form = el("form", { class: "as-of", onsubmit: (event) => { event.preventDefault(); go(here({ asOf: `${moment.value}Z` })); } },
    el("label", { for: "moment" }, "As of ", el("small", {}, "UTC")), moment, el("button", { type: "submit" }, "Show"));
  return el("div", { class: "choose" },
    hasRange ? el("fieldset", { class: "range" }, el("legend", { class: "hidden" }, "Range: the last"), ...ranges.map((name) => el("label", {},
      el("input", { type: "radio", name: "range", value: name, checked: name === chosen, "data-key": `range-${name}`, onchange: () => go(here({ range: name })) }),
      el("span", {}, NAMES[name])))) : null,
    canCompare ? el("label", { class: "check" }, el("input", { type: "checkbox", "data-key": "compare", checked: place.compare, onchange: (event) => go(here({ compare: event.target.checked })) }), "compare with a week ago") : null,
    hasPast || place.asOf !== null ? form : null);
}
