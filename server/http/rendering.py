"""Answers as text and as Arrow, and which of these a request asks for.

============================================= ======================================================================
``application/json``                          ``{"snapshot": 12, "more": false, "rows": [{...}, ...]}``
``application/x-ndjson``                      a row a line
``text/csv``                                  the same with a header line
``application/vnd.apache.arrow.stream``       an Arrow IPC stream, as ``snap.to_arrow`` gives it
============================================= ======================================================================

Of SQL's columns with one name the later ones are called ``name_1``, ``name_2``; NaN is null, the infinities are texts,
and its sums of whole numbers, of 128 bits, whole numbers.
In text times are ISO 8601 in UTC, decimals texts (``"12.50"``; a JSON number would be rounded by its reader), bytes
``0x`` and hexadecimal. Of /rows decimals are numbers, as they always were. Whole numbers are numbers; to a reader whose
numbers are doubles, as JavaScript's are, and who says so by ``Accept: application/json;integers=text``, those beyond
2^53 - 1 are texts.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
from kivi_server.http.errors import NotAcceptable

from kivi.arrow.columns import distinct_names, is_hugeint, rows_from_batch
from kivi.arrow.ipc import encode_ipc
from kivi.model.csv_texts import csv_line
from kivi.model.given import shown
from kivi.model.quantiles import Quantiles
from kivi.model.values import Top

__all__ = [
    "ARROW",
    "CSV",
    "JSON",
    "MEDIA",
    "NDJSON",
    "accepted",
    "compact",
    "csv_of",
    "plain",
    "reads_doubles",
    "rendered",
    "rows_of",
    "types_of",
]

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
CSV: Final = "text/csv"
ARROW: Final = "application/vnd.apache.arrow.stream"
_FORMS: Final = {"json": JSON, "ndjson": NDJSON, "csv": CSV, "arrow": ARROW}
MEDIA: Final = tuple(_FORMS.values())
_SAFE_MAX: Final = (1 << 53) - 1
"""JavaScript's ``Number.MAX_SAFE_INTEGER``."""
_WILD: Final = {"*/*": JSON, "application/*": JSON, "text/*": CSV, "application/ndjson": NDJSON}


def accepted(accept: str, named: str | None = None) -> str:
    """The media type to answer in: ``named`` (json, ndjson, csv, arrow), or the one that an Accept header likes best.

    Raises NotAcceptable.
    """
    if named is not None:
        if named not in _FORMS:
            raise NotAcceptable(f"parameter format is {', '.join(_FORMS)}, not {shown(named)}")
        return _FORMS[named]
    best, found = 0.0, ""
    for each in (accept or "*/*").split(","):
        name, *parameters = [part.strip().lower() for part in each.split(";")]
        media = _WILD.get(name, name if name in _FORMS.values() else "")
        if media and (weight := _weight(parameters)) > best:
            best, found = weight, media
    if not found:
        raise NotAcceptable(f"Accept asks for none of {', '.join(_FORMS.values())}")
    return found


def reads_doubles(accept: str) -> bool:
    """Whether an Accept header says that its reader's numbers are doubles: ``integers=text``."""
    return any(part.strip().lower() == "integers=text" for part in accept.replace(",", ";").split(";"))


def _weight(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Of an Arrow table, as callers see them."""
    return [row for batch in table.to_batches() for row in rows_from_batch(batch)]


def types_of(table: pa.Table) -> dict[str, str]:
    """What Arrow calls the types of the columns, by the names that ``rendered`` gives them."""
    return dict(zip(distinct_names(table.column_names), map(str, table.schema.types), strict=True))


def rendered(media: str, table: pa.Table, about: Mapping[str, Any], *, doubles: bool = False) -> bytes:
    """An Arrow table in a media type; ``about``: what JSON says beside the rows; ``doubles``: of ``plain``."""
    if media == ARROW:
        return bytes(encode_ipc(table))
    table = table.rename_columns(distinct_names(table.column_names))  # of SQL
    rows = rows_of(table)
    for field in table.schema:
        if is_hugeint(field.type):
            for row in rows:
                row[field.name] = None if row[field.name] is None else int(row[field.name])
    if media == CSV:
        return csv_of(table.column_names, rows, exact=True)
    flat = [{name: plain(value, exact=True, doubles=doubles) for name, value in row.items()} for row in rows]
    if media == NDJSON:
        return b"".join(compact(row) + b"\n" for row in flat)
    return compact({**about, "rows": flat})


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def csv_of(names: Sequence[str], rows: Iterable[Mapping[str, Any]], *, exact: bool = False) -> bytes:
    lines = [csv_line(names)]
    lines += (csv_line(_cell(plain(row[name], exact=exact)) for name in names) for row in rows)
    return "".join(f"{line}\r\n" for line in lines).encode()


def _cell(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, dict, list)) else str(value)


def plain(value: Any, *, exact: bool = False, doubles: bool = False) -> Any:
    """A value as JSON has it; ``exact``: decimals as text, else as numbers; ``doubles``: whole numbers that no double
    holds as text."""
    if isinstance(value, dt.datetime):
        return value.isoformat(timespec="microseconds" if value.microsecond else "seconds").replace("+00:00", "Z")
    if isinstance(value, bytes):
        return "0x" + value.hex()
    if isinstance(value, (Quantiles, Top)):
        value = value.to_plain()
    if isinstance(value, Mapping):
        return {str(name): plain(each, exact=exact, doubles=doubles) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, exact=exact, doubles=doubles) for each in value]
    if doubles and type(value) is int and abs(value) > _SAFE_MAX:
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (dt.date, dt.time, dt.timedelta, uuid.UUID)):
        return str(value)
    if isinstance(value, Decimal):
        return f"{value:f}" if exact else float(value)
    return value
