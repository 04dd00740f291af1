"""The one table between kivi's errors and gRPC's status codes, used by both ends.

A failed call carries a ``google.rpc.Status`` in ``grpc-status-details-bin`` with one
``google.rpc.ErrorInfo``: domain "kivi", reason = the error's class, metadata = its details. A request
that fails inside a session carries the same facts in an ``Error`` message. Either way a client gets
the error back with the class and attributes it had on the server.

Details travel as JSON, one string per detail. What JSON has no type for is an object with one member:

========== ============================= ========== ==================================
tuple      ``{"$tuple": [...]}``         bytes      ``{"$bytes": "<base64>"}``
Decimal    ``{"$decimal": "1.50"}``      datetime   ``{"$time": <us since 1970 UTC>}``
========== ============================= ========== ==================================
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kivi import errors
from kivi.wire.v1 import types_pb2

__all__ = ["DOMAIN", "from_error", "from_rpc_error", "status_code", "to_error", "to_rich_status"]

DOMAIN: Final = "kivi"
DETAILS_KEY: Final = "grpc-status-details-bin"
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

# The error, and the status code it travels under. A class that is not here travels as its nearest base.
TABLE: Final[dict[type[errors.KiviError], grpc.StatusCode]] = {
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.Retryable: grpc.StatusCode.ABORTED,
    errors.SnapshotTooOld: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfSequence: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CommitUnknown: grpc.StatusCode.UNKNOWN,
    errors.Disconnected: grpc.StatusCode.UNAVAILABLE,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DiskFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SchemaError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.EventsRetracted: grpc.StatusCode.INVALID_ARGUMENT,
    errors.FeatureOff: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RowExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.StoreInUse: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotAStore: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FormatTooNew: grpc.StatusCode.FAILED_PRECONDITION,
    errors.KiviError: grpc.StatusCode.INTERNAL,
}
_BY_REASON: Final = {kind.__name__: kind for kind in TABLE}

# What a status without our details becomes: gRPC itself and proxies make those.
_BARE: Final[dict[grpc.StatusCode, type[errors.KiviError]]] = {
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.ABORTED: errors.Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.UNIMPLEMENTED: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.OUT_OF_RANGE: errors.OutOfRange,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
}


def _known(error: errors.KiviError) -> type[errors.KiviError]:
    return next(kind for kind in type(error).__mro__ if kind in TABLE)  # KiviError ends the search


def status_code(error: errors.KiviError) -> grpc.StatusCode:
    return TABLE[_known(error)]


def _pack(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"$tuple": [_pack(item) for item in value]}
    if isinstance(value, (list, set, frozenset)):
        return [_pack(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _pack(item) for name, item in value.items()}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, decimal.Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, dt.datetime):
        return {"$time": (value - _EPOCH) // dt.timedelta(microseconds=1)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            ((name, inner),) = value.items()
            match name:
                case "$tuple":
                    return tuple(_unpack(item) for item in inner)
                case "$bytes":
                    return base64.b64decode(inner)
                case "$decimal":
                    return decimal.Decimal(inner)
                case "$time":
                    return _EPOCH + dt.timedelta(microseconds=inner)
        return {name: _unpack(item) for name, item in value.items()}
    return value


def _metadata(error: errors.KiviError) -> dict[str, str]:
    return {name: json.dumps(_pack(value)) for name, value in error.details.items()}


def _rebuild(reason: str, message: str, metadata: Mapping[str, str]) -> errors.KiviError:
    kind = _BY_REASON.get(reason, errors.KiviError)
    details = {}
    for name, text in metadata.items():
        try:
            details[name] = _unpack(json.loads(text))
        except (ValueError, TypeError, decimal.InvalidOperation, OverflowError):
            details[name] = text
    try:
        return kind(message, **details)
    except TypeError:  # a detail that this version's class does not know
        error = kind(message)
        error.details.update(details)
        return error


def to_error(error: BaseException) -> types_pb2.Error:
    """An error as a session carries it. What is not a KiviError is a fault of ours: INTERNAL, without its text."""
    if not isinstance(error, errors.KiviError):
        error = errors.KiviError("the server failed to answer this request; its log says why")
    kind = _known(error)
    return types_pb2.Error(
        code=TABLE[kind].value[0], message=error.message, reason=kind.__name__, metadata=_metadata(error)
    )


def from_error(error: types_pb2.Error) -> errors.KiviError:
    """The inverse of ``to_error``."""
    return _rebuild(error.reason, error.message, error.metadata)


def to_rich_status(error: errors.KiviError, retry: error_details_pb2.RetryInfo | None = None) -> bytes:
    """The error as the ``google.rpc.Status`` of a failed call; ``retry``: when to try again, for clients of others."""
    packed = to_error(error)
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=packed.reason, domain=DOMAIN, metadata=dict(packed.metadata)))
    status = status_pb2.Status(code=packed.code, message=packed.message, details=[info])
    if retry is not None:
        status.details.add().Pack(retry)
    return bytes(status.SerializeToString())


_BROKEN_HERE: Final = "Internal error from Core"
"""What gRPC for asyncio calls it, now and then, when a connection breaks under a call: nothing that a server said."""


def from_rpc_error(error: grpc.RpcError) -> errors.KiviError:
    """A failed call (sync or asyncio) as the error that the server raised, or the nearest to gRPC's own."""
    code: grpc.StatusCode = error.code()
    message = error.details() or code.name
    trailing: Any = error.trailing_metadata()
    for name, value in trailing or ():
        if name == DETAILS_KEY:
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return _rebuild(info.reason, status.message, info.metadata)
    if code is grpc.StatusCode.INTERNAL and message == _BROKEN_HERE:
        return errors.Unavailable("the connection was lost")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        message = "the server does not know this call: it is older than 0.2, which this client needs: upgrade it"
    kind = _BARE.get(code, errors.KiviError)
    return kind(f"{code.name}: {message}" if kind is errors.KiviError else message)
