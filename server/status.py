"""Errors to gRPC status. The table itself is ``kivi.client_errors``: both ends must agree, so there is one."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc
from kivi_server.logs import request_id

from kivi.client_errors import DETAILS_KEY, status_code, to_error, to_rich_status
from kivi.errors import KiviError

__all__ = ["abort", "to_error"]

_log = logging.getLogger("kivi.server")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """Ends a call with the error's status and details."""
    if not isinstance(error, KiviError):
        request = request_id(context.invocation_metadata() or ())
        _log.error("a call failed by a fault of the server", exc_info=error, extra={"request": request})
        error = KiviError(f"the server failed to answer this request; its log says why, at request {request}")
    await context.abort(status_code(error), error.message, ((DETAILS_KEY, to_rich_status(error)),))
    raise AssertionError("unreachable")
