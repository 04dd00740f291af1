"""Errors as HTTP has them: a status, and ``{"error": ..., "reason": ..., "details": {...}}``.

``reason`` is the error's class. A conflict is 409, as is a row or a table that is there already. A limit is 429, with
``Retry-After`` where it helps to wait, and not where less has to be asked for; so is 503, always.
"""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Any, Final

import grpc

from kivi.errors import CommitUnknown, InvalidArgument, KiviError, ResourceExhausted, SnapshotTooOld
from kivi.wire.status import status_code

__all__ = [
    "BodyTooLarge",
    "NotAcceptable",
    "RequestTimeout",
    "UnsupportedMediaType",
    "body_of",
    "retry_after",
    "status_of",
    "whole_seconds",
]


class BodyTooLarge(ResourceExhausted):
    """Send less at once."""


class RequestTimeout(InvalidArgument):
    """The body did not come in time, or not whole."""


class UnsupportedMediaType(InvalidArgument):
    """Send another Content-Type or Content-Encoding."""


class NotAcceptable(InvalidArgument):
    """Ask for another format."""


_BY_KIND: Final = {
    BodyTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    RequestTimeout: HTTPStatus.REQUEST_TIMEOUT,
    UnsupportedMediaType: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    NotAcceptable: HTTPStatus.NOT_ACCEPTABLE,
    CommitUnknown: HTTPStatus.SERVICE_UNAVAILABLE,
    SnapshotTooOld: HTTPStatus.CONFLICT,
}
_BY_CODE: Final = {
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}


def retry_after(status: int, error: KiviError) -> list[tuple[str, str]]:
    """The header of an answer that it helps to wait for."""
    retry_s = error.details.get("retry_s", 1.0 if status == 503 else None)
    if status not in (429, 503) or retry_s is None:
        return []
    return [("Retry-After", whole_seconds(float(retry_s)))]


def whole_seconds(retry_s: float) -> str:
    """As ``Retry-After`` says it: whoever waits so long does not come too early."""
    return str(max(1, math.ceil(retry_s)))


def status_of(error: KiviError) -> HTTPStatus:
    for kind, status in _BY_KIND.items():
        if isinstance(error, kind):
            return status
    return _BY_CODE.get(status_code(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def body_of(error: KiviError) -> bytes:
    told: dict[str, Any] = {"error": error.message, "reason": type(error).__name__}
    if error.details:
        told["details"] = error.details
    text = json.dumps(told, ensure_ascii=False, default=_text)
    return text.encode("utf-8", "backslashreplace")  # half a character, from a client's JSON, becomes what it was there


def _text(value: object) -> str:
    return "0x" + value.hex() if isinstance(value, bytes) else str(value)
