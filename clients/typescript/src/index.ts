/**
 * Reads and live queries of kivi over HTTP, in browsers and in Node 18 and later; it depends on nothing else.
 *
 *     const db = new Kivi("http://localhost:7421", { token });
 *     const { rows, snapshot } = await db.rows("endpoint_5m", { prefix: ["251"], limit: 10 });
 *     for await (const state of db.live({ table: "endpoint_5m", order_by: "-p99_us", limit: 10 })) show(state.rows);
 *
 * Every answer names the snapshot that it is of; `minSnapshot` of a client keeps reads from going back behind one. Whole
 * numbers that JavaScript's numbers do not hold, beyond 2^53 - 1, come as texts, as decimals do: `BigInt(value)` takes both.
 */

import type { Failure, LiveQuery, Query, Row, Rows, RowsQuery, Sql, Value } from "./api";

export type { LiveQuery, Query, Row, Rows, RowsQuery, Sql, Value } from "./api";

export interface Options {
  /** The access token, where the server has a token file. */
  token?: string;
  /** Milliseconds that a call waits for its answer; 30,000 if nothing is said. */
  timeoutMs?: number;
}

/** What the server refused, or could not do. `reason` is the name of the error, such as "NotFound". */
export class KiviError extends Error {
  constructor(
    readonly status: number,
    readonly reason: string,
    message: string,
    readonly details: Row = {},
    /** Seconds after which it may be tried again, where the server says so. */
    readonly retryAfter?: number,
  ) {
    super(message);
    this.name = "KiviError";
  }
}

/** A state of rows that is followed, as of a snapshot: what the query gives there. */
export interface State {
  snapshot: number;
  rows: readonly Row[];
}

/** Events that came after those before, in commit order. */
export interface Events {
  snapshot: number;
  events: readonly Row[];
}

interface Change {
  kind: "add" | "remove" | "move" | "change";
  old: number | null;
  new: number | null;
  row: Row;
}

interface Update {
  snapshot: number;
  reset: boolean;
  changes: Change[];
}

interface Message {
  kind: string;
  id: string;
  data: string;
}

const AGAIN_MS = 500;
/** Of an Accept header: whole numbers that no double holds are to be texts. */
const EXACT = ";integers=text";

export class Kivi {
  private readonly base: string;
  /** The newest snapshot that this client has seen. Reads without `as_of` are not older. */
  minSnapshot = 0;

  constructor(url: string, private readonly options: Options = {}) {
    this.base = url.replace(/\/+$/, "");
  }

  /** Definitions of all tables that the token may read. */
  async tables(): Promise<Row[]> {
    return (await this.get("/v1/tables")).tables as Row[];
  }

  /** A table's definition and statistics. */
  async describe(table: string): Promise<Row> {
    return this.get(`/v1/tables/${encodeURIComponent(table)}`);
  }

  /** A table's rows, in key order, or combined to `by` and `step`. */
  async rows(table: string, query: RowsQuery = {}): Promise<Rows> {
    return this.seen(await this.get(`/v1/tables/${encodeURIComponent(table)}/rows?${parameters(this.since(query))}`));
  }

  /** Measures of events, in groups and windows. */
  async query(query: Query): Promise<Rows> {
    return this.seen(await this.post("/v1/query", this.since(query)));
  }

  /** A question in SQL. */
  async sql(sql: string, given: Omit<Sql, "sql"> = {}): Promise<Rows> {
    return this.seen(await this.post("/v1/sql", this.since({ sql, ...given })));
  }

  /**
   * The rows of a query, first as they are and then whenever they change. A connection that is lost is made again, and
   * goes on where it was. Ends with `signal`, or by leaving the loop; throws KiviError where the server ends it.
   */
  async *live(query: LiveQuery, signal?: AbortSignal): AsyncGenerator<State, void, undefined> {
    let rows: Row[] = [];
    for await (const update of this.updates(query, signal)) {
      rows = applied(update.reset ? [] : rows, update.changes);
      yield { snapshot: update.snapshot, rows };
    }
  }

  /** The events of an event table as they come, each once: since a commit timestamp, from "now" on, or all. */
  async *events(query: LiveQuery, signal?: AbortSignal): AsyncGenerator<Events, void, undefined> {
    for await (const update of this.updates(query, signal)) {
      yield { snapshot: update.snapshot, events: update.changes.map((change) => change.row) };
    }
  }

