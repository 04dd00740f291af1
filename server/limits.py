"""The published limits of the wire; those of the store are in ``kivi.runtime.settings``.

Every one is told to clients in the session's first frame, and a request beyond one is answered with an
error whose details name the limit and its number: nothing is cut off silently.
"""

from __future__ import annotations

from typing import Final

from kivi.encoding.keys import KEY_BYTES_MAX
from kivi.errors import ResourceExhausted
from kivi.runtime.settings import MIB, Settings
from kivi.wire.methods import HEADER_BYTES_MAX, MESSAGE_BYTES_MAX
from kivi.wire.v1 import types_pb2

__all__ = [
    "BATCH_BYTES_MAX",
    "COMMIT_EACH_BYTES_MAX",
    "COMMIT_EACH_MAX",
    "COMMIT_EACH_OPERATIONS_MAX",
    "FRAME_REQUESTS_MAX",
    "GET_KEYS_MAX",
    "HEADER_BYTES_MAX",
    "MESSAGE_BYTES_MAX",
    "QUEUED_BYTES_MAX",
    "SESSION_REQUESTS_MAX",
    "SESSION_SCANS_MAX",
    "SESSION_TRANSACTIONS_MAX",
    "STALL_S_MAX",
    "exceeded",
    "message",
]

BATCH_BYTES_MAX: Final = 256 * MIB  # one Arrow batch, decoded
STAGE_BYTES_MAX: Final = 256 * MIB  # all batches of one stage, decoded
FRAME_REQUESTS_MAX: Final = 100_000
COMMIT_EACH_MAX: Final = 256
COMMIT_EACH_BYTES_MAX: Final = 4_096
COMMIT_EACH_OPERATIONS_MAX: Final = 64
GET_KEYS_MAX: Final = 100_000
SESSION_TRANSACTIONS_MAX: Final = 10_000
SESSION_SCANS_MAX: Final = 100
SESSION_REQUESTS_MAX: Final = 20_000  # not answered yet; beyond it the server stops reading for a while
QUEUED_BYTES_MAX: Final = 64 * MIB  # of one session, in each direction
STALL_S_MAX: Final = 60.0  # a client that accepts no byte for this long is dropped
PAGE_ROWS: Final = 4_096
PAGE_ROWS_MAX: Final = 65_536
PAGE_BYTES: Final = 4 * MIB  # a page of a scan is cut at about this, unless it is one row


def exceeded(limit: str, maximum: int, found: int, what: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"{what}: {found:,} is beyond the limit {limit} = {maximum:,}: send less at once", limit=limit, maximum=maximum
    )


def message(settings: Settings) -> types_pb2.Limits:
    return types_pb2.Limits(
        message_bytes_max=MESSAGE_BYTES_MAX,
        key_bytes_max=KEY_BYTES_MAX,
        value_bytes_max=settings.max_value_bytes,
        transaction_operations_max=settings.max_transaction_operations,
        batch_rows_max=settings.max_append_rows,
        batch_bytes_max=BATCH_BYTES_MAX,
        session_transactions_max=SESSION_TRANSACTIONS_MAX,
        session_scans_max=SESSION_SCANS_MAX,
        session_requests_max=SESSION_REQUESTS_MAX,
        get_keys_max=GET_KEYS_MAX,
        frame_requests_max=FRAME_REQUESTS_MAX,
        header_bytes_max=HEADER_BYTES_MAX,
        commit_each_max=COMMIT_EACH_MAX,
        commit_each_bytes_max=COMMIT_EACH_BYTES_MAX,
        commit_each_operations_max=COMMIT_EACH_OPERATIONS_MAX,
    )
