"""``kivi mcp``: the store for language models, by the Model Context Protocol on standard input and output. Read only.

::

    { "mcpServers": { "kivi": { "command": "kivi", "args": ["mcp"],
                                "env": { "KIVI_ENDPOINT": "localhost:7420", "KIVI_TOKEN": "..." } } } }

Its tools are questions that the command line has too, in the same words: ``describe``, ``scan``, ``query``, ``match``
and ``sql``. Each answer is of one snapshot, which it names, and has at most ``ROWS_MAX`` rows; what is left out is
said. A model may do what the token may, and never write: there is no tool for it. What goes wrong with a question is
told to the model in the store's words, so that it can ask better.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kivi.cli import match as matching
from kivi.cli import query as querying
from kivi.cli.text import key_of, objects, outputs, plain
from kivi.errors import InvalidArgument, KiviError
from kivi.model.predicate_text import split_names, type_names, where

__all__ = ["ROWS_MAX", "serve"]

ROWS_MAX: Final = 500
_ROWS: Final = 100
"""Where no limit is given."""
_WHERE: Final = "a predicate such as status >= 500 & route == '/pay' & ts >= '2026-03-20T10:00:00Z'"


def serve(db: Any) -> None:
    """Answers until standard input ends. Raises InvalidArgument where the package ``mcp`` is not installed."""
    server(db).run("stdio")


def server(db: Any) -> Any:
    """The server of ``db``, a ``kivi.connect(...)``, with its tools."""
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError:
        raise InvalidArgument(
            "kivi mcp needs the package mcp, which is not installed here: pip install 'kivi[mcp]'"
        ) from None
    made = MCPServer(
        "kivi",
        log_level="WARNING",
        instructions="A store of events, online aggregates and rows. Begin with describe. Aggregates answer at once: "
        "prefer them (scan, query) to events. Times are UTC. Every answer names its snapshot; give it as as_of to ask "
        "more of the same state.",
    )
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in _tools(db):
        made.tool(annotations=reads, structured_output=False)(tool)
    return made


def _tools(db: Any) -> Iterable[Callable[..., Any]]:
    def describe(table: str = "") -> dict[str, Any]:
        """The columns of a table, their types, and what an aggregate measures; without a table, all tables."""
        return _told(lambda: db.describe(table) if table else {"tables": [db.describe(name) for name in db.tables()]})

    def scan(
        table: str,
        prefix: list[str] | None = None,
        where: str = "",
        columns: str = "",
        order_by: str = "",
        limit: int | None = None,
        as_of: int | None = None,
    ) -> dict[str, Any]:
        """Rows of a table. prefix: values of its first key columns; columns: names with commas between; order_by: names
        of columns, with - from the largest down."""
        ask = functools.partial(_scanned, table=table, prefix=prefix or [], predicate=where, columns=columns)
        return _answer(db, as_of, limit, lambda snap, most: ask(snap, order_by=order_by, limit=most))

    def query(
        table: str,
        measures: dict[str, str] | None = None,
        group_by: list[str] | None = None,
        where: str = "",
        start: str = "",
        end: str = "",
        derived: dict[str, str] | None = None,
        having: str = "",
        order_by: str = "",
        size: str = "",
        limit: int | None = None,
        as_of: int | None = None,
    ) -> dict[str, Any]:
        """A question of events, or of an aggregate's rows. measures: {"calls": "count()", "p": "quantiles(us)"}, of an
        aggregate {"p": "combine(latency)"}; group_by: columns, "slot=ts/5m" or "slow=us > 1000"; derived:
        {"p99": "quantile(p, 0.99)"}; size: windows of event time so long, such as 5m."""
        args = argparse.Namespace(
            table=table, measure=_words(measures), by=group_by or [], derived=_words(derived), start=start, end=end,
            where=where, having=having, order_by=order_by, offset=0, columns="",
            size=size or None, slide=None, session=None, tz=None,
        )  # fmt: skip
        return _answer(db, as_of, limit, lambda snap, most: querying.asked(snap, _limited(args, most)))

    def match(
        table: str,
        pattern: str,
        partition_by: list[str] | None = None,
        define: dict[str, str] | None = None,
        measures: dict[str, str] | None = None,
        within: str = "",
        start: str = "",
        end: str = "",
        where: str = "",
        skip: str = "past_last_row",
        limit: int | None = None,
        as_of: int | None = None,
    ) -> dict[str, Any]:
        """Events that follow each other as a pattern says, as SQL's MATCH_RECOGNIZE. pattern: "A B+ C"; define:
        {"B": "us > prev(us)"}; measures: {"began": "first(A.ts)", "n": "count(B)"}; within: 15m."""
        args = argparse.Namespace(
            table=table, pattern=pattern, by=partition_by or [], within=within or None, define=_words(define),
            measure=_words(measures), skip=skip, start=start, end=end, where=where,
        )  # fmt: skip
        return _answer(db, as_of, limit, lambda snap, most: matching.asked(snap, _limited(args, most)))

    def sql(text: str, as_of: int | None = None) -> dict[str, Any]:
        """A SELECT over all tables, in DuckDB's dialect."""
        return _answer(db, as_of, ROWS_MAX + 1, lambda snap, _: objects(snap.sql(text)))

    scan.__doc__ = f"{scan.__doc__} where: {_WHERE}."
    query.__doc__ = f"{query.__doc__} where: {_WHERE}."
    return describe, scan, query, match, sql


def _words(given: Mapping[str, str] | None) -> list[str]:
    return [f"{name}={text}" for name, text in (given or {}).items()]


def _limited(args: argparse.Namespace, limit: int) -> argparse.Namespace:
    return argparse.Namespace(**vars(args), limit=limit)


def _scanned(
    snap: Any, table: str, prefix: list[str], predicate: str, columns: str, order_by: str, limit: int
) -> Iterable[Any]:
    found = snap._table_schema(table).description()
    rows: Iterable[Any] = snap.scan(
        table,
        prefix=key_of(found, prefix, partial=True),
        where=where(predicate, type_names(found), "where") if predicate else None,
        columns=outputs(found, columns) if columns else None,
        order_by=split_names(order_by) if order_by else (),
        limit=limit,
    )
    return rows


def _answer(db: Any, as_of: int | None, limit: int | None, ask: Callable[[Any, int], Iterable[Any]]) -> dict[str, Any]:
    """``ask`` is given how many rows it may give: one more than are told, where it is said that there are more. That is
    where nobody has asked for so few."""

    def answered() -> dict[str, Any]:
        if limit is not None and limit < 0:
            raise InvalidArgument(f"limit is a number of rows, not {limit}")
        most = _ROWS if limit is None else min(limit, ROWS_MAX)
        asked = most + (most != limit)
        with db.snapshot(as_of=as_of) as snap:
            rows = list(itertools.islice(ask(snap, asked), asked))
            told = {"snapshot": snap.ts, "rows": rows[:most]}
            why = f"ask for less, or for up to {ROWS_MAX} by limit" if most < ROWS_MAX else "ask for less"
            return told | ({"more": f"only the first {most} rows: {why}"} if len(rows) > most else {})

    return _told(answered)


def _told(ask: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        found: dict[str, Any] = plain(ask())
        return found
    except KiviError as error:
        raise ToolError(f"{type(error).__name__}: {error.message}") from None
