"""Applications: scopes of their batch tokens, and the warning when a second one feeds the same table.

::

    spark/<table>/<application id>     format("kivi"): the batches into this table
    spark/*/<application id>           foreachBatch: the batches, whichever tables they have rows for
    spark/<table>/*<application id>    foreachBatch: a mark that the application feeds this table, batch 0 and no other

The mark is what other applications' warnings see. It has no rows, so it may be set before the batch that it announces.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from dataclasses import replace

from kivi.spark.commit import commit_stages
from kivi.spark.options import Options

__all__ = ["SecondApplication", "announce", "scope_of", "warn_of_others"]

_log = logging.getLogger(__name__)


class SecondApplication(UserWarning):
    """A second application id begins to feed a table that another one has fed before."""


def scope_of(table: str, application_id: str) -> str:
    """The scope of the batch tokens of one application that feeds one table; ``*``: several at once."""
    return f"spark/{table}/{application_id}"


def warn_of_others(options: Options, application_id: str) -> bool:
    """Before its first batch: another application has fed the table, and perhaps with the same rows.

    Whether this one has fed it before.
    """
    prefix = scope_of(options.table, "")
    scopes = options.ask(lambda db: db.batch_scopes(prefix))
    if scope_of(options.table, application_id) in scopes:
        return True
    if scopes:
        ids = ", ".join(other.removeprefix(prefix) for other in scopes[:3]) + (", ..." if scopes[3:] else "")
        text = (
            f"application {application_id} begins to feed table {options.table!r}, which {len(scopes)} other(s) have "
            f"fed ({ids}). If it is an old query with a new checkpoint, the rows that it reads again are appended again"
        )
        warnings.warn(text, SecondApplication, stacklevel=3)
        _log.warning("%s", text)
    return False


def announce(options: Options, application_id: str, tables: Iterable[str]) -> None:
    """The same for an application that feeds several tables, each of which is marked at its first batch."""
    for table in tables:
        if not warn_of_others(replace(options, table=table), f"*{application_id}"):
            commit_stages(options, {}, batch=(scope_of(table, f"*{application_id}"), 0))
