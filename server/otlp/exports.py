"""Exports, as they come over gRPC and HTTP: decoded, each span and point to the intake of its table, one answer.

An export is answered once all of it is durable and visible, or left out for a reason. Where a part of it fails
in a way that sending it again may mend, the whole export fails, and what was stored counts once all the same. Spans
whose table does not fit, or that the sender's token is not for, are told as left out, and the others are stored. A
token that is for no table of spans, or of points, sends none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from kivi_server.clients import Client
from kivi_server.otlp.intake import Intake, Taken
from kivi_server.otlp.metric_tables import NAMED_KINDS
from kivi_server.otlp.spans import Spans
from kivi_server.otlp.tables import INVOCATIONS_KIND, DoesNotFit
from kivi_server.requests import stopping
from kivi_server.sessions import Sessions

from kivi.errors import PermissionDenied, ResourceExhausted

__all__ = ["Exports"]

_WAITING_BYTES_MAX: Final = 64 << 20  # of requests that are not answered yet


class Exports:
    """Of one server; its event loop's. The other arguments are those of ``Intake``."""

    def __init__(
        self, sessions: Sessions, table: str, retention_s: float, window_s: float, spans_max: int, *, drop_late: bool
    ) -> None:
        def intake(name: str, **kind: object) -> Intake:
            return Intake(sessions, name, retention_s, window_s, spans_max, drop_late=drop_late, **kind)  # type: ignore[arg-type]

        self.sessions = sessions
        self.invocations = intake(table)
        self._others = {kind.name: intake(kind.name, kind=kind) for kind in NAMED_KINDS if kind.name != table}
        self._bytes = 0

    @property
    def _all(self) -> Sequence[Intake]:
        return (self.invocations, *self._others.values())

    def stats(self) -> dict[str, int | float]:
        """Those of ``kivi_server.metrics`` that are about spans and points."""
        each = [intake.stats() for intake in self._all]
        unfit = {f"otlp_unfit_{intake.kind.name}": int(intake.is_unfit) for intake in self._all}
        summed = {name: sum(stats.get(name, 0) for stats in each) for name in set().union(*each)}
        return {**summed, **unfit, "otlp_waiting_bytes": self._bytes}

    async def open(self) -> None:
        await self.invocations.open()

    def start(self) -> None:
        for intake in self._all:
            intake.start()

    def stop(self) -> None:
        for intake in self._all:
            intake.stop()

    async def take(
        self, data: bytes, decode: Callable[[bytes], Sequence[Spans]], allows: Callable[[str], bool], client: Client
    ) -> Taken:
        """An export as it was sent: ``decode`` reads it, off the event loop. Raises what it deserves: PermissionDenied
        where ``allows``, the sender's token, is for no table that the signal has, and ResourceExhausted where
        ``client``, the sender, has used its quota of writes, of which spans and points that can be used are events."""
        if self.sessions.stopping:
            raise stopping()
        client.check_writes()
        nbytes = len(data)
        self._reserve(nbytes)
        try:
            brought = await asyncio.get_running_loop().run_in_executor(self.sessions.writes, decode, data)
            tables = [self.invocations.table if each.kind is INVOCATIONS_KIND else each.kind.name for each in brought]
            if not any(map(allows, tables)):
                raise PermissionDenied(f"this access token is for none of the tables {', '.join(tables)}")
            parts = [(intake, spans) for spans in brought if (intake := self._of(spans))]
            for intake, spans in parts:
                intake.check(spans)
            if self.sessions.stopping:
                raise stopping()
            client.check_writes()  # of many that were decoded together the first ones enter
            entering = [spans for intake, spans in parts if allows(intake.table)]
            client.take_writes(sum(spans.items for spans in entering), sum(spans.nbytes for spans in entering))
            taken = await asyncio.gather(*(_put(*part, allows) for part in parts), return_exceptions=True)
        finally:
            self._bytes -= nbytes
        return _together(taken)

    def _of(self, spans: Spans) -> Intake | None:
        if spans.kind is INVOCATIONS_KIND:
            return self.invocations
        return self._others.get(spans.kind.name) if len(spans) or spans.rejected or spans.passed_over else None

    def _reserve(self, nbytes: int) -> None:
        if self._bytes + nbytes > _WAITING_BYTES_MAX:
            raise ResourceExhausted(
                f"{self._bytes:,} bytes of exports wait to be committed, and {_WAITING_BYTES_MAX:,} are the limit: "
                "send them again in a moment",
                limit="otlp_waiting_bytes",
                maximum=_WAITING_BYTES_MAX,
                retry_s=1.0,
            )
        self._bytes += nbytes


async def _put(intake: Intake, spans: Spans, allows: Callable[[str], bool]) -> Taken:
    if not allows(intake.table):
        return intake.left_out(spans, f"the access token is not for table {intake.table!r}")
    if not len(spans):
        return intake.left_out(spans)
    try:
        return await intake.put(spans)
    except DoesNotFit as error:
        return intake.left_out(spans, error.message)


def _together(taken: Sequence[Taken | BaseException]) -> Taken:
    whole = Taken()
    for each in taken:
        if isinstance(each, BaseException):
            raise each
        whole.stored, whole.dropped = whole.stored + each.stored, whole.dropped + each.dropped
        whole.repeated, whole.rejected = whole.repeated + each.repeated, whole.rejected + each.rejected
    return whole
