// States of several queries, of one snapshot: live, as they are pushed, or of the past.
//
// A part tells what its query gave at some snapshots, and up to which one that stayed so: a span. `together` finds the
// newest snapshot that lies in a span of every part; only there the rows of all parts belong together, and only that is
// shown, once in a frame.

import { follow, get, query } from "./api.js";

const SPANS = 24;

// The newest snapshot that lies in a span of each part, and their rows then; null if there is none.
export function together(parts) {
  const at = parts.map((spans) => spans.length - 1);
  if (at.some((n) => n < 0)) return null;
  let ts = Math.min(...parts.map((spans) => spans.at(-1).upto));
  for (;;) {
    let known = ts;
    for (const [part, spans] of parts.entries()) {
      while (at[part] >= 0 && spans[at[part]].ts > known) at[part] -= 1;
      if (at[part] < 0) return null;
      known = Math.min(known, spans[at[part]].upto);
    }
    if (known === ts) return { ts, rows: parts.map((spans, part) => spans[at[part]].rows) };
    ts = known;
  }
}

// A state after changes: see kivi.model.subscriptions. A new list, so that what was told before stays as it was.
export function applied(rows, { reset, changes }) {
  if (reset) return changes.map((change) => change.row);
  const gone = new Set();
  for (const { kind, old } of changes) if (kind === "remove" || kind === "move") gone.add(old);
  const out = gone.size ? rows.filter((_, n) => !gone.has(n)) : rows.slice();
  for (const { kind, new: n, row } of changes) if (kind === "add" || kind === "move") out.splice(n, 0, row);
  for (const { kind, new: n, row } of changes) if (kind === "change") out[n] = row;
  return out;
}

// Queries are the parameters of /v1/live; `slot` is the name of the column that `step` makes.
// `on`: shown(rows of each part, ts), fresh(ts) where only the snapshot moved on, begun, lost, failed as of `follow`.
export class Feed {
  constructor(queries, on) {
    this.on = on;
    this.parts = queries.map(() => []);
    this.shown = null;
    this.pending = 0;
    this.end = follow(queries.map(({ slot: _, ...parameters }) => parameters), {
      begun: () => {
        this.parts = queries.map(() => []); // another server, or another store: what was told before is of none
        on.begun?.();
      },
      told: (part, ts, update) => this.told(part, ts, update),
      lost: on.lost,
      failed: on.failed,
    });
  }

  told(part, ts, update) {
    const spans = this.parts[part], last = spans.at(-1);
    if (update === null) {
      if (last) last.upto = ts;
    } else {
      spans.push({ ts, upto: ts, rows: applied(last?.rows ?? [], update) });
      if (spans.length > SPANS) spans.shift();
    }
    if (!this.pending) this.pending = requestAnimationFrame(() => this.show());
  }

  show() {
    this.pending = 0;
    const found = together(this.parts);
    if (found === null) return;
    const isNew = this.shown === null || found.rows.some((rows, part) => rows !== this.shown[part]);
    this.shown = found.rows;
    if (isNew) this.on.shown(found.rows, found.ts);
    this.on.fresh(found.ts);
  }

  close() {
    cancelAnimationFrame(this.pending);
    this.pending = -1;
    this.end();
  }
}

// The same of the past: all parts at one snapshot, once.
export class Past {
  constructor(queries, asOf, on) {
    this.ending = new AbortController();
    this.read(queries, asOf, on);
  }

  async read(queries, asOf, on) {
    try {
      let ts = asOf;
      const rows = [];
      for (const each of queries) {
        const { table, interval_ms: _, slot, ...parameters } = each;
        if (parameters.by !== undefined && parameters.columns) {
          // A read gives the columns that it names, where a subscription gives those that tell its rows apart, too.
          parameters.columns = [parameters.by, parameters.step ? slot : "", parameters.columns].filter(Boolean).join(",");
        }
        const path = `/v1/tables/${encodeURIComponent(table)}/rows?${query({ limit: 100000, ...parameters, as_of: ts })}`;
        const answer = await get(path, this.ending.signal);
        ts = answer.snapshot;
        rows.push(answer.rows);
      }
      on.begun?.();
      on.shown(rows, ts);
      on.fresh(ts);
    } catch (error) {
      if (error.name !== "AbortError") on.failed(error);
    }
  }

  close() {
    this.ending.abort();
  }
}
