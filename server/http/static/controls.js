// The bar above a view: the way to it, the range, a week ago, and as of when.

import { el } from "./dom.js";
import { go, here, place } from "./place.js";

export const RANGES = { "15m": 900e6, "1h": 3600e6, "6h": 6 * 3600e6, "24h": 86400e6, "7d": 7 * 86400e6, "30d": 30 * 86400e6 };
const NAMES = { "15m": "15 min", "1h": "1 h", "6h": "6 h", "24h": "24 h", "7d": "7 d", "30d": "30 d" };

// path: [[text, address or null], ...]; `slotUs`: ranges shorter than a slot make no sense.
export function heading(path) {
  return el("nav", { "aria-label": "Drill-down", class: "path" }, el("ol", {}, ...path.map(([text, address], n) =>
    el("li", {}, n === path.length - 1 || address === null
      ? el("h1", { tabindex: "-1", "aria-current": n === path.length - 1 ? "page" : null }, text)
      : el("a", { href: address, "data-key": `step-${n}` }, text)))));
}

export function controls({ slotUs = 0, canCompare = false, hasRange = true } = {}) {
  const ranges = Object.keys(RANGES).filter((name) => RANGES[name] >= slotUs);
  const moment = el("input", { id: "moment", type: "datetime-local", step: "1", required: true });
  if (place.asOf !== null) moment.value = new Date(place.asOf).toISOString().slice(0, 19);
  const form = el("form", { class: "as-of", onsubmit: (event) => { event.preventDefault(); go(here({ asOf: `${moment.value}Z` })); } },
    el("label", { for: "moment" }, "As of ", el("small", {}, "UTC")), moment, el("button", { type: "submit" }, "Show"));
  return el("div", { class: "choose" },
    hasRange ? el("fieldset", { class: "range" }, el("legend", { class: "hidden" }, "Range: the last"), ...ranges.map((name) => el("label", {},
      el("input", { type: "radio", name: "range", value: name, checked: name === place.range, "data-key": `range-${name}`, onchange: () => go(here({ range: name })) }),
      el("span", {}, NAMES[name])))) : null,
    canCompare ? el("label", { class: "check" }, el("input", { type: "checkbox", "data-key": "compare", checked: place.compare, onchange: (event) => go(here({ compare: event.target.checked })) }), "compare with a week ago") : null,
    form);
}

export const effective = (slotUs) => (RANGES[place.range] && RANGES[place.range] >= slotUs ? place.range : Object.keys(RANGES).find((name) => RANGES[name] >= slotUs) ?? "30d");
