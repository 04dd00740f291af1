"""Meta, headers and manifest of one event table, read in one engine scan.

The manifest is large where a table is, and changes seldom: it is read again only when meta says that it changed, and
then only rows that are others are decoded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import chain

from kivi.encoding.keys import prefix_end
from kivi.encoding.keyspaces import Space, event_file_key, space_prefix, table_prefix
from kivi.engine import Engine, WriteBatch
from kivi.errors import DataLoss
from kivi.events.blocks import Block, Meta, headers_in
from kivi.events.cold_tier import ColdObject
from kivi.events.places import FOLDER, file_name
from kivi.events.settled_files import SettledFile, decode_file
from kivi.runtime.files import sync_directory

__all__ = ["Manifest", "cold_objects", "link_files", "settled_files"]


class Manifest:
    """Thread safe. ``name``: of the table."""

    def __init__(self, engine: Engine, table: int, name: str) -> None:
        self._engine, self._table, self._name = engine, table, name
        self._known: tuple[int, dict[bytes, tuple[bytes, SettledFile]]] = -1, {}

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
        generation, known = self._known
        if generation != meta.manifest:
            before, known = known, {}
            for key, raw in chain(beyond, rows):
                found = before.get(key)
                known[key] = found if found and found[0] == raw else (raw, _decoded(key, raw, self._name))
            self._known = meta.manifest, known
        return meta, blocks, [file for _, file in known.values()]

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


def _all_files(engine: Engine) -> Iterator[tuple[int, SettledFile]]:
    """(table, file) of every manifest row, those of dropped tables included: a seek for each table."""
    at, end = space_prefix(Space.EVENT), prefix_end(space_prefix(Space.EVENT))
    while (found := next(iter(engine.scan(at, end)), None)) is not None:
        table = int.from_bytes(found[0][1:5], "big")
        for file in settled_files(engine, table):
            yield table, file
        beyond = prefix_end(table_prefix(Space.EVENT, table))
        if beyond is None:
            return
        at = beyond


def cold_objects(engine: Engine) -> list[ColdObject]:
    """All objects of the cold tier that the engine names."""
    return [file.cold for _, file in _all_files(engine) if file.cold is not None]


def link_files(engine: Engine, source: str, target: str) -> None:
    """Links the settled files that the engine names and that are here from one directory of a store to another, or
    copies them. What the engine names must stay the same meanwhile. Raises OSError."""
    names = [file_name(table, file.number) for table, file in _all_files(engine) if file.cold is None]
    for name in names:
        path = os.path.join(target, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            os.link(os.path.join(source, name), path)
        except OSError:  # another file system, or one without links
            shutil.copyfile(os.path.join(source, name), path)
            sync_directory(path)
    for folder in dict.fromkeys(os.path.dirname(name) for name in names):
        sync_directory(os.path.join(target, folder))
    if names:
        sync_directory(os.path.join(target, FOLDER))
