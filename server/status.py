"""Errors to gRPC status. The table itself is ``kivi.wire.status``: both ends must agree, so there is one."""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any, Final, NoReturn

import grpc
from google.rpc import error_details_pb2
from kivi_server.logs import request_id

from kivi.errors import KiviError
from kivi.wire.status import DETAILS_KEY, status_code, to_error, to_rich_status

__all__ = ["abort", "to_error", "told"]

_log = logging.getLogger("kivi.server")
_RETRY_KEY: Final = "google.rpc.retryinfo-bin"


def told(error: BaseException, what: str, request: str) -> KiviError:
    """What a client is told of it. A fault of the server is logged, and the client told where in the log to look."""
    if isinstance(error, KiviError):
        return error
    _log.error("%s failed by a fault of the server", what, exc_info=error, extra={"request": request})
    return KiviError(f"the server failed to answer this request; its log says why, at request {request}")


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: BaseException, *, retry_s: float | None = None
) -> NoReturn:
    """Ends a call with the error's status and details; ``retry_s``: and says after how long to try again."""
    error = told(error, "a call", request_id(context.invocation_metadata() or ()))
    if retry_s is None:
        trailing: tuple[tuple[str, bytes], ...] = ((DETAILS_KEY, to_rich_status(error)),)
    else:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(dt.timedelta(seconds=retry_s))
        # In the status' details, as gRPC has it, and by itself, where OpenTelemetry's Python exporter looks for it.
        trailing = ((DETAILS_KEY, to_rich_status(error, retry)), (_RETRY_KEY, retry.SerializeToString()))
    await context.abort(status_code(error), error.message, trailing)
    raise AssertionError("unreachable")
