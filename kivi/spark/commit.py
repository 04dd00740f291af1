"""The one transaction in which staged data get into their tables, whoever staged them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kivi.errors import CommitUnknown
from kivi.spark.options import Options

if TYPE_CHECKING:
    from kivi.client.database import Database, Transaction

__all__ = ["commit_stages"]

_log = logging.getLogger(__name__)


def commit_stages(
    options: Options,
    stages: Mapping[str, Sequence[bytes]],
    batch: tuple[str, int] | None = None,
    also: Callable[[Transaction], None] | None = None,
    *,
    overwrite: bool = False,
) -> tuple[int, int]:
    """Table -> its stages, all in one transaction, with what ``also`` writes; (its snapshot, its commit timestamp).

    ``overwrite``: in place of what the tables hold.

    A batch token makes it safe to try again whatever became of the attempt before. Without one, only an attempt that
    is known to have done nothing is followed by another; and a stage is committed once, whoever names it.
    """

    def attempt(db: Database) -> tuple[int, int]:
        for table in stages:
            db.describe(table)  # this process may have known one of that name that was dropped since
        with db.transaction(batch=batch) as tx:
            started = tx.start_ts
            for table, ids in stages.items():
                if overwrite:
                    tx.overwrite(table)
                if ids:
                    tx.append_stages(table, ids, late=options.late_events)
            if also is not None:
                also(tx)
            return started, tx.commit()

    counted = list(stages) if options.late_events == "drop" else []
    before = _late(options, counted)
    ended = options.ask(attempt, *(() if batch is None else (CommitUnknown,)))
    for table, dropped in _late(options, counted).items():
        if dropped > before[table]:
            _log.warning(
                "events were dropped that lay below the retention floor of table %r: it was %d of them, and is %d now",
                table, before[table], dropped,
            )  # fmt: skip
    return ended


def _late(options: Options, tables: Sequence[str]) -> dict[str, int]:
    """How many late events each table has dropped so far."""

    return options.ask(
        lambda db: {table: int(db.describe(table)["statistics"].get("late_dropped", 0)) for table in tables}
    )