  private async *updates(query: LiveQuery, signal?: AbortSignal): AsyncGenerator<Update, void, undefined> {
    const url = `${this.base}/v1/live?${parameters(query)}`;
    let last = "";
    let connected = false;
    while (!signal?.aborted) {
      try {
        const headers = this.headers({ Accept: `text/event-stream${EXACT}`, ...(last ? { "Last-Event-ID": last } : {}) });
        const reply = await fetch(url, { headers, ...(signal ? { signal } : {}) });
        if (!reply.ok) throw await failure(reply);
        connected = true;
        for await (const message of messages(reply)) {
          if (message.kind === "error") {
            const said = JSON.parse(message.data) as Failure;
            throw new KiviError(reply.status, said.reason, said.error, said.details);
          }
          last = message.id || last;
          if (message.data) {
            const update = JSON.parse(message.data) as Update;
            this.minSnapshot = Math.max(this.minSnapshot, update.snapshot);
            yield update;
          }
        }
      } catch (error) {
        const passes = error instanceof KiviError ? error.status === 503 || error.reason === "Unavailable" : connected;
        if (signal?.aborted) return;
        if (!passes) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  private since<Q extends RowsQuery | Query | Sql>(query: Q): Q {
    if (!this.minSnapshot || query.as_of !== undefined || query.min_snapshot !== undefined) return query;
    return { ...query, min_snapshot: this.minSnapshot };
  }

  private seen(answer: Row): Rows {
    const rows = answer as unknown as Rows;
    this.minSnapshot = Math.max(this.minSnapshot, rows.snapshot);
    return rows;
  }

  private headers(more: Record<string, string> = {}): Record<string, string> {
    return this.options.token ? { Authorization: `Bearer ${this.options.token}`, ...more } : more;
  }

  private get(path: string): Promise<Row> {
    return this.ask(path, {});
  }

  private post(path: string, body: object): Promise<Row> {
    return this.ask(path, { method: "POST", body: JSON.stringify(body) }, { "Content-Type": "application/json" });
  }

  private async ask(path: string, init: RequestInit, headers: Record<string, string> = {}): Promise<Row> {
    const stop = new AbortController();
    const timer = setTimeout(() => stop.abort(), this.options.timeoutMs ?? 30_000);
    try {
      const reply = await fetch(this.base + path, {
        ...init,
        headers: this.headers({ Accept: `application/json${EXACT}`, ...headers }),
        signal: stop.signal,
      });
      if (!reply.ok) throw await failure(reply);
      return (await reply.json()) as Row;
    } finally {
      clearTimeout(timer);
    }
  }
}

function parameters(query: object): string {
  const out = new URLSearchParams();
  for (const [name, value] of Object.entries(query) as [string, Value | undefined][]) {
    if (value === undefined || value === null) continue;
    for (const each of Array.isArray(value) ? value : [value]) out.append(name, String(each));
  }
  return out.toString();
}

async function failure(reply: Response): Promise<KiviError> {
  const text = await reply.text();
  const after = reply.headers.get("Retry-After");
  let said: Failure = { error: text || reply.statusText, reason: "Unknown" };
  try {
    said = JSON.parse(text) as Failure;
  } catch {
    // what stands between the client and kivi answers in a form of its own
  }
  return new KiviError(reply.status, said.reason, said.error, said.details, after === null ? undefined : Number(after));
}

/** The messages of a stream of server-sent events, as they come. */
async function* messages(reply: Response): AsyncGenerator<Message, void, undefined> {
  if (!reply.body) return;
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        yield message(text.slice(0, end));
        text = text.slice(end + 2);
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

function message(block: string): Message {
  const found: Message = { kind: "", id: "", data: "" };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    const value = line.slice(colon + 1).replace(/^ /, "");
    switch (line.slice(0, colon)) {
      case "event":
        found.kind = value;
        break;
      case "id":
        found.id = value;
        break;
      case "data":
        found.data += value;
    }
  }
  return found;
}

/** The rows after these changes: what went is left out, what came is put in its place, what changed is changed. */
function applied(rows: readonly Row[], changes: readonly Change[]): Row[] {
  const gone = new Set(changes.filter(({ kind }) => kind === "remove" || kind === "move").map((change) => change.old));
  const out = rows.filter((_, i) => !gone.has(i));
  for (const change of changes) {
    if (change.new !== null && (change.kind === "add" || change.kind === "move")) out.splice(change.new, 0, change.row);
  }
  for (const change of changes) {
    if (change.new !== null && change.kind === "change") out[change.new] = change.row;
  }
  return out;
}
