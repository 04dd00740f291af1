"""Settling: hot blocks become settled files, and files become others. The steps of one table, each in two halves.

::

    make      without a lock: reads what goes in, sorts it, writes files that nothing names yet
    swap      under the caller's lock: if what went in is still as it was, one engine batch names the new files and
              no longer what went in; otherwise the files are deleted, and the step is made again later

So neither commits nor reads wait for a step, and a crash leaves either what was there before or what is there after,
and files that nothing names, which are deleted when the table is opened. After every file that it makes a step calls
``pace`` with its number of rows, which may rest. What went in is deleted when the last view
that may need it has closed; a file only after a flush as well, since a crash may bring back the manifest of before.

Events that retractions removed, and that no snapshot sees any more, are left out of what is made. Their names stay
counted in the headers of the settled blocks, so positions and counts of commits stay what they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from kivi.arrow.columns import picked, stored_array
from kivi.arrow.dictionaries import together
from kivi.encoding.event_names import POSITION, STAMP, EventNames
from kivi.encoding.keyspaces import event_header_key
from kivi.engine import WriteBatch
from kivi.errors import DataLoss, Unavailable
from kivi.events.blocks import Block, Blocks, Counts, Erased, Meta, first_positions
from kivi.events.combining import combinable, portions, too_deep
from kivi.events.file_writing import write_file
from kivi.events.manifest import Manifest
from kivi.events.settled_files import Group, SettledFile, SettledFiles, Stretch

__all__ = ["FILE_ROWS", "Lock", "Parts", "Settling", "data_of", "named_rows"]

FILE_ROWS: Final = 1 << 20
"""Events of a file, and of the blocks that are settled together."""
_FILE_BYTES: Final = 128 << 20
"""Bytes in memory of these, where events are long: a step holds about three times as much."""

_HEADER_ROWS: Final = 131_072
"""Headers of fewer events are joined. Retention drops commits by headers, so they are not to cover a long time."""
_AGAIN_S: Final = 60.0
"""A file whose object cannot be read is passed over for so long."""

Lock = AbstractContextManager[Any]
Parts = tuple[Blocks, Manifest, SettledFiles]


class Owner(Protocol):
    """The event table, as far as steps use it."""

    @property
    def parts(self) -> Parts: ...

    @property
    def is_apart(self) -> bool: ...

    def enter(self) -> int: ...

    def leave(self, ticket: int) -> None: ...

    def reserve(self, count: int) -> int: ...

    def retire(self, meta: Meta, data: list[int], files: list[SettledFile], batch: WriteBatch) -> None: ...


class _Unreadable(Exception):
    """The object of this file cannot be read now, or is gone."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _reading(file: SettledFile) -> Iterator[None]:
    try:
        yield
    except (DataLoss, Unavailable):
        if file.cold is None:
            raise
        raise _Unreadable(file.number) from None


@dataclass(frozen=True, slots=True)
class _Events:
    """Events with their names. ``erased_at``: the CTS of the retraction that removed each; 0: none did; -1: and their
    values are gone, too."""

    columns: Any
    stamps: Any
    positions: Any
    erased_at: Counts

    def picked(self, rows: Any) -> _Events:
        return _Events(picked(self.columns, rows), self.stamps[rows], self.positions[rows], self.erased_at[rows])


@dataclass(frozen=True, slots=True)
class _Made:
    """Files that nothing names yet, with their bytes and, by retraction, the rows that it removed."""

    files: list[tuple[SettledFile, Any, dict[int, Counts]]]
    gone: _Events

    def and_also(self, other: _Made) -> _Made:
        gone = [part for part in (self.gone, other.gone) if len(part.stamps)]
        return _Made(self.files + other.files, _joined(gone))


