"""Meta, headers and manifest of one event table, read in one engine scan.

The manifest is large where a table is, and changes seldom: it is read again only when meta says that it changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, event_file_key, table_prefix
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss
from kivi.events.blocks import Block, Meta, headers_in
from kivi.events.settled_files import SettledFile, decode_file

__all__ = ["Manifest", "settled_files"]


class Manifest:
    """Thread safe. ``name``: of the table."""

    def __init__(self, engine: Engine, table: int, name: str) -> None:
        self._engine, self._table, self._name = engine, table, name
        self._known: tuple[int, list[SettledFile]] = -1, []

    def read(self) -> tuple[Meta, list[Block], list[SettledFile]]:
        """Meta, the headers in commit order and the settled files by number: in one consistent view."""
        prefix = table_prefix(Space.EVENT, self._table)
        rows = self._engine.scan(prefix, prefix_end(prefix))
        beyond = list[tuple[bytes, bytes]]()

        def until_files() -> Iterator[tuple[bytes, bytes]]:
            for pair in rows:
                if pair[0][len(prefix)] == 2:
                    beyond.append(pair)
                    return
                yield pair

        meta, blocks = headers_in(until_files(), prefix, self._name)
        meta = meta or Meta()
        generation, files = self._known
        if generation != meta.manifest:
            files = [_decoded(key, raw, self._name) for key, raw in chain(beyond, rows)]
            self._known = meta.manifest, files
        return meta, blocks, files

    def put(self, batch: WriteBatch, file: SettledFile) -> None:
        batch.put(event_file_key(self._table, file.number), file.encode())

    def delete(self, batch: WriteBatch, file: SettledFile) -> None:
        batch.delete(event_file_key(self._table, file.number))


def _decoded(key: bytes, raw: bytes, name: str) -> SettledFile:
    try:
        return decode_file(raw)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        number = int.from_bytes(key[-8:], "big")
        raise DataLoss(
            f"the manifest of settled file {number} of event table {name!r} is damaged ({error!r}): restore a backup"
        ) from None


def settled_files(engine: Engine, table: int) -> list[SettledFile]:
    """Those of one table, by number."""
    first = event_file_key(table, 0)
    return [
        _decoded(key, raw, f"table {table}")
        for key, raw in engine.scan(first, prefix_end(table_prefix(Space.EVENT, table)))
    ]
