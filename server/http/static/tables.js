// Definitions of tables, as the page needs them.

import { kindOf, microseconds } from "./format.js";

const MEASURE = /^(?!(?:decimal|list|top|quantiles)\()\w+\((.*)\)$/;
const plainType = (declared) => MEASURE.exec(declared)?.[1] ?? declared;

export const quoted = (text) => JSON.stringify(text);

export class Table {
  constructor(description) {
    const { measures: _, ...rest } = description;
    Object.assign(this, rest);
    const columns = { ...description.key, ...description.columns };
    this.types = Object.fromEntries(Object.entries(columns).map(([name, declared]) => [name, plainType(declared)]));
    for (const name of Object.keys(description.derived ?? {})) this.types[name] = "float64";
    const slots = (description.group_by ?? []).filter((group) => typeof group === "object");
    const slot = slots.at(-1);
    this.slot = slot?.name ?? null;
    this.slotUs = slot ? (slot.slot_us ?? microseconds(slot.slot)) : 0;
    this.slotText = slot && !slot.slot_us ? slot.slot : null; // by calendar: no multiples of it
    this.keys = Object.keys(description.key).filter((name) => !slots.some((group) => group.name === name));
    this.measures = Object.keys(this.types).filter((name) => !(name in description.key));
  }

  // Whether it can be read as of the past.
  get hasPast() {
    return this.kind === "event" || Boolean(this.history_us);
  }

  get isTimed() {
    return this.kind === "aggregate" && this.slot !== null;
  }

  kindOf(name) {
    return kindOf(name, this.types[name] ?? "string");
  }

  // The parameters that select rows by values of key columns: a prefix as far as there is one, which reads a range.
  selected(keys) {
    const prefix = [], rest = [];
    const names = Object.keys(this.key);
    let leading = true;
    for (const name of names) {
      leading &&= name in keys;
      if (leading) prefix.push(this.types[name] === "string" ? `'${keys[name]}'` : keys[name]);
      else if (name in keys) rest.push(`${name} == ${/^(int64|float64|bool)/.test(this.types[name]) ? keys[name] : quoted(keys[name])}`);
    }
    return { ...(prefix.length ? { prefix } : {}), ...(rest.length ? { where: rest.join(" & ") } : {}) };
  }
}
