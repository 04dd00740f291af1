"""The real trace: reading it, landing it in pieces for Spark, and counting it independently.

The files are in ``apm_demo/data`` with their attribution. Their times have seven digits after the point; kivi's
timestamps are microseconds. Both ways of reading cut the seventh digit off (floor), and so do not differ.

The trace says neither how a request ended nor what its trace id was. Both are **made up** here, of the place that a
line has in its file, and so are the same in every run: the trace id is a hash of it, and of about one request in a
hundred the status is 503.
"""

from __future__ import annotations

import csv
import datetime as dt
import hashlib
import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

from apm_demo.landing import land
from apm_demo.tables import FAILED

__all__ = ["SEED", "SERVICES", "Request", "Row", "land_trace", "recount", "requests", "timestamp_us"]

SEED: Final = 20231116
"""Of the order in which the trace is replayed: the same in every run."""

SERVICES: Final = ("code", "conv")
_FAILS_ONE_IN: Final = 100
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Request(NamedTuple):
    """One line of the trace, and what is made up of it."""

    service: str
    ts_us: int
    context_tokens: int
    generated_tokens: int
    status: int
    trace_id: str


class Row(NamedTuple):
    """What an aggregate of the trace has to say of one service in one slot."""

    requests: int
    context_tokens: int
    generated_tokens: int
    context_tokens_max: int
    generated_tokens_max: int
    errors: int


def _lines(service: str) -> Iterator[tuple[str, str, str, int, str]]:
    """Time, context and generated tokens as they are in the file, with status and trace id."""
    text = files("apm_demo").joinpath("data", f"azure_llm_{service}.csv").read_text(encoding="utf-8")
    rows = csv.reader(text.splitlines())
    assert next(rows) == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    for number, (ts, context, generated) in enumerate(rows):
        digest = hashlib.sha256(f"{service}/{number}".encode()).digest()
        status = 503 if int.from_bytes(digest[16:]) % _FAILS_ONE_IN == 0 else 200
        yield ts, context, generated, status, digest[:16].hex()


def timestamp_us(text: str) -> int:
    """``2023-11-16 18:17:03.9799600`` -> microseconds since the epoch, UTC; digits past the sixth are cut off."""
    whole, _, fraction = text.partition(".")
    seconds = (dt.datetime.fromisoformat(whole).replace(tzinfo=dt.UTC) - _EPOCH) // dt.timedelta(seconds=1)
    return seconds * 1_000_000 + int(fraction[:6].ljust(6, "0"))


def requests() -> list[Request]:
    """The trace as it is in the files."""
    return [
        Request(service, timestamp_us(ts), int(context), int(generated), status, trace_id)
        for service in SERVICES
        for ts, context, generated, status, trace_id in _lines(service)
    ]


def land_trace(folder: Path, pieces: int) -> int:
    """Lands the trace in ``pieces`` CSV files, shuffled; how many requests there are.

    Every file holds requests of the whole hour: to an aggregate, nearly each of them is late.
    """
    lines = [(line[0], ",".join((service, *map(str, line)))) for service in SERVICES for line in _lines(service)]
    lines.sort()
    random.Random(SEED).shuffle(lines)
    for piece in range(pieces):
        part = lines[piece * len(lines) // pieces : (piece + 1) * len(lines) // pieces]
        land(folder, f"trace-{piece:04d}.csv", (line for _, line in part))
    return len(lines)


def recount(events: list[Request], width_us: int) -> dict[tuple[str, int], Row]:
    """(service, slot) -> its row, added up one event at a time in whole numbers."""
    rows: dict[tuple[str, int], Row] = {}
    for event in events:
        key = (event.service, event.ts_us - event.ts_us % width_us)
        row = rows.get(key, Row(0, 0, 0, 0, 0, 0))
        rows[key] = Row(
            row.requests + 1,
            row.context_tokens + event.context_tokens,
            row.generated_tokens + event.generated_tokens,
            max(row.context_tokens_max, event.context_tokens),
            max(row.generated_tokens_max, event.generated_tokens),
            row.errors + (event.status >= FAILED),
        )
    return rows
