"""The pages of a scan, encoded: batches as Arrow IPC, row groups as they are stored (decision 0045)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
from kivi_server import limits

from kivi.arrow.ipc import encode_ipc
from kivi.store.facade import StoredGroup
from kivi.wire.v1 import session_pb2

__all__ = ["RowGroups", "encoded", "pieces"]

_BYTES: Final = 2 << 20
"""A page of row groups is not made larger than this, unless it is one: while the client decodes it the next is read."""
_GROUPS: Final = 64
"""Those of columns that hardly change take some bytes each, and expand to a hundred thousand times as many."""


class RowGroups:
    """A page of row groups: what its header says of them, and their bodies."""

    def __init__(self) -> None:
        self.groups: list[session_pb2.RowGroup] = []
        self.bodies: list[Any] = []
        self.nbytes = 0

    def add(self, group: StoredGroup, footer: bytes) -> None:
        """``footer``: if it is to be sent."""
        self.groups.append(
            session_pb2.RowGroup(
                name=group.name,
                file_bytes=group.file_bytes,
                footer_bytes=len(footer),
                index=group.index,
                rows=group.num_rows,
                columns=group.columns,
                chunk_offsets=[at for at, _ in group.chunks],
                chunk_bytes=[len(part) for _, part in group.chunks],
            )
        )
        self.bodies += [footer] if footer else []
        self.bodies += [part for _, part in group.chunks]
        self.nbytes += len(footer) + group.nbytes

    def has_room(self, group: StoredGroup) -> bool:
        return len(self.groups) < _GROUPS and self.nbytes + group.nbytes <= _BYTES


def encoded(batches: Iterable[pa.RecordBatch | StoredGroup], rows: int) -> Iterator[Any]:
    """Pages: ``RowGroups``, and Arrow IPC streams (pa.Buffer) of at most ``rows`` rows."""
    page, file = RowGroups(), -1
    for batch in batches:
        if isinstance(batch, StoredGroup):
            if page.groups and not page.has_room(batch):
                yield page
                page = RowGroups()
            page.add(batch, b"" if batch.file == file else batch.footer)
            file = batch.file
            continue
        if page.groups:
            yield page
            page = RowGroups()
        yield from map(encode_ipc, pieces([batch], rows))
    if page.groups:
        yield page


def pieces(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows, in batches of at most ``rows``, and of about ``PAGE_BYTES`` unless one row is larger."""
    for batch in batches:
        left = [batch.slice(start, rows) for start in range(0, batch.num_rows, rows)][::-1]
        while left:
            piece = left.pop()
            half = piece.num_rows // 2
            if half and piece.nbytes > limits.PAGE_BYTES:
                left += [piece.slice(half), piece.slice(0, half)]
            else:
                yield piece
