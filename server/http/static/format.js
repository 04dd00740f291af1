// Values as people read them. Times are UTC, as in the store.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const few = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const DASH = "–";

// Decimals come as texts, and so do whole numbers that no double holds: of these no digit is left out. Of other numbers
// none before the point is.
function exact(text) {
  const [, sign, digits, rest] = /^(-?)(\d+)(\.\d+)?$/.exec(text) ?? [];
  return digits === undefined ? text : `${sign}${whole.format(BigInt(digits))}${(rest ?? "").replace(/\.?0+$/, "")}`;
}
export const count = (n) => {
  if (n === null || n === undefined) return DASH;
  if (typeof n === "string") return exact(n);
  return (Number.isInteger(n) || Math.abs(n) >= 1000 ? whole : few).format(n);
};
export const short = (n) => (n === null || n === undefined ? DASH : compact.format(n));

// Microseconds.
export function duration(us) {
  if (us === null || us === undefined) return DASH;
  if (Math.abs(us) < 999.5) return `${whole.format(us)} µs`;
  const ms = us / 1000;
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${whole.format(ms)} ms`;
  if (ms < 59950) return `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;
  return `${(ms / 60000).toFixed(1)} min`;
}

export function percent(part) {
  if (part === null || part === undefined) return DASH;
  const value = 100 * part;
  // Some are never shown as none, nor most as all.
  if (value > 0 && value < 0.005) return "< 0.01 %";
  if (value > 99 && value < 100) return value < 99.95 ? `${value.toFixed(1)} %` : "> 99.9 %";
  return `${value === 0 ? "0" : value < 0.1 ? value.toFixed(2) : value < 10 ? value.toFixed(1) : whole.format(value)} %`;
}

export const bytes = (n) => {
  if (n === null || n === undefined) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; n >= 1024 && at < units.length - 1; at += 1) n /= 1024;
  return `${n >= 100 || at === 0 ? whole.format(n) : n.toFixed(1)} ${units[at]}`;
};

const two = (n) => String(n).padStart(2, "0");

// A moment, as text or in milliseconds: 14:05, with its day where that is not today.
export function clock(moment, { seconds = false, day = undefined } = {}) {
  const at = new Date(moment);
  if (Number.isNaN(at.getTime())) return String(moment);
  const time = `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}${seconds ? `:${two(at.getUTCSeconds())}` : ""}`;
  const date = at.toISOString().slice(0, 10);
  return (day ?? date !== new Date().toISOString().slice(0, 10)) ? `${date} ${time}` : time;
}

const dated = new Intl.DateTimeFormat("en", { month: "short", day: "numeric", timeZone: "UTC" });
// The day that begins then, as an axis has room for.
export const date = (moment) => dated.format(moment);

// So many in so many microseconds.
export function rate(n, us) {
  const [unit, each] = [["s", 1e6], ["min", 60e6], ["h", 3600e6]].find(([, size]) => (n * size) / us >= 0.1) ?? ["day", 86400e6];
  const found = (n * each) / us;
  return `${count(found >= 10 ? Math.round(found) : Number(found.toPrecision(2)))} /${unit}`;
}

// An endpoint; names of spans have their method.
export const withMethod = (method, name) => (!method || `${name} `.startsWith(`${method} `) ? name : `${method} ${name}`);

// How long a text of a duration like 5m, 1h is, in microseconds.
const UNITS = { us: 1, ms: 1e3, s: 1e6, m: 60e6, min: 60e6, h: 3600e6, d: 86400e6, w: 7 * 86400e6, month: 31 * 86400e6, quarter: 92 * 86400e6, year: 366 * 86400e6 };
export function microseconds(text) {
  const match = /^(\d+(?:\.\d+)?)\s*([a-z]+)$/.exec(text);
  return match && UNITS[match[2]] ? Number(match[1]) * UNITS[match[2]] : NaN;
}

export function width(us) {
  for (const [unit, size] of [["d", 86400e6], ["h", 3600e6], ["min", 60e6], ["s", 1e6], ["ms", 1e3]]) if (us % size === 0) return `${us / size} ${unit}`;
  return `${us} µs`;
}

// What a column's values are, by its name and type: how they are shown, sorted and drawn.
const TITLES = { error_rate: "error rate", apdex: "Apdex" };
export function kindOf(name, type) {
  if (/trace_id$/.test(name)) return "trace";
  if (type === "timestamp") return "time";
  if (/^(string|bytes|bool)/.test(type)) return type.startsWith("bytes") ? "bytes" : "text";
  if (/^(quantiles|list|top)/.test(type)) return "state";
  if (/_us$|^p\d+$/.test(name)) return /_us$/.test(name) ? "duration" : "number";
  if (/_rate$|_ratio$/.test(name)) return "percent";
  if (/_bytes$/.test(name)) return "size";
  if (name === "apdex") return "score";
  return "number";
}

export const title = (name) => TITLES[name] ?? name.replace(/_us$/, "").replace(/_trace_id$/, " trace").replace(/_/g, " ");

const SHOW = {
  duration, percent, number: count, size: bytes,
  score: (n) => (n === null || n === undefined ? DASH : Number(n).toFixed(2)),
  time: (moment) => (moment === null ? DASH : clock(moment, { seconds: true })),
  trace: (id) => (id ? String(id).replace(/^0x/, "").slice(0, 8) : DASH),
  bytes: (text) => (text === null ? DASH : text.length > 18 ? `${text.slice(0, 18)}…` : text),
  text: (text) => (text === null || text === undefined ? DASH : text === "" ? "(empty)" : String(text)),
  state: (value) => {
    if (value === null || value === undefined) return DASH;
    if (Array.isArray(value)) return value.map((each) => (Array.isArray(each) ? `${each[0] ?? "others"}: ${each[1]}` : each)).join(", ");
    return Object.entries(value).map(([name, each]) => `${name} ${short(each)}`).join(" · ");
  },
};
export const shown = (kind, value) => SHOW[kind](value);
export const isNumeric = (kind) => ["duration", "percent", "number", "size", "score"].includes(kind);
const ofAxis = (n) => (Math.abs(n) < 1 ? count(n) : short(n));
const ofTime = (us) => (us === 0 ? "0" : duration(us).replace(/\.0+ /, " "));
export const axis = (kind) => ({ duration: ofTime, percent, size: bytes, score: (n) => n.toFixed(1) })[kind] ?? ofAxis;
