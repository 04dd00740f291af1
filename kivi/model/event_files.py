"""Parquet files with events of a table, for another reader: where they lie, and which of their rows count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from kivi.model.questions import COMMIT_TIME
from kivi.model.schema import TableSchema

__all__ = ["NAME_COLUMNS", "EventFiles", "can_be_shared", "decode_files", "encode_files"]

NAME_COLUMNS: Final = ("_cts", "_pos")
"""What else a file has of each event: the CTS of its commit, and its place there. Longer if a column has this name."""


@dataclass(frozen=True, slots=True)
class EventFiles:
    """Files with the same columns. ``columns``: the table's; ``stamps``: the one with the CTS of each event.

    A snapshot sees the rows with a CTS up to ``upto``, and an event time from ``floor_us`` on, microseconds since 1970;
    None: all of them.
    """

    paths: tuple[str, ...]
    columns: tuple[str, ...]
    stamps: str
    event_time: str
    upto: int | None
    floor_us: int | None


def can_be_shared(schema: TableSchema, hidden: Sequence[str]) -> bool:
    """Whether files have all columns of a table that are shown: those of these hidden ones too.

    When a commit was is in no file; and DuckDB does not tell large letters from small ones, in the names of the columns
    that only files have neither.
    """
    names = [column.name.lower() for column in schema.columns]
    names += [name for name in NAME_COLUMNS if name not in schema.by_name]
    timed = COMMIT_TIME in hidden and COMMIT_TIME not in schema.by_name
    return schema.kind == "event" and not timed and len(set(names)) == len(names)


def encode_files(files: Sequence[EventFiles]) -> bytes:
    """For another process."""
    return json.dumps([asdict(each) for each in files]).encode()


def decode_files(raw: bytes) -> list[EventFiles]:
    found = json.loads(raw)
    return [EventFiles(**each | {name: tuple(each[name]) for name in ("paths", "columns")}) for each in found]
