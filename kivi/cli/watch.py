"""``kivi watch``: a query kept up on a terminal, or its changes as lines for other programs.

On a terminal a state is drawn again whenever it changes, as far as the window is high, and its last line says which
snapshot it is and how old. Everywhere else, and for events, each change is a line as it comes: JSON objects, or CSV
under a header, with ``ts``, ``kind``, ``old`` and ``new`` before the columns (of events: the columns alone). Columns
that are added meanwhile are drawn, and in JSON; what stands under a header keeps to that.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from kivi.cli.text import plain, print_rows, shown
from kivi.model.subscriptions import Update

__all__ = ["follow"]

_REDRAW_S = 1.0


def follow(db: Any, wanted: dict[str, Any], description: dict[str, Any], names: Sequence[str], style: str) -> None:
    """Until it ends, or is interrupted, or told to stop by SIGTERM. What was printed is acknowledged then."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    of_events = description["kind"] == "event" and not (wanted["order_by"] or wanted["limit"] is not None)
    drawn = style == "table" and not of_events and sys.stdout.isatty()
    lines = Lines(sys.stdout, names, "csv" if style == "table" else style, of_events)
    with db.subscribe(description["name"], **wanted) as live:
        try:
            while not live.ended:
                update = live.next(_REDRAW_S if drawn else None)
                if drawn:
                    draw(live, names)
                elif update is not None:
                    lines.write(update)
        except KeyboardInterrupt:
            pass  # it was asked for


def draw(live: Any, names: Sequence[str]) -> None:
    """The window anew, in one write: nothing flickers."""
    size = shutil.get_terminal_size()
    rows = live.rows
    room = max(1, size.lines - 4)
    text = io.StringIO()
    print_rows(rows[:room], [*rows[0]] if rows else names, "table", text)
    lines = [line[: size.columns] for line in text.getvalue().splitlines()]
    more = f"{len(rows) - room:,} more rows; " if len(rows) > room else ""
    fresh = "live" if live.silent_s < 3 else f"nothing heard for {live.silent_s:.0f} s"
    lines += ["", f"{more}{len(rows):,} rows at snapshot {live.ts}, {fresh}; Ctrl-C ends it"[: size.columns]]
    sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
    sys.stdout.flush()


class Lines:
    """Changes as lines, each written out as it comes."""

    def __init__(self, out: TextIO, names: Sequence[str], style: str, of_events: bool) -> None:
        self._out = out
        self._names = names
        self._of_events = of_events
        self._csv = None if style == "json" else csv.writer(out, lineterminator="\n")
        if self._csv is not None:
            self._csv.writerow(names if of_events else ["ts", "kind", "old", "new", *names])

    def write(self, update: Update) -> None:
        if update.reset and not self._of_events:
            self._line({"ts": update.ts, "kind": "reset", "old": None, "new": None}, None)
        for change in update.changes:
            facts = {"ts": update.ts, "kind": change.kind, "old": change.old, "new": change.new}
            self._line({} if self._of_events else facts, change.row)
        self._out.flush()

    def _line(self, facts: dict[str, Any], row: dict[str, Any] | None) -> None:
        if self._csv is None:
            print(json.dumps(plain({**facts, "row": row} if facts else row), ensure_ascii=False), file=self._out)
        else:
            self._csv.writerow(map(shown, (*facts.values(), *((row or {}).get(name) for name in self._names))))