class Settling:
    """One step at a time. Counts are of rows and bytes since the store was opened."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._pace: Callable[[int], None] = lambda rows: None
        self.settled_rows = self.settled_bytes = 0
        self.combined_rows = self.written_bytes = 0
        self.retried = 0
        self._passed_over: dict[int, float] = {}

    def step(
        self,
        lock: Lock,
        unneeded: Callable[[], int],
        *,
        every: bool,
        file_rows: int = FILE_ROWS,
        pace: Callable[[int], None] = lambda rows: None,
    ) -> bool:
        """One bounded step; False: there was nothing to do.

        Combines files where too many have one moment. Otherwise settles hot blocks, oldest first, once they have twice
        ``file_rows`` events, of which the newest half stays hot; ``every``: all of them. What else there is to write
        again comes last. No snapshot below ``unneeded`` is or will be open.
        """
        self._pace = pace
        if self._owner.is_apart:
            return False
        ticket = self._owner.enter()  # what goes in stays until the swap
        try:
            parts = self._owner.parts  # the same to the end, whatever is altered meanwhile
            _, blocks, files = parts[1].read()
            least = unneeded()
            files = [file for file in files if self._passed_over.get(file.number, 0.0) <= time.monotonic()]
            chosen = too_deep(files, file_rows)
            if not chosen and (inputs := _to_settle(blocks, every, file_rows)):
                return self._settle(parts, lock, blocks, inputs, least, file_rows)
            if found := [file for file in files if file.named]:
                return self._look_through(parts, lock, found[0])
            chosen = chosen or [file for file in files if any(one.cts <= least for one in file.erased)][:1]
            chosen = chosen or combinable(files, file_rows)
            return bool(chosen) and self._combine(parts, lock, chosen, least, file_rows)
        except _Unreadable as error:
            self._passed_over[error.number] = time.monotonic() + _AGAIN_S
            return True
        finally:
            self._owner.leave(ticket)

    # -- the two steps ----------------------------------------------------------------------------

    def _settle(
        self, parts: Parts, lock: Lock, blocks: list[Block], inputs: list[Block], least: int, file_rows: int
    ) -> bool:
        base = parts[0]
        firsts = dict(zip((block.order for block in blocks), first_positions(blocks), strict=True))
        every = [column.name for column in base.schema.columns]
        found = list[_Events]()
        for block in inputs:
            names = EventNames.of_rows(*base.runs(block), firsts[block.order])
            erased_at = np.zeros(block.rows, np.int64)
            for one in block.erased:
                erased_at[base.rows_erased(one)] = -1 if one.blank else one.cts
            found.append(_Events(base.read(block, every), names.stamps, names.positions, erased_at))
        made = self._made(parts, lock, _joined(found), least, file_rows)
        headers = _headers_beside(blocks, inputs, min(file_rows, _HEADER_ROWS)) + inputs  # which become one

        def swap(batch: WriteBatch, meta: Meta, now: list[Block], files: list[SettledFile]) -> list[int] | None:
            there = {block.order: block for block in now}
            if any(there.get(block.order) != block for block in headers):
                return None
            for block in headers[1:]:
                batch.delete(event_header_key(base.schema.id, block.order))
            blank = [one for block in headers for one in block.erased if one.blank]
            gone = _blank(blank, made.gone.erased_at)
            base.add_settled(batch, meta.next, headers, firsts[headers[0].order], gone)
            meta.next += 1
            return [data for block in headers for data in data_of(block)]

        done = self._swap(parts, lock, made, [], swap)
        if done:
            self.settled_rows += sum(block.rows for block in inputs)
            self.settled_bytes += sum(file.nbytes for file, _, _ in made.files)
        return done

    def _look_through(self, parts: Parts, lock: Lock, file: SettledFile) -> bool:
        """Finds which rows of a file the retractions removed that it has by name."""
        base, manifest, settled = parts
        with _reading(file):
            found = [(one, named_rows(settled, file, base.names_erased(one))) for one in file.named]
        with lock:
            meta, _, files = manifest.read()
            if file not in files:
                self.retried += 1
                return True
            batch, now = WriteBatch(), replace(file, named=())
            for one, rows in found:
                if len(rows):
                    now = now.with_erased(base.add_erased(batch, one.cts, meta.next, rows))
                    meta.next += 1
            manifest.put(batch, now)
            meta.manifest += 1
            self._owner.retire(meta, [one.data for one in file.named], [], batch)
        return True

    def _combine(self, parts: Parts, lock: Lock, inputs: list[SettledFile], least: int, file_rows: int) -> bool:
        base, _, settled = parts
        every = [column.name for column in base.schema.columns]
        erased = {file.number: _erased_at(base, file) for file in inputs}
        made = _Made([], _joined([]))
        try:
            for low, high in _slices(inputs, file_rows):
                found = list[_Events]()
                for file, group in _groups(inputs, low, high):
                    with _reading(file):
                        batch = settled.read(file, Stretch((group,)), every, named=True, once=True)
                    times = _times(base, batch)
                    start, stop = (int(np.searchsorted(times, bound)) for bound in (low, high))
                    stamps, positions = (batch.column(name).to_numpy()[start:stop] for name in (STAMP, POSITION))
                    columns = batch.select(every).slice(start, stop - start)
                    erased_at = erased[file.number][group.start + start : group.start + stop]
                    found.append(_Events(columns, stamps, positions, erased_at))
                made = made.and_also(self._made(parts, lock, _joined(found), least, file_rows))
        except BaseException:
            settled.place.delete(file.number for file, _, _ in made.files)
            raise

        def swap(batch: WriteBatch, meta: Meta, now: list[Block], files: list[SettledFile]) -> list[int] | None:
            there = {file.number: file for file in files}
            if any(there.get(file.number) != file for file in inputs):
                return None
            for block in now:
                inside = (made.gone.stamps >= block.first_cts) & (made.gone.stamps <= block.last_cts)
                if block.settled and inside.any():
                    base.put_header(batch, replace(block, erased=_blank(block.erased, made.gone.erased_at[inside])))
            return [data for file in inputs for data in file.erased_data]

        done = self._swap(parts, lock, made, inputs, swap)
        self.combined_rows += sum(file.rows for file in inputs) if done else 0
        return done

    def _made(self, parts: Parts, lock: Lock, events: _Events, least: int, file_rows: int) -> _Made:
        """Files of the events, but of those that retractions up to ``least`` removed."""
        base, _, settled = parts
        is_gone = (events.erased_at > 0) & (events.erased_at <= least)
        gone = events.picked(np.flatnonzero(is_gone))
        times = _times(base, events.columns)
        order = _by_time(times, events)
        if events.erased_at.any():
            order = order[(events.erased_at[order] >= 0) & ~is_gone[order]]  # blank ones say nothing
        left, times = events.picked(order), times[order]
        cuts = portions(times, file_rows)
        with lock:
            number = self._owner.reserve(len(cuts))
        files = list[tuple[SettledFile, Any, dict[int, Counts]]]()
        try:
            for start, stop in cuts:
                rows = slice(start, stop)
                columns = left.columns.slice(start, stop - start)
                data, file = write_file(base.schema, number, columns, left.stamps[rows], left.positions[rows])
                erased_at = left.erased_at[rows]
                retracted = {int(cts): np.flatnonzero(erased_at == cts) for cts in np.unique(erased_at[erased_at > 0])}
                files.append((file, data, retracted))
                if not settled.place.in_engine:
                    settled.place.write(WriteBatch(), number, data)
                    files[-1] = file, None, retracted
                number += 1
                self._pace(stop - start)
            if files and not settled.place.in_engine:
                settled.place.made()
        except BaseException:
            settled.place.delete(file.number for file, _, _ in files)
            raise
        return _Made(files, gone)

    def _swap(
        self,
        parts: Parts,
        lock: Lock,
        made: _Made,
        inputs: list[SettledFile],
        swap: Callable[[WriteBatch, Meta, list[Block], list[SettledFile]], list[int] | None],
    ) -> bool:
        base, manifest, settled = parts
        with lock:
            try:
                meta, blocks, files = manifest.read()
                batch = WriteBatch()
                dead = swap(batch, meta, blocks, files)
                if dead is not None:
                    for file, data, retracted in made.files:
                        if settled.place.in_engine:
                            settled.place.write(batch, file.number, data)
                        for cts, rows in retracted.items():
                            file = file.with_erased(base.add_erased(batch, cts, meta.next, rows))
                            meta.next += 1
                        manifest.put(batch, file)
                    for file in inputs:
                        manifest.delete(batch, file)
                    meta.manifest += 1
                    meta.blanked = max([meta.blanked, *made.gone.erased_at.tolist()])
                    self._owner.retire(meta, dead, inputs, batch)
                    self.written_bytes += sum(file.nbytes for file, _, _ in made.files)
                    return True
            except BaseException:  # before the batch was written, or when it was: the rows say which
                named = {file.number for file in manifest.read()[2]}
                settled.place.delete(file.number for file, _, _ in made.files if file.number not in named)
                raise
        settled.place.delete(file.number for file, _, _ in made.files)
        self.retried += 1
        return False


def data_of(block: Block) -> list[int]:
    """Everything in the engine that its header names."""
    return [block.data, *(one.data for one in block.erased if one.data)]


def _to_settle(blocks: list[Block], every: bool, file_rows: int) -> list[Block]:
    hot = [block for block in blocks if not block.settled]
    rows, nbytes = sum(block.rows for block in hot), sum(block.raw_bytes for block in hot)
    if not every and rows < 2 * file_rows and nbytes < 2 * _FILE_BYTES:
        return []
    chosen = list[Block]()
    rows = nbytes = 0
    for block in hot:
        rows, nbytes = rows + block.rows, nbytes + block.raw_bytes
        if chosen and (rows > file_rows or nbytes > _FILE_BYTES):
            break
        chosen.append(block)
    return chosen


def _headers_beside(blocks: list[Block], inputs: list[Block], most: int) -> list[Block]:
    """The headers of settled blocks just before these, as far as they are no larger than all that come after them, and
    have no more than ``most`` events together.

    So a table that is idle again and again has few headers, and few commits are written again often.
    """
    rows, beside = sum(block.rows for block in inputs), list[Block]()
    for block in reversed(blocks[: blocks.index(inputs[0])]):
        if not block.settled or block.rows > rows or rows + block.rows > most:
            break
        beside.insert(0, block)
        rows += block.rows
    return beside


def _groups(files: list[SettledFile], low: int, high: int) -> Iterator[tuple[SettledFile, Group]]:
    for file in files:
        for group in file.groups:
            if group.time_max >= low and group.time_min < high:
                yield file, group


def _slices(files: list[SettledFile], file_rows: int) -> Iterator[tuple[int, int]]:
    """Spans of event time [low, high) that together have all events, each about as many as a file."""
    groups = sorted((group.time_max, group.rows) for file in files for group in file.groups)
    most = min(file_rows, max(1, _FILE_BYTES * sum(file.rows for file in files) // sum(f.raw_bytes for f in files)))
    low, rows = min(file.time_min for file in files), 0
    for time_max, more in groups:
        rows += more
        if rows >= most and time_max >= low:
            yield low, time_max + 1
            low, rows = time_max + 1, 0
    if low <= groups[-1][0]:
        yield low, groups[-1][0] + 1


def _erased_at(base: Blocks, file: SettledFile) -> Counts:
    found = np.zeros(file.rows, np.int64)
    for one in file.erased:
        found[base.rows_erased(one)] = one.cts
    return found


def _blank(before: Sequence[Erased], erased_at: Counts) -> tuple[Erased, ...]:
    """Of a settled block the events that lie nowhere any more, those of ``before`` and these: one entry of its header,
    under the newest of their retractions, however many these were."""
    rows = sum(one.rows for one in before) + len(erased_at)
    newest = max([*(one.cts for one in before), int(erased_at.max(initial=0))])
    return (Erased(newest, 0, rows, 0, True),) if rows else ()


def _times(base: Blocks, columns: Any) -> Any:
    name = base.schema.event_time or ""
    return stored_array(base.schema.column(name).type, columns.column(name))


def _by_time(times: Any, events: _Events) -> Any:
    """The order by event time, then by name.

    Blocks come in the order of their names, and files in that of time, so few times have to be moved by a stable sort.
    Sorting by all three cost twice as much as everything else here.
    """
    order = np.argsort(times, kind="stable")
    tied = np.flatnonzero(np.diff(times[order]) == 0)
    if len(tied):
        before, after = order[tied], order[tied + 1]
        stamps = events.stamps[before], events.stamps[after]
        back = (stamps[0] == stamps[1]) & (events.positions[before] > events.positions[after])
        if ((stamps[0] > stamps[1]) | back).any():
            return np.lexsort((events.positions, events.stamps, times))
    return order


def _joined(parts: Sequence[_Events]) -> _Events:
    if not parts:
        return _Events(None, np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    return _Events(
        together([part.columns for part in parts]),
        np.concatenate([part.stamps for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.erased_at for part in parts]),
    )


def named_rows(settled: SettledFiles, file: SettledFile, names: EventNames) -> Counts:
    """The rows of a file that have these names."""

    def found() -> Iterator[Counts]:
        for group in file.groups:
            low, high = np.searchsorted(names.stamps, np.array([group.first_cts, group.last_cts + 1], np.uint64))
            if low < high:
                batch = settled.read(file, Stretch((group,)), [], named=True, once=True)
                yield group.start + names.rows_among(*(batch.column(name).to_numpy() for name in (STAMP, POSITION)))

    return np.concatenate([np.zeros(0, np.int64), *found()])
