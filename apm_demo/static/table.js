// A table whose rows are kept by key: an update touches the cells that changed, and the rows that are out of order.
// Of very many the first are in the page, by the order that was chosen, until a person asks for all: a browser lays out
// every row of a table again for each that changes.
"use strict";

const FIRST = 100;

class LiveTable {
  // columns: [value of an entry to order by, ...]; cells(entry) -> texts after the first cell; name(key, entry) -> nodes
  constructor(table, { columns, cells, name, hot }) {
    Object.assign(this, { columns, cells, name, hot });
    this.body = table.tBodies[0];
    this.heads = [...table.tHead.querySelectorAll("th")];
    this.rows = new Map(); // key -> {row, entry, texts}
    this.sort = { column: 0, down: false };
    this.disordered = false;
    this.most = FIRST;
    this.heads.forEach((head, n) => head.querySelector("button").addEventListener("click", () => this.order(n)));
    // What a person points at, or has the focus on, stays in its place until they leave it.
    for (const left of ["pointerleave", "focusout"]) this.body.addEventListener(left, () => requestAnimationFrame(() => this.arrange()));
  }

  order(column) {
    const again = this.sort.column === column;
    this.sort = { column, down: again ? !this.sort.down : column > 0 };
    this.heads.forEach((head, n) => {
      if (n === column) head.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.arrange(true);
  }

  all() {
    this.most = Infinity;
    this.arrange(true);
  }

  get hidden() {
    return this.rows.size - this.body.childElementCount;
  }

  clear() {
    this.most = FIRST;
    this.rows.clear();
    this.body.replaceChildren();
  }

  set(key, entry) {
    const known = this.rows.get(key), value = this.columns[this.sort.column];
    this.disordered ||= !known || value(known.entry) !== value(entry);
    const texts = this.cells(entry);
    if (!known) {
      const row = document.createElement("tr");
      row.dataset.child = key;
      const head = document.createElement("td");
      head.append(...this.name(key, entry));
      row.append(head);
      for (const text of texts) {
        const cell = document.createElement("td");
        cell.className = "n";
        cell.textContent = text;
        row.append(cell);
      }
      row.lastChild.classList.toggle("hot", this.hot(entry));
      this.rows.set(key, { row, entry, texts });
      return;
    }
    texts.forEach((text, n) => {
      if (text !== known.texts[n]) known.row.cells[n + 1].firstChild.data = text;
    });
    known.row.lastChild.classList.toggle("hot", this.hot(entry));
    if (known.entry[0] !== entry[0]) known.row.cells[0].replaceChildren(...this.name(key, entry));
    known.entry = entry;
    known.texts = texts;
  }

  remove(key) {
    this.rows.get(key)?.row.remove();
    this.rows.delete(key);
  }

  sorted() {
    const value = this.columns[this.sort.column], sign = this.sort.down ? -1 : 1;
    const listed = [...this.rows].map(([key, known]) => ({ key, row: known.row, value: value(known.entry) }));
    const compare = typeof listed[0]?.value === "string"
      ? (a, b) => sign * names.compare(a.value, b.value) || names.compare(a.key, b.key)
      : (a, b) => sign * (a.value - b.value) || names.compare(a.key, b.key);
    return listed.sort(compare);
  }

  arrange(always = false) {
    const complete = this.body.childElementCount === Math.min(this.rows.size, this.most);
    if (!always && complete && (!this.disordered || this.body.matches(":hover, :focus-within"))) return;
    this.disordered = false;
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    let at = this.body.firstElementChild;
    for (const { row } of this.sorted().slice(0, this.most)) {
      if (row === at) {
        at = at.nextElementSibling;
      } else if (at && at.nextElementSibling === row) { // the one here went down: it comes back in its new place
        const gone = at;
        at = row.nextElementSibling;
        gone.remove();
      } else {
        this.body.insertBefore(row, at);
      }
    }
    while (at) {
      const gone = at;
      at = at.nextElementSibling;
      gone.remove();
    }
    if (focused && document.activeElement !== focused && focused.isConnected) focused.focus({ preventScroll: true });
  }
}

const names = new Intl.Collator("en", { numeric: true });
