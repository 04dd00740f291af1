// Requests under the token that the user has typed, and streams that come back by themselves. Numbers are doubles here, so
// whole numbers that none holds are asked for as texts, as which decimals come.

const KEY = "kivi-token";
const AGAIN_MS = [500, 1000, 2000, 4000];

export class ApiError extends Error {
  constructor(status, reason, message) {
    super(message);
    this.status = status;
    this.reason = reason;
  }

  // Whether it may be otherwise in a moment.
  get passes() {
    return this.status === 0 || this.status === 429 || this.status >= 500 || AGAIN.has(this.reason);
  }
}

const AGAIN = new Set(["Unavailable", "SnapshotTooOld", "ResourceExhausted"]);

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

async function send(path, options = {}) {
  const headers = { ...options.headers, Accept: `${options.headers?.Accept ?? "application/json"};integers=text` };
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-cache" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "Unavailable", "the server cannot be reached");
  }
  if (answer.ok) return answer;
  let said = {};
  try {
    said = await answer.json();
  } catch { /* of a proxy in between */ }
  throw new ApiError(answer.status, said.reason ?? "", said.error ?? `the server answered ${answer.status}`);
}

// Parameters by name; those that are lists come several times, those that are null not at all.
export function query(parameters) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) if (each !== null && each !== undefined) found.append(name, each);
  }
  return found.toString();
}

export const get = async (path, signal) => (await send(path, { signal })).json();

// The snapshot that an answer is of, which its header names.
export const snapshotOf = async (path) => Number((await send(path)).headers.get("X-Kivi-Snapshot"));

export const post = async (path, body, signal) =>
  (await send(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal })).json();

// Follows several queries as one stream, and goes on through every failure that passes. `on`: begun(), told(part, id,
// data or null), lost(error) for a failure that passes, failed(error) for one that ends it. Returns how to end it.
export function follow(queries, on) {
  const ending = new AbortController();
  (async () => {
    for (let failures = 0; ; failures += 1) {
      try {
        const path = `/v1/live?${query({ of: queries.map(query) })}`;
        const answer = await send(path, { signal: ending.signal, headers: { Accept: "text/event-stream" } });
        on.begun();
        for await (const event of events(answer.body)) {
          failures = 0;
          if (event.name === "error") {
            const said = JSON.parse(event.data);
            const status = { Unauthenticated: 401, PermissionDenied: 403 }[said.reason] ?? (AGAIN.has(said.reason) ? 503 : 400);
            throw new ApiError(status, said.reason, said.error);
          }
          if (event.name.startsWith("part")) on.told(Number(event.name.slice(4)), Number(event.id), event.data ? JSON.parse(event.data) : null);
        }
        throw new ApiError(0, "Unavailable", "the server ended the stream");
      } catch (error) {
        if (ending.signal.aborted) return;
        const known = error instanceof ApiError ? error : new ApiError(0, "Unavailable", "the connection was lost");
        if (!known.passes) return on.failed(known);
        on.lost(known);
        await new Promise((resolve) => setTimeout(resolve, AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]));
        if (ending.signal.aborted) return;
      }
    }
  })();
  return () => ending.abort();
}

// Server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const end = value.lastIndexOf("\n\n");
    if (end < 0 && !(kept.length && kept.at(-1).endsWith("\n") && value.startsWith("\n"))) {
      kept.push(value); // a large event comes in many pieces: they are joined once
      continue;
    }
    const texts = (kept.join("") + value).split("\n\n");
    kept = [texts.pop()];
    for (const text of texts) {
      const event = { name: "message", id: "", data: "" };
      for (const line of text.split("\n")) {
        const cut = line.indexOf(": ");
        const field = line.slice(0, cut), rest = line.slice(cut + 2);
        if (field === "event") event.name = rest;
        else if (field === "id") event.id = rest;
        else if (field === "data") event.data = rest;
      }
      yield event;
    }
  }
}
