// A view's state, pushed: server-sent events from /api/live. Asks for nothing again while the stream lives.
"use strict";

const SILENT_MS = 5000; // the stream says something every second
const AGAIN_MS = 1500;

// Names are anybody's, "__proto__" too: what is set is always a property of the object itself.
const own = (object, name, value) =>
  Object.defineProperty(object, name, { value, writable: true, enumerable: true, configurable: true });

class Live {
  // told(): the state, what of it changed ({section: Set of names}, or null for all), and about = {ts, age_ms, problem}
  // lost(text, final): no stream, or none with news; it goes on trying, unless that is final
  constructor(query, told, lost) {
    Object.assign(this, { query, told, lost, state: null });
    this.watch = setInterval(() => {
      if (performance.now() - this.heard > SILENT_MS) {
        this.lost("the dashboard's server is silent");
        this.open();
      }
    }, 1000);
    this.open();
  }

  open() {
    this.source?.close();
    clearTimeout(this.again);
    this.heard = performance.now();
    const source = (this.source = new EventSource(`/api/live?${this.query}`));
    const on = (kind, take) => source.addEventListener(kind, (event) => {
      this.heard = performance.now();
      const cut = event.data.indexOf("\n");
      const changed = take(JSON.parse(event.data.slice(cut + 1)));
      if (this.state) this.told(this.state, changed, JSON.parse(event.data.slice(0, cut)));
    });
    on("state", (state) => {
      this.state = state;
      return null;
    });
    on("change", (change) => this.merge(change));
    on("fresh", () => ({}));
    source.addEventListener("fresh", (event) => {
      const { problem } = JSON.parse(event.data.slice(0, event.data.indexOf("\n")));
      if (!this.state && problem) this.lost(problem);
    });
    source.addEventListener("error", () => {
      if (source !== this.source) return;
      if (source.readyState === EventSource.CLOSED) this.refused();
      else this.lost("the dashboard's server cannot be reached");
    });
  }

  merge({ set, gone }) {
    const changed = {};
    for (const [section, values] of Object.entries(set)) {
      for (const [name, value] of Object.entries(values)) own(this.state[section], name, value);
      changed[section] = new Set(Object.keys(values));
    }
    for (const [section, names] of Object.entries(gone)) {
      changed[section] ??= new Set();
      for (const name of names) {
        delete this.state[section][name];
        changed[section].add(name);
      }
    }
    return changed;
  }

  // An answer that is no stream: it says why, as JSON.
  async refused() {
    let text = "the dashboard's server cannot be reached", final = false;
    try {
      const answer = await fetch(`/api/view?${this.query}`);
      if (!answer.ok) text = (await answer.json()).error;
      final = answer.status === 400; // asked again it would say the same
    } catch { /* it is away again */ }
    if (this.closed) return;
    if (final) clearInterval(this.watch);
    else this.again = setTimeout(() => this.open(), AGAIN_MS);
    this.lost(text, final);
  }

  close() {
    this.closed = true;
    clearInterval(this.watch);
    clearTimeout(this.again);
    this.source.close();
  }
}
