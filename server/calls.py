"""What clients asked for, how it ended and how long it took: counted by call and by status code.

A session's requests are counted as ``Session/<request>``, since the stream itself may last for days. The time of a
call is from when the server had it whole until its answer was made; of a commit, until it was durable and visible.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from kivi_server import status
from kivi_server.logs import request_id

from kivi.errors import InvalidArgument, KiviError
from kivi.runtime.histogram import Histogram
from kivi.wire.status import status_code

__all__ = ["WHOLE", "Calls", "Context"]

_log = logging.getLogger("kivi.server")
WHOLE: Final = frozenset(
    {
        "Consolidate",
        "Checkpoint",
        "Backup",
        "MoveShards",
        "CancelMove",
        "RebalanceShards",
        "ForgetNode",
        "VerifyCluster",
    }
)
"""Calls about all of the store: not for tokens of some tables."""
_LONG: Final = WHOLE | {
    "Session",
    "Stage",
    "CreateAggregate",
    "CreateAggregates",
    "AlterAggregate",
    "CreateView",
    "Subscribe",
}
"""Calls that last as long as their client or the disk takes."""
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler = Callable[[Any, Context], Awaitable[Any]]
RetryS = Callable[[Exception], float | None]


class Calls:
    """Of one server. Thread safe. Calls that take longer than ``slow_s`` are logged."""

    def __init__(self, slow_s: float = 1.0) -> None:
        self.slow_s = slow_s
        self._lock = threading.Lock()
        self._codes: Counter[tuple[str, str]] = Counter()
        self._times: dict[str, Histogram] = {}

    def ended(self, call: str, seconds: float, error: BaseException | None = None, count: int = 1) -> None:
        """``count`` calls of one kind that took the same time and ended alike."""
        self._ended(call, seconds, "OK" if error is None else code_of(error).name, count)

    def _ended(self, call: str, seconds: float, code: str, count: int = 1) -> None:
        with self._lock:
            self._codes[call, code] += count
            times = self._times.get(call)
            if times is None:
                times = self._times[call] = Histogram()
        times.observe(seconds, count)

    def slow(self, call: str, seconds: float, request: str, client: str, code: str = "OK") -> None:
        """Logs it."""
        facts = {"call": call, "request": request, "client": client, "ms": round(seconds * 1e3), "code": code}
        _log.warning("a call took long", extra=facts)

    def codes(self) -> dict[tuple[str, str], int]:
        """(call, status code) -> how many."""
        with self._lock:
            return dict(self._codes)

    def times(self) -> dict[str, Histogram]:
        with self._lock:
            return dict(self._times)

    def counted(
        self, call: str, handler: Handler, retry_s: RetryS | None = None, received: Any = lambda data: data
    ) -> Handler:
        """A handler of one request, or of streams that it reads and writes by itself. What it raises ends the call.

        ``received`` makes the request of what came: gRPC's own way to do so ends a call that is none as UNKNOWN.

        ``retry_s``: after how long the caller should try again what failed like that, if at all.
        """

        async def measured(request: Any, context: Context) -> Any:
            began = time.monotonic()
            code = grpc.StatusCode.CANCELLED  # what is left if it ends without a word
            try:
                answer = await handler(received(request), context)
                code = grpc.StatusCode.OK
                return answer
            except Exception as raised:
                is_none = isinstance(raised, DecodeError)
                error = InvalidArgument(f"this is no message of the call {call}") if is_none else raised
                code = code_of(error)
                await status.abort(context, error, retry_s=retry_s(error) if retry_s is not None else None)
            finally:
                took = time.monotonic() - began
                self._ended(call, took, code.name)
                if took > self.slow_s and call not in _LONG:
                    metadata = context.invocation_metadata() or ()
                    self.slow(call, took, request_id(metadata), context.peer(), code.name)

        return measured


def code_of(error: BaseException) -> grpc.StatusCode:
    return status_code(error) if isinstance(error, KiviError) else grpc.StatusCode.INTERNAL
