"""What verdicts depend on, as of the recorded position: kept in base by nodes that judge a log again after a restart.

A verdict is a function of the log's prefix (``kivi.mvcc.replicated``). Memory has what it depends on as of the newest
record, and base has what passes have written, perhaps more than the position says: neither is the prefix up to there.
So what changes is noted in order, and with the position all that was noted up to it becomes what is saved::

    facts         what commits have written since the facts' floor, one row of the engine each
    changes       when each table changed last (``Catalog.touch``)
    definitions   the rows of the catalog's tables table
    gathered      what was added to aggregates while retractions are on their way (``kivi.mvcc.gathering``)
    pins          snapshots that every node keeps (``kivi.mvcc.pins``)
    taken         the ids of events that count once (``kivi.mvcc.deduplication``)
    touched       which rows of guarded aggregates were touched (``kivi.mvcc.touches``)

Not thread safe: all of it is called under the entry lock, but for `load`.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kivi.arrow.id_window import ID
from kivi.delta.ops import Barrier, RowOp
from kivi.delta.runs import DeltaRun
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, cts_of_fact, fact_key, gathered_key, meta_key, space_prefix, taken_key
from kivi.engine import Engine, WriteBatch
from kivi.model.schema import TableSchema
from kivi.mvcc.applied import Applied
from kivi.mvcc.deduplication import Deduplication, Taken
from kivi.mvcc.gathering import Gathering, Window
from kivi.mvcc.pins import Held, Pins
from kivi.mvcc.record import Bulk, Commit, Once, decode_commit
from kivi.mvcc.touches import Touches, Watch
from kivi.mvcc.verdict import Facts, Footprint, Generations

__all__ = ["Definition", "Prefix"]

_FACTS: Final = meta_key("facts")
_CATALOG: Final = meta_key("definitions")
_GATHERING: Final = meta_key("gathering")
_PINS: Final = meta_key("pins")
_WATCHES: Final = meta_key("watches")
_TAKEN: Final = struct.Struct("<QI")  # the log's time, and how long the JSON is of what counts once; then the ids


class Definition(NamedTuple):
    """A row of the tables table: its cells, and the CTS of its newest operation."""

    cells: dict[int, Any]
    cts: int


class _Written(NamedTuple):
    cts: int
    footprint: Footprint
    generations: Generations


class _Defined(NamedTuple):
    cts: int
    rows: Sequence[tuple[int, RowOp]]


class _Changed(NamedTuple):
    cts: int
    table: int


class _Gathered(NamedTuple):
    cts: int
    applied: Applied


class _Opened(NamedTuple):
    cts: int
    window: Window


class _Pinned(NamedTuple):
    cts: int
    name: bytes
    held: Held | None


class _Ended(NamedTuple):
    cts: int
    number: int


class _Watched(NamedTuple):
    cts: int
    table: int
    watch: Watch | None


class _Touched(NamedTuple):
    cts: int
    touched: dict[int, Any]


class Prefix:
    """``saved`` says whether the engine has one; else it begins with what ``begin`` is told."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._noted: deque[
            _Written | _Defined | _Changed | _Gathered | _Opened | _Ended | _Pinned | _Watched | _Touched | Taken
        ] = deque()
        self._touches, self._touched = Touches(), set[int]()
        for watch in json.loads(engine.get(_WATCHES) or b"[]"):
            self._touches.watch(Watch(*watch))
            self._touches.newest_in[watch[0]] = np.frombuffer(engine.get(_touches_key(watch[0])) or b"", "<u8").copy()
        self._pins = {
            bytes.fromhex(name): Held(bytes.fromhex(name), number, until_us)
            for name, number, until_us in json.loads(engine.get(_PINS) or b"[]")
        }
        self._taken: deque[tuple[int, int]] = deque()  # (CTS, when it is over), of those that are saved
        self._windows = {
            number: Window(number, time_us, tuple(tables))
            for number, time_us, tables in json.loads(engine.get(_GATHERING) or b"[]")
        }
        facts, catalog = engine.get(_FACTS), engine.get(_CATALOG)
        self.saved = facts is not None
        self._generations = Generations(*json.loads(facts)) if facts is not None else Generations(0, 0, 0)
        found: dict[str, Any] = {"changes": {}, "definitions": {}, "last_id": 0}
        if catalog is not None:
            found = json.loads(catalog)
        self.changes: dict[int, int] = {int(table): cts for table, cts in found["changes"].items()}
        self.definitions = {
            int(table): Definition({int(at): cell for at, cell in cells.items()}, cts)
            for table, (cells, cts) in found["definitions"].items()
        }
        self.last_id: int = found["last_id"]
        self._catalog_changed = False

    def begin(
        self, definitions: dict[int, Definition], changes: dict[int, int], last_id: int, generations: Generations
    ) -> None:
        """Of a store without a place in the log yet: what base has, which is all there is."""
        self.definitions, self.changes, self.last_id = dict(definitions), dict(changes), last_id
        self._generations = generations
        self._catalog_changed = True

    def restore(self, facts: Facts) -> None:
        """Facts as of the position."""
        facts.restore(self._generations, self._stored())

    def _stored(self) -> Iterator[tuple[int, Footprint]]:
        prefix = space_prefix(Space.FACT)
        for key, value in self._engine.scan(prefix, prefix_end(prefix)):
            commit = decode_commit(value)
            yield cts_of_fact(key), Footprint(0, commit.rows, commit.guards)

    def restore_gathering(self, gathering: Gathering, schema_of: Callable[[int], TableSchema | None]) -> None:
        """What was kept as of the position, of the aggregates that are there."""
        for window in self._windows.values():
            gathering.restore(window)
        prefix = space_prefix(Space.GATHERED)
        for key, value in self._engine.scan(prefix, prefix_end(prefix)):
            cts, commit = cts_of_fact(key), decode_commit(value)
            runs = [
                (bulk.table, DeltaRun.from_buffer(schema, cts, bulk.parts[0]))
                for bulk in commit.runs
                if (schema := schema_of(bulk.table)) is not None
            ]
            gathering.keep(cts, Applied([(cts, *row) for row in commit.derived], (), runs))

    def restore_pins(self, pins: Pins) -> None:
        """Those that are held as of the position."""
        for held in self._pins.values():
            pins.restore(held)

    def restore_touches(self, touches: Touches) -> None:
        """What was touched as of the position."""
        for table, watch in self._touches.watches.items():
            touches.watch(watch)
            touches.newest_in[table] = self._touches.newest_in[table].copy()

    def restore_taken(self, deduplication: Deduplication) -> None:
        """Ids that were taken as of the position."""
        prefix = space_prefix(Space.TAKEN)
        for key, value in self._engine.scan(prefix, prefix_end(prefix)):
            taken = _decoded_taken(cts_of_fact(key), value)
            deduplication.restore(taken)
            self._taken.append((taken.cts, taken.is_over_at_us))

    # -- what happens -----------------------------------------------------------------------------

    def written(self, cts: int, footprint: Footprint, generations: Generations) -> None:
        """A commit wrote this; ``generations`` are those of the facts with it."""
        self._noted.append(_Written(cts, footprint, generations))

    def defined(self, rows: Sequence[tuple[int, RowOp]], cts: int) -> None:
        """A commit did this to the tables table."""
        self._noted.append(_Defined(cts, rows))

    def changed(self, table: int, cts: int) -> None:
        """A table changed."""
        self._noted.append(_Changed(cts, table))

    def gathers(self, window: Window) -> None:
        """From here on what is added is kept."""
        self._noted.append(_Opened(window.number, window))

    def gathered(self, applied: Applied, cts: int) -> None:
        """This is kept."""
        self._noted.append(_Gathered(cts, applied))

    def gathered_until(self, cts: int, number: int) -> None:
        """No longer, for the retraction that ``number`` was for."""
        self._noted.append(_Ended(cts, number))

    def pinned(self, cts: int, name: bytes, held: Held | None) -> None:
        """A pin is held from here on, for longer, or not any more."""
        self._noted.append(_Pinned(cts, name, held))

    def took(self, taken: Taken) -> None:
        """A commit brought events that count once."""
        self._noted.append(taken)

    def watched(self, cts: int, table: int, watch: Watch | None) -> None:
        """The rows of an aggregate are watched from here on, for longer, or not any more."""
        self._noted.append(_Watched(cts, table, watch))

    def touched(self, cts: int, touched: dict[int, Any]) -> None:
        """Commits up to here touched rows of watched aggregates, of these buckets."""
        self._noted.append(_Touched(cts, touched))

    # -- what is saved ----------------------------------------------------------------------------

    def save(self, batch: WriteBatch, upto: int) -> None:
        """Adds what has to be in base with the position ``upto``."""
        floor = self._generations.floor
        while self._noted and self._noted[0].cts <= upto:
            match self._noted.popleft():
                case _Written(cts, footprint, generations):
                    self._generations = generations
                    batch.put(fact_key(cts), _as_bytes(footprint))
                case _Changed(cts, table):
                    self.changes[table] = max(cts, self.changes.get(table, 0))
                    self._catalog_changed = True
                case _Defined(cts, rows):
                    self._define(rows, cts)
                    self._catalog_changed = True
                case _Pinned(_, name, held):
                    self._pins.pop(name, None)
                    if held is not None:
                        self._pins[name] = held
                    pins = [(pin.name.hex(), pin.number, pin.until_us) for pin in self._pins.values()]
                    batch.put(_PINS, json.dumps(pins).encode())
                case _Watched(_, table, watch):
                    if watch is None:
                        self._touches.end(table)
                        batch.delete(_touches_key(table))
                    else:
                        self._touches.watch(watch)
                    self._touched.add(table)
                case _Touched(cts, touched):
                    self._touches.touch(touched.items(), cts)
                    self._touched.update(touched)
                case Taken() as taken:
                    batch.put(taken_key(taken.cts), _taken_bytes(taken))
                    self._taken.append((taken.cts, taken.is_over_at_us))
                    while self._taken[0][1] < taken.time_us:
                        batch.delete(taken_key(self._taken.popleft()[0]))
                case _Gathered(cts, applied):
                    batch.put(gathered_key(cts), _kept_bytes(applied))
                case _Opened(_, window):
                    self._windows[window.number] = window
                    self._save_windows(batch)
                case _Ended(cts, number):
                    if self._windows.pop(number, None) is not None:
                        batch.delete_range(gathered_key(0), gathered_key(min(self._windows, default=cts + 1)))
                        self._save_windows(batch)
        self._save_touches(batch)
        if self._generations.floor > floor:
            batch.delete_range(fact_key(0), fact_key(self._generations.floor + 1))
        batch.put(_FACTS, json.dumps(self._generations).encode())
        if self._catalog_changed:
            content = {"changes": self.changes, "definitions": self.definitions, "last_id": self.last_id}
            batch.put(_CATALOG, json.dumps(content).encode())
            self._catalog_changed = False

    def _save_touches(self, batch: WriteBatch) -> None:
        for table in self._touched & self._touches.watches.keys():
            batch.put(_touches_key(table), self._touches.newest_in[table].astype("<u8").tobytes())
        if self._touched:
            batch.put(_WATCHES, json.dumps([*self._touches.watches.values()]).encode())
            self._touched = set()

    def _save_windows(self, batch: WriteBatch) -> None:
        batch.put(_GATHERING, json.dumps([*self._windows.values()]).encode())

    def _define(self, rows: Sequence[tuple[int, RowOp]], cts: int) -> None:
        for table, op in rows:
            self.last_id = max(self.last_id, table)
            if op.barrier is Barrier.DELETE:
                self.definitions.pop(table, None)
            else:
                before = self.definitions[table].cells if table in self.definitions else {}
                self.definitions[table] = Definition({**before, **op.puts}, cts)


