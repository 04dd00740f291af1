"""The short names of the public surface: operators for schemas, and the transaction decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from kivi.errors import InvalidArgument
from kivi.model.schema import OperatorCall

__all__ = ["combine", "count", "max", "min", "sum", "transactional"]


def sum(argument: str) -> OperatorCall:
    """In a table's columns: a delta column of that type. In an aggregate's measures: the sum of that column."""
    return OperatorCall("sum", argument)


def min(argument: str) -> OperatorCall:
    """In a table's columns: a delta column of that type. In an aggregate's measures: the least of that column."""
    return OperatorCall("min", argument)


def max(argument: str) -> OperatorCall:
    """In a table's columns: a delta column of that type. In an aggregate's measures: the largest of that column."""
    return OperatorCall("max", argument)


def count(argument: str | None = None) -> OperatorCall:
    """The number of events, or of those where the column is not null. Kept as a SUM of 1."""
    return OperatorCall("count", argument)


def combine(measure: str) -> OperatorCall:
    """In an aggregate whose source is an aggregate: the states of that measure of its source, combined."""
    return OperatorCall("combine", measure)


def transactional(function: Callable[..., Any]) -> Callable[..., Any]:
    """``@kivi.transactional``: ``f(db, ...)`` runs in a transaction, again after a conflict; ``f(tx, ...)`` joins tx.

    A coroutine function takes an asyncio database or transaction.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(db_or_tx: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(db_or_tx, "transaction"):

                async def call(tx: Any) -> Any:
                    return await function(tx, *args, **kwargs)

                return await db_or_tx.run(call)
            return await function(db_or_tx, *args, **kwargs)

        return awaited

    @functools.wraps(function)
    def wrapper(db_or_tx: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(db_or_tx, "transaction"):
            return db_or_tx.run(lambda tx: function(tx, *args, **kwargs))
        if not hasattr(db_or_tx, "commit_ts"):
            raise InvalidArgument(f"the first argument is a database or a transaction, not {db_or_tx!r}")
        return function(db_or_tx, *args, **kwargs)

    return wrapper
