"""The real trace: reading it, landing it in pieces for Spark, and counting it independently.

The files are in ``apm_demo/data`` with their attribution. Their times have seven digits after the point; kivi's
timestamps are microseconds. Both ways of reading cut the seventh digit off (floor), and so do not differ.
"""

from __future__ import annotations

import csv
import datetime as dt
import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

from apm_demo.landing import land
from apm_demo.rule import slot_us

__all__ = ["COLUMNS", "SEED", "SERVICES", "Request", "Row", "land_trace", "recount", "requests", "timestamp_us"]

SEED: Final = 20231116
"""Of the order in which the trace is replayed: the same in every run."""

SERVICES: Final = ("code", "conv")
COLUMNS: Final = ("service", "timestamp", "context_tokens", "generated_tokens")
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Request(NamedTuple):
    """One line of the trace."""

    service: str
    ts_us: int
    context_tokens: int
    generated_tokens: int


class Row(NamedTuple):
    """What an aggregate of the trace has to say of one service in one slot."""

    requests: int
    context_tokens: int
    generated_tokens: int
    context_tokens_max: int
    generated_tokens_max: int


def _lines(service: str) -> Iterator[list[str]]:
    text = files("apm_demo").joinpath("data", f"azure_llm_{service}.csv").read_text(encoding="utf-8")
    rows = csv.reader(text.splitlines())
    assert next(rows) == ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    yield from rows


def timestamp_us(text: str) -> int:
    """``2023-11-16 18:17:03.9799600`` -> microseconds since the epoch, UTC; digits past the sixth are cut off."""
    whole, _, fraction = text.partition(".")
    seconds = (dt.datetime.fromisoformat(whole).replace(tzinfo=dt.UTC) - _EPOCH) // dt.timedelta(seconds=1)
    return seconds * 1_000_000 + int(fraction[:6].ljust(6, "0"))


def requests() -> list[Request]:
    """The trace as it is in the files."""
    return [
        Request(service, timestamp_us(ts), int(context), int(generated))
        for service in SERVICES
        for ts, context, generated in _lines(service)
    ]


def land_trace(folder: Path, pieces: int) -> int:
    """Lands the trace in ``pieces`` CSV files, shuffled, values as they are; how many requests there are.

    Every file holds requests of the whole hour: to an aggregate, nearly each of them is late.
    """
    lines = [
        (ts, f"{service},{ts},{context},{generated}")
        for service in SERVICES
        for ts, context, generated in _lines(service)
    ]
    lines.sort()
    random.Random(SEED).shuffle(lines)
    for piece in range(pieces):
        part = lines[piece * len(lines) // pieces : (piece + 1) * len(lines) // pieces]
        land(folder, f"trace-{piece:04d}.csv", (line for _, line in part))
    return len(lines)


def recount(events: list[Request], width_us: int) -> dict[tuple[str, int], Row]:
    """(service, slot) -> its row, added up one event at a time in whole numbers."""
    rows: dict[tuple[str, int], Row] = {}
    for service, ts, context, generated in events:
        key = (service, slot_us(ts, width_us))
        count, context_sum, generated_sum, context_max, generated_max = rows.get(key, Row(0, 0, 0, 0, 0))
        rows[key] = Row(
            count + 1,
            context_sum + context,
            generated_sum + generated,
            max(context_max, context),
            max(generated_max, generated),
        )
    return rows
