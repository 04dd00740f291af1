"""Goal 12: what secondary views cost a writer.

Rows of five columns are loaded into an empty row table, in transactions of 2,000, by a client: without views, and with
one and two. Before a figure is believed, every view has as many rows as the table.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import pyarrow as pa

import kivi
from bench.context import Context
from bench.sheet import Figures, Ratio, Sheet
from bench.verify import same

__all__ = ["sheet", "take"]

_ROWS: Final = 200_000
_BATCH: Final = 2_000
_VIEWS: Final = {"by_name": (["name", "id"], ["balance"]), "by_city": (["city", "id"], list[str]())}


def sheet() -> Sheet:
    def cost(figures: Figures) -> float:
        return figures["kivi", "2 views"] / figures["kivi", "0 views"]

    return Sheet("goal12", "Views: loading rows beside them", [Ratio("rows with two / without", cost, at_least=1 / 3)])


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    rows = _rows(_ROWS // 20 if context.quick else _ROWS)
    for views in range(len(_VIEWS) + 1):
        sheet.record("kivi", f"{views} views", _load(context, rows, views), "rows/s", rows=rows.num_rows)


def _rows(count: int) -> pa.Table:
    rng = np.random.default_rng(12)
    ids = rng.permutation(count)
    names, cities = rng.integers(0, 1_000_000, count), rng.integers(0, 500, count)
    return pa.table(
        {
            "id": ids,
            "name": [f"name-{n:06d}" for n in names],
            "city": [f"city-{n:03d}" for n in cities],
            "email": [f"user{n}@example.org" for n in ids],
            "balance": rng.integers(0, 1_000_000, count),
        }
    )


def _load(context: Context, rows: pa.Table, views: int) -> float:
    """Rows a second."""
    with context.server() as server, server.connect() as db:
        columns = {"name": "string", "city": "string", "email": "string", "balance": kivi.sum("int64")}
        db.create_table("accounts", key={"id": "int64"}, columns=columns)
        named = list(_VIEWS.items())[:views]
        for name, (key, carried) in named:
            db.create_view(name, source="accounts", key=key, columns=carried)
        began = time.monotonic()
        for at in range(0, rows.num_rows, _BATCH):
            db.write("accounts", rows.slice(at, _BATCH))
        took = time.monotonic() - began
        with db.snapshot() as snap:
            for name in ("accounts", *(name for name, _ in named)):
                same(f"rows of {name}", snap.to_arrow(name, columns=["id"]).num_rows, rows.num_rows)
    return float(rows.num_rows / took)