def _touches_key(table: int) -> bytes:
    return meta_key(f"touches/{table}")


def _as_bytes(footprint: Footprint) -> bytes:
    """Cells without their values: a verdict looks at which they are."""
    rows = [
        (table, key, RowOp(op.barrier, dict.fromkeys(op.puts), dict.fromkeys(op.deltas)))
        for table, key, op in footprint.rows
    ]
    return b"".join(Commit(0, rows, [*footprint.guards]).encode())


def _kept_bytes(applied: Applied) -> bytes:
    """Rows and runs, of which each run has the CTS of its rows with it, or has that of all together."""
    runs = [Bulk(table, 0, run.to_buffers()) for table, run in applied.runs]
    commit = Commit(0, derived=[(table, key, op) for _, table, key, op in applied.rows], runs=runs)
    return b"".join(bytes(part) for part in commit.encode())


def _taken_bytes(taken: Taken) -> bytes:
    once = json.dumps(taken.once).encode()
    return _TAKEN.pack(taken.time_us, len(once)) + once + taken.ids.tobytes()


def _decoded_taken(cts: int, data: bytes) -> Taken:
    time_us, size = _TAKEN.unpack_from(data)
    table, columns, window_us = json.loads(data[_TAKEN.size : _TAKEN.size + size])
    ids = np.frombuffer(data[_TAKEN.size + size :], ID)
    return Taken(cts, time_us, Once(table, tuple(columns), window_us), ids)
