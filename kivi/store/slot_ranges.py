"""Which parts of a table's keys to read for the rows of some time: keys begin with the group, and time comes later.

::

    keys       (a, 09:00) ... (a, 17:00) (a, 17:05) (b, 09:00) ... (b, 17:00) (b, 17:05)      wanted: from 17:00 on
    ranges                    [--------------------)               [--------------------)
    or filter  [-------------------------------------------------------------------------)

A range for each group costs a seek to find the group, and what a scan costs before its first row, about as much as
reading a few hundred rows: so the first groups are looked at, and where less than that lies outside of the time, the
rows are all read and filtered.

The groups are those that base or pending knows, at whatever snapshot: a range without a visible row gives none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from kivi.delta.runs import DeltaRun
from kivi.encoding.key_slots import SLOT_BYTES, KeySlot, slot_bound
from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, table_prefix
from kivi.engine import Engine
from kivi.model.schema import TableSchema
from kivi.model.types import INT64_MIN

__all__ = ["KeyRange", "Places", "Times"]

KeyRange = tuple[bytes | None, bytes | None]
Times = tuple[int | None, int | None]
"""Slots that begin in [low, high), microseconds; None is no bound."""

_GROUPS_TRIED: Final = 4
_SKIPPED_MIN: Final = 256
"""So many rows outside of the time, for each group, are worth a range of its own (decision 0035)."""
_KEYS_AT_ONCE: Final = 16_384


class Places:
    """Where keys of a table are, in base and in what was captured of pending."""

    def __init__(self, engine: Engine, schema: TableSchema, runs: Sequence[DeltaRun], indexed: Sequence[bytes]) -> None:
        self._engine, self._runs, self._indexed = engine, runs, indexed
        self._space = table_prefix(Space.ROW, schema.id)
        self._end = prefix_end(self._space)
        self.slot = KeySlot.of(schema)

    def ranges(self, start: bytes | None, end: bytes | None, times: Times) -> list[KeyRange] | None:
        """The ranges of keys, in order, that hold the rows of a range of keys and of these times; None: read them all
        and filter."""
        low, high = times
        if low is None and high is None:
            return [(start, end)]
        first = b"" if low is None else slot_bound(low)
        beyond = None if high is None else slot_bound(high)
        if low is not None and high is not None and high <= low:
            return []
        found: list[KeyRange] = []
        skipped = tried = 0
        for group in self._groups(start, end):
            after = prefix_end(group) if beyond is None else group + beyond
            found.append((max(start or b"", group + first), after if end is None or (after and after < end) else end))
            if tried < _GROUPS_TRIED:
                tried += 1
                skipped += self._count(group, group + first)
                skipped += 0 if beyond is None else self._count(group + beyond, prefix_end(group))
                if tried == _GROUPS_TRIED and skipped < _SKIPPED_MIN * tried:
                    return None
        return found

    def _groups(self, start: bytes | None, end: bytes | None) -> Iterator[bytes]:
        """What stands before the slot in keys of the range, in order, each once."""
        at: bytes | None = start or b""
        while at is not None and (key := self._next(at, end)) is not None:
            group = key[: self.slot.at(key)]
            yield group
            at = prefix_end(group)

    def _next(self, at: bytes, end: bytes | None) -> bytes | None:
        """The first key from ``at`` on, before ``end``."""
        stop = self._end if end is None else self._space + end
        keys = [key[len(self._space) :] for key in next(self._engine.keys(self._space + at, stop, 1), [])]
        for run in self._runs:
            if (i := run.lower(at)) < run.rows:
                keys.append(run.key_at(i))
        if (i := bisect_left(self._indexed, at)) < len(self._indexed):
            keys.append(self._indexed[i])
        least = min(keys, default=None)
        return least if least is not None and (end is None or least < end) else None

    def _count(self, start: bytes, end: bytes | None) -> int:
        """Of keys in base, up to about what decides."""
        stop = self._end if end is None else self._space + end
        listed = next(self._engine.keys(self._space + start, stop, 4 * _SKIPPED_MIN), [])
        return len(listed)

    def newest(self, start: bytes | None, end: bytes | None, high: int | None = None) -> int | None:
        """No slot of a key in the range that begins before ``high``, visible or not, is newer; None: there is no key.

        The last key of each group is sought, unless the first groups are so short that all keys are sooner read.
        """
        found: list[bytes] = []
        rows = 0
        for tried, group in enumerate(self._groups(start, end)):
            after = prefix_end(group) if high is None else group + slot_bound(high)
            after = after if end is None or (after and after < end) else end
            if tried < _GROUPS_TRIED:
                rows += self._count(group, after)
            elif rows < _SKIPPED_MIN * _GROUPS_TRIED:
                return self._newest_of_all(start, end, high)
            stop = self._end if after is None else self._space + after
            base = next(self._engine.scan(self._space + max(start or b"", group), stop, reverse=True), None)
            keys = [] if base is None else [base[0][len(self._space) :]]
            for run in self._runs:
                held = run.slice_range(max(start or b"", group), after)
                if held:
                    keys.append(run.key_at(held.stop - 1))
            at = bisect_left(self._indexed, after) if after is not None else len(self._indexed)
            if at and self._indexed[at - 1] >= group:
                keys.append(self._indexed[at - 1])
            found += [key[self.slot.at(key) :][:SLOT_BYTES] for key in keys if key.startswith(group)]
        return None if not found else int.from_bytes(max(found), "big") + INT64_MIN

    def _newest_of_all(self, start: bytes | None, end: bytes | None, high: int | None) -> int | None:
        found = [run.keys.slice(rows.start, len(rows)) for run in self._runs if (rows := run.slice_range(start, end))]
        if self._indexed:
            found.append(pa.array(self._indexed, pa.large_binary()))

        def newest_of(keys: pa.Array) -> list[int]:
            slots = self.slot.slots(keys)
            slots = slots if high is None else slots[slots < high]
            return [int(slots.max())] if len(slots) else []

        newest = [slot for keys in found for slot in newest_of(keys)]
        stop, before = self._end if end is None else self._space + end, len(self._space)
        for listed in self._engine.keys(self._space + (start or b""), stop, _KEYS_AT_ONCE):
            keys = pa.array([key[before:] for key in listed], pa.large_binary())
            newest += newest_of(keys)
        return max(newest, default=None)
