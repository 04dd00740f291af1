// A table of any length: only the rows in sight are in the page. Sorted by its headers, filtered by a text.

import { el, put, unique } from "./dom.js";
import { count, isNumeric, shown, title } from "./format.js";

const ROW = 34;
const SPARE = 8;
const BOTH = 9.6; // rem: two numbers have room, as in console.css

// columns: [{name, kind, title?, value?(row), text?(row), href?(row), wide?, isKey?, isNumber?, isBoth?}]; `key(row)`: what tells rows apart.
export class Grid {
  constructor(label, columns, { key = null, sort = null, empty = "Nothing here.", what = "rows", hasFilter = true } = {}) {
    this.columns = columns;
    this.key = key ?? ((row) => JSON.stringify(columns.filter((c) => c.isKey).map((c) => row[c.name])));
    this.sort = sort ?? { name: columns[0].name, down: false };
    this.what = what;
    this.rows = [];
    this.listed = [];
    this.pool = [];
    this.text = "";
    const id = unique("grid");
    this.counted = el("small", { "aria-live": "off" });
    this.filter = el("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${what}`, oninput: () => { this.text = this.filter.value.toLowerCase(); this.arrange(); } });
    this.heads = columns.map((column) => el("th", { scope: "col", class: this.classOf(column)?.replace("mono", "") },
      el("button", { type: "button", onclick: () => this.sortBy(column) }, column.title ?? title(column.name), column.kind === "time" ? el("small", {}, " UTC") : null)));
    // Of one cell: columns that are hidden would take room, if a cell spanned them.
    this.above = el("tr", { class: "space", "aria-hidden": "true" }, el("td", {}));
    this.below = el("tr", { class: "space", "aria-hidden": "true" }, el("td", {}));
    this.body = el("tbody", {}, this.above, this.below);
    this.table = el("table", { "aria-labelledby": id }, el("thead", {}, el("tr", {}, ...this.heads)), this.body);
    this.fit();
    this.scroller = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": id, onscroll: () => this.later() }, this.table);
    this.empty = el("p", { class: "empty", hidden: true }, empty);
    this.node = el("div", { class: "panel grid" },
      el("div", { class: "bar" }, el("h2", { id }, label, " ", this.counted), hasFilter ? this.filter : null), this.scroller, this.empty);
    this.pending = 0;
    this.watcher = new ResizeObserver(() => this.later());
    this.watcher.observe(this.scroller);
    this.mark();
  }

  classOf(column) {
    return [isNumeric(column.kind) ? "n" : "", column.wide ? "wide" : "", column.isMinor ? "minor" : "", column.isBoth ? "both" : "", column.kind === "trace" || column.kind === "bytes" ? "mono" : ""].filter(Boolean).join(" ") || null;
  }

  // The columns that are shown have room; where there is less, the table scrolls. On a phone minor ones are not shown.
  fit() {
    for (const [name, wide, plain] of [["--least", 13, 6.3], ["--least-phone", 7, 4.7]]) {
      const shown = this.columns.filter((column, n) => !this.heads[n].hidden && !(column.isMinor && wide < 13));
      const least = shown.map((column) => (column.wide ? wide : this.isCompared && column.isBoth ? BOTH : plain));
      this.table.style.setProperty(name, `${least.reduce((all, one) => all + one, 0)}rem`);
    }
  }

  // `before(row)`: what stood there before, for which numbers have room.
  compare(before) {
    this.before = before;
    if (this.isCompared) return;
    this.isCompared = true;
    this.table.classList.add("compared");
    this.fit();
  }

  update(rows) {
    this.rows = rows;
    for (const [n, column] of this.columns.entries()) {
      const isHidden = Boolean(column.isOptional) && rows.every((row) => row[column.name] === "");
      if (this.heads[n].hidden === isHidden) continue;
      this.heads[n].hidden = isHidden;
      for (const row of this.pool) row.cells[n].node.hidden = isHidden;
      this.fit();
    }
    this.arrange();
  }

  sortBy(column) {
    const { name, down } = this.sort;
    this.sort = { name: column.name, down: name === column.name ? !down : isNumeric(column.kind) || column.kind === "time" };
    this.mark();
    this.arrange();
    this.scroller.scrollTop = 0;
  }

  mark() {
    for (const [n, column] of this.columns.entries()) {
      if (column.name === this.sort.name) this.heads[n].setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else this.heads[n].removeAttribute("aria-sort");
    }
  }

  arrange() {
    const column = this.columns.find((each) => each.name === this.sort.name);
    const of = column?.value ?? ((row) => row[column.name]);
    const number = (value) => (typeof value === "string" ? Number(value) : value); // some numbers come as texts
    const value = column && (column.isNumber ?? isNumeric(column.kind)) ? (row) => number(of(row)) : of;
    const keys = this.columns.filter((each) => !isNumeric(each.kind));
    const found = this.text ? this.rows.filter((row) => keys.some((each) => String(row[each.name] ?? "").toLowerCase().includes(this.text))) : this.rows.slice();
    const way = this.sort.down ? -1 : 1;
    if (column) found.sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === y) return 0;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return x < y ? -way : way;
    });
    this.listed = found;
    put(this.counted, found.length === this.rows.length ? (found.length > 8 ? `${count(found.length)} ${this.what}` : "") : `${count(found.length)} of ${count(this.rows.length)}`);
    this.empty.hidden = found.length > 0;
    this.scroller.hidden = found.length === 0;
    this.render();
  }

  later() {
    if (!this.pending) this.pending = requestAnimationFrame(() => { this.pending = 0; this.render(); });
  }

  // Of the rows in sight each has an element; elements are used again for other rows.
  render() {
    const most = this.listed.length;
    const height = this.scroller.clientHeight || 600;
    const first = Math.max(0, Math.min(Math.floor(this.scroller.scrollTop / ROW) - SPARE, most));
    const last = Math.min(most, first + Math.ceil(height / ROW) + 2 * SPARE);
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    const wanted = focused?.closest("tr")?.dataset.key;
    const cell = focused?.closest("td")?.cellIndex ?? 0;
    while (this.pool.length < last - first) this.pool.push(this.made());
    for (let n = 0; n < this.pool.length; n += 1) {
      const row = this.pool[n];
      if (n < last - first) this.show(row, this.listed[first + n], first + n);
      if (row.node.hidden !== n >= last - first) row.node.hidden = n >= last - first;
    }
    this.space(this.above, first * ROW);
    this.space(this.below, (most - last) * ROW);
    this.table.setAttribute("aria-rowcount", most + 1);
    if (wanted !== undefined && focused.closest("tr").dataset.key !== wanted) {
      const now = this.pool.find((row) => !row.node.hidden && row.node.dataset.key === wanted);
      now?.node.cells[cell]?.querySelector("a")?.focus({ preventScroll: true });
    }
  }

  space(row, height) {
    const text = `${height}px`;
    if (row.firstChild.style.height !== text) row.firstChild.style.height = text;
    row.hidden = height === 0;
  }

  made() {
    const cells = this.columns.map((column) => {
      const node = el(column.isKey && column === this.columns[0] ? "th" : "td", { class: this.classOf(column), ...(column.isKey && column === this.columns[0] ? { scope: "row" } : {}) });
      const inner = column.href ? node.appendChild(el("a", {})) : node;
      node.hidden = this.heads[this.columns.indexOf(column)].hidden;
      return { node, inner, text: null, href: null };
    });
    const row = { node: el("tr", {}, ...cells.map((each) => each.node)), cells };
    this.body.insertBefore(row.node, this.below);
    return row;
  }

  show(row, data, index) {
    row.node.dataset.key = this.key(data);
    row.node.setAttribute("aria-rowindex", index + 2);
    for (const [n, column] of this.columns.entries()) {
      const at = row.cells[n], value = column.value ? column.value(data) : data[column.name];
      const text = column.text ? column.text(data) : shown(column.kind, value);
      if (at.text !== text) {
        at.inner.textContent = at.text = text;
        if (!isNumeric(column.kind)) at.node.title = column.kind === "trace" ? (value ?? "") : text;
      }
      if (column.hot) at.node.classList.toggle("hot", column.hot(data));
      if (column.href) {
        const href = column.href(data);
        if (at.href !== href) {
          at.href = href;
          if (href === null) at.inner.removeAttribute("href");
          else at.inner.setAttribute("href", href);
        }
      }
    }
  }

  close() {
    cancelAnimationFrame(this.pending);
    this.watcher.disconnect();
  }
}
