"""Pauses between attempts: they grow, they are bounded, and they end with the time."""

from __future__ import annotations

import grpc

from kivi import NotFound, Retryable, errors
from kivi.api.retry import Retries, backoff_s
from kivi.wire.status import from_rpc_error

AGAIN = Retryable("again")


def test_pauses_grow_to_a_quarter_of_a_second_and_no_further():
    assert 0.0005 <= backoff_s(0) <= 0.001
    assert all(0.125 <= backoff_s(attempt) <= 0.25 for attempt in (8, 100, 1024, 10**6))  # 2.0**1024 is no float


def test_without_a_timeout_there_is_always_another():
    retries = Retries(None)
    assert all(retries.pause_s(AGAIN) for _ in range(2_000))


def test_a_pause_that_would_end_too_late_is_not_given():
    assert Retries(0.0).pause_s(AGAIN) is None
    retries = Retries(0.2)  # attempts that take no time: the pauses alone outgrow it
    assert any(retries.pause_s(AGAIN) is None for _ in range(20))


def test_a_table_of_another_generation_is_looked_up_anew_once():
    retries = Retries(10.0)
    assert retries.pause_s(NotFound("no such table")) is None
    assert retries.pause_s(NotFound("another generation", stale=True)) == 0.0
    assert retries.pause_s(NotFound("another generation", stale=True)) is None


def test_a_call_that_broke_in_grpc_itself_is_a_lost_connection() -> None:
    """Seen once in many runs: a session's connection is lost, and asyncio's gRPC calls it INTERNAL."""
    metadata = grpc.aio.Metadata()
    broken = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, "Internal error from Core")
    assert type(from_rpc_error(broken)) is errors.Unavailable
    fault = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, "something else")
    assert type(from_rpc_error(fault)) is errors.KiviError
