// Made by generate.py from the server's description of its routes: not to be edited.

/** A value of a row. Times are ISO 8601 in UTC, bytes 0x and hexadecimal; decimals, and whole numbers beyond
 * 2^53 - 1, are text. */
export type Value = null | boolean | number | string | Value[] | { [name: string]: Value };
export type Row = Record<string, Value>;

/** The parameters of GET /v1/tables/{table}/rows: a table's rows. */
export interface RowsQuery {
  /** The whole key of one row, one parameter a column. */
  key?: string[];
  /** The first key columns, one parameter each; null is null, and 'null' in quotes the text. */
  prefix?: string[];
  /** Of the time, inclusive: milliseconds since 1970, or ISO 8601. */
  from?: string;
  /** Of the time, exclusive. */
  to?: string;
  /** Slots of so long, such as 1h. */
  step?: string;
  /** Combined to these key columns. */
  by?: string;
  /** The time up to the end of the newest slot, such as 15m. */
  last?: string;
  /** The time zone of step. */
  tz?: string;
  /** Names with commas. */
  columns?: string;
  /** A predicate, such as resp_time_us > 1000. */
  where?: string;
  /** Columns with commas, -x from the largest down. */
  order_by?: string;
  /** Rows at most. */
  limit?: number;
  /** A commit timestamp, or a moment in ISO 8601. */
  as_of?: string;
  /** A commit timestamp that the snapshot has to have. */
  min_snapshot?: number;
}

/** The parameters of GET /v1/live: follows a table's rows, or events, as server-sent events. */
export interface LiveQuery {
  /** The table; required without of. */
  table: string;
  /** The first key columns, one parameter each; null is null, and 'null' in quotes the text. */
  prefix?: string[];
  /** Of the time, inclusive: milliseconds since 1970, or ISO 8601. */
  from?: string;
  /** Of the time, exclusive. */
  to?: string;
  /** Slots of so long, such as 1h. */
  step?: string;
  /** Combined to these key columns. */
  by?: string;
  /** The time zone of step. */
  tz?: string;
  /** Names with commas. */
  columns?: string;
  /** A predicate, such as resp_time_us > 1000. */
  where?: string;
  /** Columns with commas, -x from the largest down. */
  order_by?: string;
  /** Rows at most. */
  limit?: number;
  /** The first row that is followed. */
  offset?: number;
  /** A range that moves with the newest slot, such as 15m. */
  last?: string;
  /** Of events: those after this commit timestamp, or now. */
  since?: string;
  /** At most one event in each. */
  interval_ms?: number;
}

/** The body of POST /v1/query: a question. */
export interface Query {
  table: string;
  start?: string | number;
  end?: string | number;
  where?: string;
  group_by?: string | string[];
  measures?: Record<string, string>;
  derived?: Record<string, string>;
  having?: string;
  order_by?: string | string[];
  limit?: number;
  offset?: number;
  columns?: string | string[];
  size?: string;
  slide?: string;
  session?: string;
  tz?: string;
  explain?: boolean;
  as_of?: string | number;
  min_snapshot?: number;
}

/** The body of POST /v1/sql: a question in sql. */
export interface Sql {
  sql: string;
  parameters?: Value[] | Row;
  as_of?: string | number;
  min_snapshot?: number;
}

/** An answer, at the snapshot that it names. `more`: it was cut at a limit. */
export interface Rows {
  snapshot: number;
  more: boolean;
  rows: Row[];
  types?: Record<string, string>;
  explanation?: string;
}

/** What the server says of a request that failed. */
export interface Failure {
  error: string;
  reason: string;
  details?: Row;
}
